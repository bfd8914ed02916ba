"""Configs of common model types that need no transformers to be complete.

Importing the config classes of transformers takes longer than anything else at the start of a
small model, and brings torch into processes that do not compute. What is not certain to mean the
same without them is left to them: other types, values of another form, and whatever they refuse.
"""

from collections.abc import Mapping
from typing import Any

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False},
    "qwen2": {"use_sliding_window": False, "tie_word_embeddings": False},
    "qwen3": {
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    },
}
"""Model type -> what the engine reads and a config.json may leave out."""

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_LLAMA3_SCALING = {
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
}


def complete_plain_config(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """What config.json says with the defaults of its model type; None: ask transformers.

    Args:
        raw: config.json, with overrides in place.
    """
    defaults = _DEFAULTS.get(str(raw.get("model_type")))
    if defaults is None or not _is_plain(raw, defaults):
        return None
    return {**defaults, **raw}


def _is_plain(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    architectures = raw.get("architectures")
    return (
        "auto_map" not in raw
        and "quantization_config" not in raw
        and isinstance(architectures, list)
        and all(str(name).endswith("ForCausalLM") for name in architectures)
        and isinstance(raw.get("dtype", raw.get("torch_dtype")), str)
        and isinstance(raw.get("hidden_act"), str)
        and _has_plain_sizes(raw)
        and _has_plain_tokens(raw)
        and _has_plain_rope(raw)
        and all(isinstance(raw.get(name, value), bool) for name, value in defaults.items())
        and not raw.get("use_sliding_window")
        # Of Qwen 3 the default is not derived from the other sizes.
        and ("head_dim" in raw or raw["model_type"] != "qwen3")
    )


def _has_plain_sizes(raw: Mapping[str, Any]) -> bool:
    if not all(_is_size(raw.get(name)) for name in _SIZES):
        return False
    num_heads, num_kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    head_dim = raw.get("head_dim")
    return (
        raw["hidden_size"] % num_heads == 0
        and num_heads % num_kv_heads == 0
        and (head_dim is None or _is_size(head_dim))
        and isinstance(raw.get("rms_norm_eps"), float)
    )


def _has_plain_tokens(raw: Mapping[str, Any]) -> bool:
    end = raw.get("eos_token_id")
    ends = end if isinstance(end, list) else [end]
    return all(type(token) is int and 0 <= token < raw["vocab_size"] for token in ends)


def _has_plain_rope(raw: Mapping[str, Any]) -> bool:
    if "partial_rotary_factor" in raw:
        return False
    rope = raw.get("rope_parameters")
    if rope is None:  # as transformers 4 writes it
        scaling = raw.get("rope_scaling")
        if scaling is not None and not isinstance(scaling, Mapping):
            return False
        rope = {"rope_type": "default", **(scaling or {}), "rope_theta": raw.get("rope_theta")}
    elif not isinstance(rope, Mapping) or {"rope_theta", "rope_scaling"} & raw.keys():
        return False
    numbers = {**rope}
    wanted = {"default": set[str](), "llama3": _LLAMA3_SCALING}.get(numbers.pop("rope_type", None))
    return (
        wanted is not None
        and numbers.keys() == {"rope_theta", *wanted}
        and all(type(number) in (int, float) and number > 0 for number in numbers.values())
    )


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0
