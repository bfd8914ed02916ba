"""Read the sampling defaults and end tokens of a model's generation_config.json."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from vllm.config import ModelConfig
from vllm.errors import ConfigError, RequestError
from vllm.logger import init_logger
from vllm.sampling_params import Interface, SamplingParams, numbers_of
from vllm.transformers_utils.hf_config import read_hf_config
from vllm.utils.files.json_file import read_json_object

logger = init_logger(__name__)

_FILE_NAME = "generation_config.json"

_OTHER_NAMES = {"max_tokens": "max_new_tokens"}
"""Sampling parameter -> its name in the file, where that differs."""
_SAMPLING = {_OTHER_NAMES.get(name, name): name for name in numbers_of(Interface.MODEL)}
"""Name in the file -> field of `SamplingParams`."""
_INTEGERS = {"top_k", "max_tokens"}
_NO_TOKEN = -1
# `do_sample` is ignored: for greedy decoding, a request sets temperature to 0.
_ALSO_IN_OVERRIDES = {"max_tokens", "eos_token_id", "bos_token_id", "pad_token_id", "do_sample"}
_CONFIG_SAYS = "config.json has it; hf_overrides changes it there"
_OF_CACHE = "the engine always has a KV cache of its own"
_WITHOUT_EFFECT = {
    "attn_temperature_tuning": _CONFIG_SAYS,  # the command of Llama 4 has it here
    **dict.fromkeys(("use_cache", "cache_implementation", "cache_config"), _OF_CACHE),
    **dict.fromkeys(("_from_model_config", "transformers_version"), "it tells who wrote the file"),
}
"""Keys of generation_config.json that change no sampling -> why they have no effect."""


def load_generation_defaults(model_config: ModelConfig) -> dict[str, Any]:
    """Return the model's defaults for sampling parameters that a request does not set.

    Returns:
        Some of the SamplingParams that `Interface.MODEL` sets, and always `eos_token_ids`:
        list of int, the tokens that end an output, from generation_config.json or config.json.
        These are a property of the model: they are read even if `generation_config` is "vllm" and
        the sampling defaults are not.

    Raises:
        ConfigError: a file or an override is damaged, or a value is out of range.
    """
    source = model_config.generation_config
    overrides = model_config.override_generation_config
    _check_override_names(overrides)
    of_model = _read_file(Path(model_config.hf_config_path or model_config.resolved_path))
    if source in ("auto", "vllm"):
        chosen = of_model if source == "auto" else {}
    elif (Path(source).expanduser() / _FILE_NAME).is_file():
        chosen = _read_file(Path(source).expanduser())
    else:
        raise ConfigError(
            f"generation_config={source!r}: that folder has no {_FILE_NAME}. Give auto, vllm, or a "
            f"folder that contains one"
        )
    sampling = _read_sampling({**chosen, **overrides})
    if sampling:
        _log_once(", ".join(f"{name}={value}" for name, value in sampling.items()))
    named = {**of_model, **chosen, **overrides}
    ids = _read_eos_token_ids(named)
    if "eos_token_id" not in overrides:
        ids = _with_those_of_config(ids, model_config)
    return {**sampling, "eos_token_ids": ids}


def _read_file(folder: Path) -> dict[str, Any]:
    path = folder / _FILE_NAME
    return read_json_object(path) if path.is_file() else {}


def _check_override_names(overrides: Mapping[str, Any]) -> None:
    known = _SAMPLING.keys() | _ALSO_IN_OVERRIDES
    for name in overrides:
        if name in _WITHOUT_EFFECT:
            logger.warning(
                "override_generation_config: %r has no effect: %s", name, _WITHOUT_EFFECT[name]
            )
        elif name not in known:
            raise ConfigError(
                f"override_generation_config: {name!r} is not one of {', '.join(sorted(known))}"
            )


def _read_sampling(content: Mapping[str, Any]) -> dict[str, Any]:
    names = {**_SAMPLING, "max_tokens": "max_tokens"}
    found = {new: content[old] for old, new in names.items() if content.get(old) is not None}
    found |= {name: _whole(found[name]) for name in _INTEGERS & found.keys()}
    try:
        SamplingParams(**found)
    except (RequestError, TypeError) as error:
        raise ConfigError(
            f"{_FILE_NAME} or override_generation_config: {error}. Correct it, or leave the "
            'sampling defaults of the model out with generation_config="vllm"'
        ) from None
    return found


def _with_those_of_config(ids: list[int], model_config: ModelConfig) -> list[int]:
    """Add the end tokens of config.json, if it has all of the given ones and more.

    transformers creates a missing generation_config.json from config.json. A copy of a model may
    have lost some end tokens in one of the two files. Defaults of a model type do not count: they
    may be any token of the vocabulary.
    """
    folder = Path(model_config.hf_config_path or model_config.resolved_path)
    if not (folder / "config.json").is_file():
        return ids
    content = read_hf_config(folder, model_config.hf_overrides)
    value = content.get("eos_token_id")  # -1 means that there is no end token
    given: list[Any] = value if isinstance(value, list) else [value]
    more = [token_id for token_id in map(_whole, given) if _is_token_id(token_id)]
    return more if set(ids) <= set(more) else ids


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _whole(value: Any) -> Any:
    """Return an integer that was written as 20.0; anything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _read_eos_token_ids(content: Mapping[str, Any]) -> list[int]:
    value = content.get("eos_token_id")
    given = value if isinstance(value, list) else [] if value is None else [value]
    ids = [token_id for token_id in map(_whole, given) if token_id != _NO_TOKEN]
    if not all(map(_is_token_id, ids)):
        raise ConfigError(
            f"{_FILE_NAME}: eos_token_id must be a token id, a list of token ids, or null or -1 "
            f"for none, got {value!r}. Correct the file, or give another value with "
            "override_generation_config"
        )
    return list(ids)


@cache
def _log_once(defaults: str) -> None:
    logger.info(
        "sampling defaults of the model: %s (generation_config='vllm' drops them)", defaults
    )
