"""Support deprecated arguments of `LLM.generate`: each works, and gives a DeprecationWarning."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

from vllm.entrypoints.offline.offline_run import Prompts, as_list
from vllm.errors import RequestError
from vllm.guided_decoding_params import REQUEST_FIELDS, GuidedDecodingParams
from vllm.inputs import PromptType
from vllm.sampling_params import SamplingParams

_STACK_LEVEL = 4
"""Stack levels from the warning to the caller of `LLM.generate`."""


def with_token_ids(
    prompts: Prompts | None, token_ids: list[int] | list[list[int]]
) -> list[PromptType]:
    """Convert the deprecated `prompt_token_ids` to prompts. Texts that are also given are only
    shown in outputs.
    """
    _warn(
        "The argument 'prompt_token_ids' is deprecated: pass "
        "prompts=[{'prompt_token_ids': [...]}, ...]"
    )
    lists = cast(list[list[int]], as_list(cast(Prompts, token_ids)))
    texts = [None] * len(lists) if prompts is None else as_list(prompts)
    if len(texts) != len(lists):
        raise RequestError(
            f"prompt_token_ids must have one entry for each of the {len(texts)} prompts, got "
            f"{len(lists)}",
            param="prompt_token_ids",
        )
    return [
        {"prompt_token_ids": ids, "prompt": text}
        if isinstance(text, str)
        else {"prompt_token_ids": ids}
        for text, ids in zip(texts, lists, strict=True)
    ]


def with_guided_options(
    params: SamplingParams | Sequence[SamplingParams], options: Any
) -> SamplingParams | list[SamplingParams]:
    """Return copies of the sampling parameters with the deprecated `guided_options_request`.

    Args:
        params: one object for all prompts, or one per prompt.
        options: a dict, or a data class with the same fields.

    Raises:
        RequestError: an option is not known, or the parameters have guided_decoding already.
    """
    _warn(
        "The argument 'guided_options_request' is deprecated: pass "
        "SamplingParams(guided_decoding=GuidedDecodingParams(...))"
    )
    guided = _read_options(options)
    if isinstance(params, SamplingParams):
        return _with_guided(params, guided)
    return [_with_guided(each, guided) for each in params]


def _read_options(options: Any) -> GuidedDecodingParams:
    if isinstance(options, GuidedDecodingParams):
        return options
    if dataclasses.is_dataclass(options) and not isinstance(options, type):
        options = dataclasses.asdict(options)
    if not isinstance(options, Mapping):
        raise RequestError(
            f"guided_options_request must be a dict, got {type(options).__name__}",
            param="guided_options_request",
        )
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := [name for name in given if name not in REQUEST_FIELDS]:
        raise RequestError(
            f"guided_options_request has no option {unknown[0]!r}; accepted: "
            f"{', '.join(REQUEST_FIELDS)}",
            param="guided_options_request",
        )
    return GuidedDecodingParams(**{REQUEST_FIELDS[name]: value for name, value in given.items()})


def _with_guided(params: SamplingParams, guided: GuidedDecodingParams) -> SamplingParams:
    if params.guided_decoding is not None:
        raise RequestError(
            "guided_options_request and SamplingParams(guided_decoding=...) cannot be used "
            "together: leave guided_options_request out",
            param="guided_options_request",
        )
    own = params.clone()
    own.guided_decoding = guided
    return own


def _warn(message: str) -> None:
    warnings.warn(message, DeprecationWarning, stacklevel=_STACK_LEVEL)
