"""Complete the configs of common families without transformers.

Importing the config classes of transformers takes longer than anything else at the start of a small
model, and imports torch in processes that do not compute. All other cases are left to transformers:
other model types, values of other types, and values that it refuses.
"""

from collections.abc import Mapping
from typing import Any

from vllm.config.families import ConfigDefaults, family_of

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
"""Required keys of every config.json, in addition to the size of the MLP."""

_DEFAULT_THETA = 10000.0

_TOKENS = ("eos_token_id", "pad_token_id")
_MAY_BE_NULL = (*_TOKENS, "sliding_window")
_MAY_BE_ZERO = (*_TOKENS, "max_window_layers")

_DTYPES = (None, "float16", "bfloat16", "float32")
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_LEFT_TO_TRANSFORMERS = ("auto_map", "quantization_config", "per_layer_config")
_ROPE_NAMES = ("rope_parameters", "rope_scaling", "rope_theta")

_FACTOR, _ORIGINAL = "factor", "original_max_position_embeddings"
_ROPE_TYPES: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({_FACTOR}, set()),
    "dynamic": ({_FACTOR}, set()),
    "llama3": ({_FACTOR, "low_freq_factor", "high_freq_factor", _ORIGINAL}, set()),
    "yarn": (
        {_FACTOR, _ORIGINAL},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"},
    ),
}
"""Rope type -> required numbers, and optional numbers."""
_SECTIONS = ("mrope_section", "mrope_interleaved")
"""Rope parameters of models whose tokens have several positions; they are checked elsewhere."""


def complete_plain_config(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Add the defaults of the model type to config.json; None if transformers is needed.

    Args:
        raw: config.json, with overrides applied.
    """
    defaults = family_of(raw.get("model_type")).config_defaults
    if defaults is None:
        return None
    completed = {**defaults.values, **raw}
    if defaults.has_rotations and "rope_parameters" not in raw:
        completed.setdefault("rope_theta", _DEFAULT_THETA)
    return completed if _is_plain(completed, defaults) else None


def _is_plain(config: Mapping[str, Any], defaults: ConfigDefaults) -> bool:
    architectures, prefix = config.get("architectures"), defaults.class_prefix
    return (
        not any(name in config for name in _LEFT_TO_TRANSFORMERS)
        and isinstance(architectures, list)
        and all(isinstance(name, str) and name.startswith(prefix) for name in architectures)
        and config.get("dtype") in _DTYPES
        and config.get("torch_dtype") in _DTYPES
        and _has_plain_sizes(config, defaults.inner_size)
        and all(_is_like(name, config[name], default) for name, default in defaults.values.items())
        and all(_is_plain_token(config.get(name), config["vocab_size"]) for name in _TOKENS)
        and _has_plain_layer_types(config)
        and _has_plain_labels(config)
        and (
            _has_plain_rope(config)
            if defaults.has_rotations
            else not any(name in config for name in _ROPE_NAMES)
        )
    )


def _is_like(name: str, value: object, default: object) -> bool:
    """Return whether a value has the type of its default. If the default is None, the value must be
    a size.
    """
    if name in _TOKENS:  # token ids are checked elsewhere
        return True
    if value is None:
        return default is None or name in _MAY_BE_NULL
    if default is None or type(default) is int:
        return _is_size(value) or (value == 0 and type(value) is int and name in _MAY_BE_ZERO)
    return type(value) is type(default)


def _has_plain_sizes(config: Mapping[str, Any], inner_size: str) -> bool:
    if not all(_is_size(config.get(name)) for name in (*_SIZES, inner_size)):
        return False
    num_heads = config["num_attention_heads"]
    num_kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    return (
        config["hidden_size"] % num_heads == 0
        and (num_kv_heads is None or (_is_size(num_kv_heads) and num_heads % num_kv_heads == 0))
        and (head_dim is None or _is_size(head_dim))
        # transformers refuses an odd head size with rotary embedding.
        and (head_dim or config["hidden_size"] // num_heads) % 2 == 0
    )


def _is_plain_token(value: object, vocab_size: int) -> bool:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return all(type(token) is int and 0 <= token < vocab_size for token in ids)


def _has_plain_layer_types(config: Mapping[str, Any]) -> bool:
    kinds = config.get("layer_types")
    return kinds is None or (
        isinstance(kinds, list)
        and len(kinds) == config["num_hidden_layers"]
        and all(isinstance(kind, str) and kind in _LAYER_TYPES for kind in kinds)
    )


def _has_plain_labels(config: Mapping[str, Any]) -> bool:
    """Return whether the labels belong to classes 0, 1, ... and match their number, or are
    absent.
    """
    names, count = config.get("id2label"), config.get("num_labels")
    if not (count is None or _is_size(count)):
        return False
    if names is None:
        names = dict.fromkeys(map(str, range(count or 2)), "")
    return (
        isinstance(names, Mapping)
        and names.keys() == {str(index) for index in range(len(names))}
        and all(isinstance(name, str) for name in names.values())
        and len(names) == (count or len(names)) > 0
        and (
            config.get("problem_type") in (None, "regression", "multi_label_classification")
            or (config["problem_type"] == "single_label_classification" and len(names) > 1)
        )
    )


def _has_plain_rope(config: Mapping[str, Any]) -> bool:
    if {"partial_rotary_factor", _ORIGINAL} & config.keys():
        return False
    rope = config.get("rope_parameters")
    if rope is None:  # format of transformers 4
        scaling = config.get("rope_scaling")
        if scaling is not None and not isinstance(scaling, Mapping):
            return False
        rope = {"rope_type": "default", **_renamed(scaling or {})}
        rope.setdefault("rope_theta", config.get("rope_theta"))
    elif not isinstance(rope, Mapping) or {"rope_theta", "rope_scaling"} & config.keys():
        return False
    numbers = {name: value for name, value in rope.items() if name not in _SECTIONS}
    rope_type = numbers.pop("rope_type", None)
    if rope_type == "mrope" and "mrope_section" in rope:
        rope_type = "default"
    if not isinstance(rope_type, str) or rope_type not in _ROPE_TYPES:
        return False
    needed, others = _ROPE_TYPES[rope_type]
    needed = {"rope_theta", *needed}
    return needed <= numbers.keys() <= needed | others and all(
        type(number) in (int, float) and number > 0 for number in numbers.values()
    )


def _renamed(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Rename `type`, the older name, to `rope_type`; unchanged if both are there."""
    if "type" not in scaling or "rope_type" in scaling:
        return {**scaling}
    return {"rope_type" if name == "type" else name: value for name, value in scaling.items()}


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0
