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
from vllm.utils.files.json_file import as_integer, read_json_object

logger = init_logger(__name__)

_FILE_NAME = "generation_config.json"

_OTHER_NAMES = {"max_tokens": "max_new_tokens"}
"""Sampling parameter -> its name in the file, where that differs."""
_SAMPLING = {_OTHER_NAMES.get(name, name): name for name in numbers_of(Interface.MODEL)}
"""Name in the file -> field of `SamplingParams`."""
_INTEGERS = {"top_k", "max_tokens"}
_NO_TOKEN = -1
_MAX_SHOWN = 60
_ALSO_IN_OVERRIDES = {"max_tokens", "eos_token_id", "bos_token_id", "pad_token_id", "do_sample"}
_CONFIG_SAYS = "config.json has it; hf_overrides changes it there"
_OF_CACHE = "the engine always has a KV cache of its own"
_WITHOUT_EFFECT = {
    "attn_temperature_tuning": _CONFIG_SAYS,  # the command of Llama 4 has it here
    **dict.fromkeys(("use_cache", "cache_implementation", "cache_config"), _OF_CACHE),
    **dict.fromkeys(("_from_model_config", "transformers_version"), "it tells who wrote the file"),
}
"""Keys of generation_config.json that change no sampling -> why they have no effect."""
_IGNORED: dict[str, tuple[Any, str]] = {
    "do_sample": (True, "temperature=0 in requests"),
    "stop_strings": (None, "stop in requests"),
    "min_length": (0, "min_tokens in requests"),
    "min_new_tokens": (0, "min_tokens in requests"),
    "bad_words_ids": (None, "bad_words in requests"),
    "suppress_tokens": (None, "logit_bias in requests"),
    "sequence_bias": (None, "logit_bias in requests"),
    "num_beams": (1, "beam search"),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (0, "")),
    **dict.fromkeys(("xtc_probability", "mirostat"), (0, "")),  # from the metadata of GGUF files
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0, "")),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale"), (1, "")),
    **dict.fromkeys(("begin_suppress_tokens", "forced_bos_token_id", "top_h"), (None, "")),
    **dict.fromkeys(("forced_eos_token_id", "penalty_alpha", "dola_layers"), (None, "")),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config"), (None, "")),
    **dict.fromkeys(("force_words_ids", "constraints", "forced_decoder_ids"), (None, "")),
}
"""Keys that change the outputs of transformers, and that are ignored -> the value without an
effect, and what to use instead."""
_OF_SPEECH = {"suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids"}
"""Keys that are read elsewhere for models of speech."""
_SPEECH_KEY = "no_timestamps_token_id"
"""A key that only models of speech have."""


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
    _log_ignored({**chosen, **overrides})
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
    found |= {name: as_integer(found[name]) for name in _INTEGERS & found.keys()}
    try:
        SamplingParams(**found)
    except (RequestError, TypeError) as error:
        raise ConfigError(
            f"{_FILE_NAME} or override_generation_config: {error}. Correct it, or leave the "
            'sampling defaults of the model out with generation_config="vllm"'
        ) from None
    return found


def _log_ignored(content: Mapping[str, Any]) -> None:
    """Log which settings would change outputs in transformers, and are ignored here."""
    found = []
    for name, (without_effect, instead) in _IGNORED.items():
        value = content.get(name)
        if value in (None, without_effect, [], {}):
            continue
        if name in _OF_SPEECH and _SPEECH_KEY in content:
            continue
        text = repr(value)
        text = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
        found.append(f"{name}={text}" + (f" (use {instead})" if instead else ""))
    if found:
        _log_ignored_once(", ".join(found))


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
    more = [token_id for token_id in map(as_integer, given) if _is_token_id(token_id)]
    return more if set(ids) <= set(more) else ids


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read_eos_token_ids(content: Mapping[str, Any]) -> list[int]:
    value = content.get("eos_token_id")
    given = value if isinstance(value, list) else [] if value is None else [value]
    ids = [token_id for token_id in map(as_integer, given) if token_id != _NO_TOKEN]
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


@cache
def _log_ignored_once(settings: str) -> None:
    logger.info(
        "the generation config of the model also has settings that are ignored: %s", settings
    )
