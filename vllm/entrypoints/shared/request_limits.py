"""Limits for the lists and texts in a request: one table for all fields of all routes.

Every field with a list, or with texts to search for, has a row here, which names the flag of its
limit. The table is checked before a body is validated, so that refusing it is cheap. Bodies also
have limits in bytes and in JSON values.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm.entrypoints.anthropic.protocol import Conversation, MessagesRequest
from vllm.entrypoints.openai.protocol.chat import ChatFields
from vllm.entrypoints.openai.protocol.completion import CompletionRequest
from vllm.entrypoints.openai.protocol.pooling import (
    ClassificationRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from vllm.entrypoints.openai.protocol.responses import ResponsesRequest
from vllm.entrypoints.openai.protocol.sampling import SamplingFields
from vllm.entrypoints.openai.protocol.tokenization import DetokenizeRequest
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.errors import RequestError
from vllm.utils.arguments import flag_of


@dataclass(frozen=True)
class Limit:
    """The limit of one field.

    Attributes:
        setting: field of `ServerArgs` that says how many.
        unit: name of what is counted, in the plural.
        count: counts in a JSON value of any type; wrong types count as 0.
    """

    setting: str
    unit: str
    count: Callable[[Any], int]


def _entries(value: Any) -> int:
    return len(value) if isinstance(value, (list, dict)) else 1


def _number(value: Any) -> int:
    """Convert a value to a number like the validation, which also accepts 3.0, "3" and " 3.0 "."""
    if isinstance(value, int):
        return value
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError):
        return 0  # infinite, or not a number


def _longest(value: Any) -> int:
    texts = value if isinstance(value, list) else [value]
    return max((len(text) for text in texts if isinstance(text, str)), default=0)


def _prompts(value: Any) -> int:
    """Count prompts. A list of numbers is one prompt."""
    if not isinstance(value, list) or (value and isinstance(value[0], int)):
        return 1
    return len(value)


_OUTPUTS = (Limit("max_n", "outputs", _number),)
_STOP = (
    Limit("max_stop_strings", "strings", _entries),
    Limit("max_word_chars", "characters in a string", _longest),
)
_PROMPTS = (Limit("max_batch_prompts", "prompts", _prompts),)
_TEXTS = (Limit("max_batch_prompts", "texts", _entries),)
_MESSAGES = (Limit("max_messages", "messages", _entries),)
_TOOLS = (Limit("max_tools", "tools", _entries),)

LIMITS: dict[type, dict[str, tuple[Limit, ...]]] = {
    SamplingFields: {
        "n": _OUTPUTS,
        "best_of": _OUTPUTS,
        "stop": _STOP,
        "stop_token_ids": (Limit("max_stop_token_ids", "tokens", _entries),),
        "bad_words": (
            Limit("max_bad_words", "words", _entries),
            Limit("max_word_chars", "characters in a word", _longest),
        ),
        "logit_bias": (Limit("max_logit_bias", "tokens", _entries),),
        "allowed_token_ids": (Limit("max_allowed_token_ids", "tokens", _entries),),
        "logits_processors": (Limit("max_logits_processors", "entries", _entries),),
        "guided_choice": (Limit("max_choices", "choices", _entries),),
    },
    ChatFields: {
        "messages": _MESSAGES,
        "tools": _TOOLS,
        "documents": (Limit("max_batch_prompts", "documents", _entries),),
    },
    CompletionRequest: {
        "prompt": _PROMPTS,
        "prompt_embeds": (Limit("max_batch_prompts", "prompts", _entries),),
    },
    EmbeddingRequest: {"input": _PROMPTS, "messages": _MESSAGES},
    ClassificationRequest: {"input": _PROMPTS},
    ScoreRequest: {"text_1": _TEXTS, "text_2": _TEXTS},
    RerankRequest: {"documents": (Limit("max_batch_prompts", "documents", _entries),)},
    Conversation: {"messages": _MESSAGES, "tools": _TOOLS},
    MessagesRequest: {"stop_sequences": _STOP},
    ResponsesRequest: {
        "input": (Limit("max_messages", "items", _entries),),
        "tools": _TOOLS,
        "stop": _STOP,
        "include": (Limit("max_request_values", "names", _entries),),
    },
    DetokenizeRequest: {"tokens": (Limit("max_detokenize_tokens", "tokens", _entries),)},
}
"""Class of a body, or a base class -> field -> limit."""

_REPEATED = ("stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids")
"""Lists that the server checks and stores for each prompt of a request."""


@functools.cache
def limits_of(kind: type) -> dict[str, tuple[Limit, ...]]:
    """Field -> limit, for a class of bodies and its base classes."""
    found: dict[str, tuple[Limit, ...]] = {}
    for base in reversed(kind.__mro__):
        found.update(LIMITS.get(base, {}))
    return found


def check_limits(kind: type, body: Mapping[str, Any], args: ServerArgs) -> None:
    """Refuse a body that exceeds a limit of the server.

    Args:
        kind: class of the body.
        body: as parsed JSON; need not be valid.
        args: of the server.

    Raises:
        RequestError: names the field, its count, the limit, and the flag.
    """
    for name, limits in limits_of(kind).items():
        value = body.get(name)
        if value is None:
            continue
        for limit in limits:
            count, most = limit.count(value), getattr(args, limit.setting)
            if count > most:
                raise RequestError(
                    f"{name}: {count} {limit.unit} are more than the {most} that this server "
                    f"takes ({flag_of(limit.setting)}). Use fewer.",
                    param=name,
                )
    if issubclass(kind, CompletionRequest):
        _check_products(body, args)


def _check_products(body: Mapping[str, Any], args: ServerArgs) -> None:
    """Refuse products that are too large: prompts times outputs, and prompts times entries."""
    num_prompts = _prompts(body.get("prompt")) + _entries(body.get("prompt_embeds") or [])
    num_outputs = max(1, _number(body.get("n")), _number(body.get("best_of")))
    if num_prompts * num_outputs > args.max_batch_sequences:
        raise RequestError(
            f"prompt: {num_prompts} prompts with {num_outputs} outputs each are "
            f"{num_prompts * num_outputs} sequences, more than the {args.max_batch_sequences} that "
            f"this server takes in one request (--max-batch-sequences). Send fewer prompts, or "
            f"lower n.",
            param="prompt",
        )
    num_entries = sum(_entries(body[name]) for name in _REPEATED if body.get(name))
    if num_prompts * num_entries > args.max_request_values:
        raise RequestError(
            f"prompt: {num_prompts} prompts with {num_entries} entries each (of "
            f"{', '.join(name for name in _REPEATED if body.get(name))}) are "
            f"{num_prompts * num_entries} values, more than the {args.max_request_values} that "
            f"this server takes in one request (--max-request-values). Send fewer prompts, or "
            f"fewer entries.",
            param="prompt",
        )


def check_prompt_logprobs(
    body: CompletionRequest, num_prompt_tokens: int, args: ServerArgs
) -> None:
    """Refuse an answer with too many log-probabilities of prompts: every output repeats them.

    Args:
        body: validated.
        num_prompt_tokens: of all prompts.
        args: of the server.

    Raises:
        RequestError: names the field, the count, and the flag.
    """
    name, num_top = "prompt_logprobs", body.prompt_logprobs
    if num_top is None and body.echo:
        name, num_top = "logprobs", body.logprobs
    if num_top is None:
        return
    count = num_prompt_tokens * (num_top + 1) * body.num_samples
    if count > args.max_prompt_logprob_values:
        raise RequestError(
            f"{name}: {num_prompt_tokens} prompt tokens with {num_top + 1} log-probabilities each, "
            f"in {body.num_samples} outputs per prompt, are {count}, more than the "
            f"{args.max_prompt_logprob_values} that this server writes into one answer "
            f"(--max-prompt-logprob-values). Send fewer prompts, or lower {name} or n.",
            param=name,
        )


def check_num_values(body: bytes, args: ServerArgs) -> None:
    """Refuse a body with too many JSON values before it is parsed.

    Raises:
        RequestError: it has too many; names the count.
    """
    most = args.max_request_values
    most_names = args.max_request_names
    # An upper bound, which also counts characters inside texts.
    num_values = body.count(b",") + body.count(b"[") + body.count(b"{") + 1
    if num_values <= most and body.count(b":") <= most_names:
        return
    num_values, num_names = count_values(body)
    if num_values > most:
        raise RequestError(
            f"the body holds {num_values} JSON values (numbers, texts, lists and objects), more "
            f"than the {most} that this server takes (--max-request-values). Send less in one "
            f"request."
        )
    if num_names > most_names:
        raise RequestError(
            f"the JSON objects of the body have {num_names} members, more than the {most_names} "
            f"that this server takes (--max-request-names). Send less in one request."
        )


def count_values(body: bytes) -> tuple[int, int]:
    r"""Count the values of a JSON text (including lists and objects), and the names of members.

    An empty list or object counts as two values.

    >>> count_values(b'{"a": [1, 2, "b, \\", c"], "d": {}}')
    (7, 2)
    """
    characters = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    is_outside = np.cumsum(characters == ord('"'), dtype=np.uint8) & 1 == 0
    is_value = np.isin(characters, np.frombuffer(b",[{", np.uint8))
    num_names = np.count_nonzero((characters == ord(":")) & is_outside)
    return int(np.count_nonzero(is_value & is_outside)) + 1, int(num_names)
