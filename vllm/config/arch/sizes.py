"""Check the ranges of values in config.json, before they are used."""

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.config.families import FAMILIES
from vllm.errors import ConfigError

MAX_POSITIONS = 2**24
"""Maximum number of positions of a model, stretched rotations included: a table has an entry for
each."""

MAX_ROTATIONS = 2**32
"""Maximum of positions times rotated elements of a head: values in a table."""

_MAX_LAYERS = 1024
_MAX_HEADS = 2**16
_MAX_HEAD_SIZE = 2**14
_MAX_WIDTH = 2**20
_MAX_EXPERTS = 2**16
_MAX_EXPERT_LAYERS = 2**15
"""Layers times experts: each expert of each layer has an entry for every tensor."""

HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model")
"""Keys of config.json with the hidden size in different families; so are the others below."""
NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_NUM_LAYERS = (
    *NUM_LAYERS,
    *{family.num_layers_key for family in FAMILIES.values() if family.num_layers_key},
)
HEAD_SIZE = ("head_dim", "qk_rope_head_dim", "attention_head_dim")
ROTARY_DIM = ("rotary_dim", "qk_rope_head_dim")
NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
INTERMEDIATE_SIZE = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
NUM_POSITIONS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
    "model_max_length",
)

_RANGES: dict[tuple[str, ...], tuple[int, int]] = {
    _NUM_LAYERS: (1, _MAX_LAYERS),
    NUM_HEADS: (1, _MAX_HEADS),
    (
        *(*NUM_KV_HEADS, "mamba_n_heads", "mamba_num_heads"),
        *("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"),
    ): (1, _MAX_HEADS),
    (
        *("n_groups", "mamba_n_groups", "n_group", "topk_group"),
        *("altup_num_inputs", "altup_active_idx"),
    ): (0, _MAX_HEADS),
    (
        *(*HEAD_SIZE, "v_head_dim", "qk_nope_head_dim", "state_size"),
        *("mamba_d_head", "mamba_head_dim", "mamba_d_state", "ssm_state_size"),
        *("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"),
    ): (1, _MAX_HEAD_SIZE),
    (*HIDDEN_SIZE, "word_embed_proj_dim"): (1, _MAX_WIDTH),
    (
        *(*INTERMEDIATE_SIZE, "moe_intermediate_size"),
        *("intermediate_size_mlp", "shared_expert_intermediate_size", "shared_intermediate_size"),
        *("q_lora_rank", "kv_lora_rank", "rotary_dim", "expansion_ratio", "expand"),
        *("mamba_expand", "conv_kernel", "mamba_d_conv", "mamba_d_ssm", "conv_L_cache"),
        *("moe_latent_size", "moe_shared_expert_intermediate_size", "linear_conv_kernel_dim"),
        *("short_conv_kernel_size", "laurel_rank", "hidden_size_per_layer_input"),
    ): (0, _MAX_WIDTH),
    ("vocab_size",): (1, 2**26),
    ("type_vocab_size", "vocab_size_per_layer_input"): (0, 2**26),
    ("attention_chunk_size",): (1, MAX_POSITIONS),
    (
        *("first_k_dense_replace", "num_dense_layers"),
        *("attn_layer_offset", "expert_layer_offset", "decoder_sparse_step"),
    ): (0, _MAX_LAYERS),
    ("attn_layer_period", "expert_layer_period"): (1, _MAX_LAYERS),
    (*NUM_POSITIONS, "original_max_position_embeddings"): (1, MAX_POSITIONS),
    (
        *("num_local_experts", "num_experts", "n_routed_experts", "n_shared_experts"),
        *("num_experts_per_tok", "moe_num_experts", "moe_k", "moe_num_shared_experts"),
        *("num_shared_experts", "num_experts_per_token", "top_k_experts"),
    ): (0, _MAX_EXPERTS),
}
_RANGE_OF = {name: limits for names, limits in _RANGES.items() for name in names}
_OF_STATES = "linear_attn_config"
"""Key of an object with sizes of Kimi Delta Attention."""
_MAY_BE_OFF = ("n_group", "topk_group")
"""False is the same as absent."""
_MAY_BE_LISTS = ("intermediate_size", "moe_intermediate_size", "num_experts")
"""A number for each layer."""
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def check_sizes(config: Mapping[str, Any]) -> None:
    """Refuse values in config.json that are not possible for any model.

    Keys that are absent or null are checked by the code that reads them.

    Raises:
        ConfigError: a value is not an integer, or out of range; names it.
    """
    _check_ranges("", config)
    _check_ranges(f"{_OF_STATES}.", config.get(_OF_STATES) or {})
    layers, experts = (
        next((name for name in names if config.get(name)), None)
        for names in (_NUM_LAYERS, _NUM_EXPERTS)
    )
    # Dense models of Doge have these keys too.
    if not layers or not experts or config.get("is_moe") is False:
        return
    num_experts = config[experts]
    most = max(num_experts) if isinstance(num_experts, list) else num_experts
    if config[layers] * most > _MAX_EXPERT_LAYERS:
        raise ConfigError(
            f"config.json: '{layers}' x '{experts}' must be at most {_MAX_EXPERT_LAYERS}, got "
            f"{config[layers]} x {config[experts]}. Correct the file, or give other values with "
            "hf_overrides"
        )


def with_whole_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config whose sizes are integers. Other programs write 64.0 for 64, and tensors
    cannot have such sizes.
    """
    whole = {key: _as_whole(value) if key in _RANGE_OF else value for key, value in config.items()}
    if isinstance(whole.get(_OF_STATES), Mapping):
        whole[_OF_STATES] = with_whole_sizes(whole[_OF_STATES])
    return whole


def _as_whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def size_of(config: Mapping[str, Any], name: str, least: int = 1) -> int:
    """Return an integer of config.json within the limits of its key.

    Args:
        config: config of the model.
        name: key of the value.
        least: smallest accepted value, if the key has no larger limit.

    Raises:
        ConfigError: it is missing, not an integer, or out of range.
    """
    low, most = _RANGE_OF.get(name, (0, _MAX_WIDTH))
    value = config.get(name)
    _check_range(name, value, (max(least, low), most))
    return int(value)  # type: ignore[arg-type]


def _check_ranges(path: str, config: Mapping[str, Any]) -> None:
    for name, limits in _RANGE_OF.items():
        value = config.get(name)
        if value is None or (value is False and name in _MAY_BE_OFF):
            continue
        is_list = name in _MAY_BE_LISTS and isinstance(value, list)
        for each in value if is_list and value else [value]:
            _check_range(f"{path}{name}", each, limits, value)


def _check_range(
    name: str, value: object, limits: tuple[int, int], shown: object | None = None
) -> None:
    least, most = limits
    if not _is_whole(value, least, most):
        shown = value if shown is None else shown
        raise ConfigError(
            f"config.json: '{name}' must be an integer from {least} to {most}, got {shown!r}. "
            "Correct the file, or give another value with hf_overrides"
        )


def _is_whole(value: object, least: int, most: int) -> bool:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return not isinstance(value, bool) and is_whole and least <= value <= most  # type: ignore[operator]


_OBJECTS = (
    *("auto_map", "quantization_config", "rope_parameters", "rope_scaling"),
    *("attn_config", "ffn_config"),
    _OF_STATES,
)
_TEXTS = (
    *("dtype", "torch_dtype", "model_type", "hybrid_override_pattern", "hidden_act"),
    *("hidden_activation", "activation_function", "mlp_hidden_act", "mamba_hidden_act"),
    "activation",
)
_LISTS_OF_TEXTS = ("layer_types", "layers_block_type", "mlp_layer_types")
_LISTS_OF_LAYERS = ("attn_layer_indices", "full_attn_idxs", "mlp_only_layers", "moe_layers")
NORM_EPS_KEYS = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "norm_eps",
)
"""Keys of the constant that norms add to the variance. The first one that is set has effect."""
_NOT_NEGATIVE = (*NORM_EPS_KEYS, "layernorm_epsilon", "final_logit_softcapping")
_POSITIVE = (
    *("query_pre_attn_scalar", "logits_scaling", "attn_logit_softcapping"),
    *("dim_model_base", "floor_scale", "rope_local_base_freq", "rotary_emb_base"),
)
_PARTS = ("partial_rotary_factor", "rotary_pct", "rope_pct")
"""Rotated part of a head, from 0 to 1."""
_ROPES = ("rope_parameters", "rope_scaling")
_POSITIVE_OF_ROPES = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    *("alpha", "short_mscale", "long_mscale", "beta_fast", "beta_slow", "attention_factor"),
)
_FACTORS_OF_PAIRS = ("short_factor", "long_factor")
_KINDS_OF_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
"""Keys of rotations that have rotations of a kind of layers."""


def check_kinds(config: Mapping[str, Any]) -> None:
    """Refuse values in config.json of the wrong type.

    Keys that are absent or null are checked by the code that reads them.

    Raises:
        ConfigError: names the key, its value, and the accepted values.
    """
    given = {key: value for key, value in config.items() if value is not None}
    for keys, kind, accepted in ((_OBJECTS, Mapping, "an object"), (_TEXTS, str, "a string")):
        for key in keys:
            if key in given and not isinstance(given[key], kind):
                raise _wrong(key, given[key], accepted)
    _check_lists(given, _LISTS_OF_TEXTS, str, "a list of strings")
    _check_lists(given, _LISTS_OF_LAYERS, int, "a list of layers")
    for key, value in given.items():
        if isinstance(value, float) and math.isnan(value):
            raise _wrong(key, value, "a number")
    for key in _NOT_NEGATIVE:
        if not _is_number(given.get(key, 0.0)):
            raise _wrong(key, given[key], "a number of 0 or more")
    _check_positive("", given, (*_POSITIVE, *_POSITIVE_OF_ROPES))
    _check_parts("", given)
    for key in _ROPES:
        rope = given.get(key, {})
        _check_rope(f"{key}.", rope)
        for layer_kind in _KINDS_OF_LAYERS:
            part = rope.get(layer_kind)
            if part is not None and not isinstance(part, Mapping):
                raise _wrong(f"{key}.{layer_kind}", part, "an object")
            _check_rope(f"{key}.{layer_kind}.", part or {})


def _check_rope(path: str, rope: Mapping[str, Any]) -> None:
    _check_positive(path, rope, _POSITIVE_OF_ROPES)
    _check_parts(path, rope)
    for key in ("rope_type", "type"):
        if not isinstance(rope.get(key, ""), str | None):
            raise _wrong(path + key, rope[key], "a string")
    has_kind = rope.get("rope_type") or rope.get("type") or rope.keys() >= set(_FACTORS_OF_PAIRS)
    if not has_kind and rope.get("factor") not in (None, 1):
        raise ConfigError(
            f"config.json: '{path}factor' is {rope['factor']!r}, but '{path}rope_type' is missing. "
            "Add the type, such as yarn or linear, or remove the factor. hf_overrides can give both"
        )
    original = rope.get("original_max_position_embeddings")
    if original is not None and not _is_whole(original, 2, MAX_POSITIONS):
        raise _wrong(f"{path}original_max_position_embeddings", original, "a number of tokens")
    for key in _FACTORS_OF_PAIRS:
        factors = rope.get(key, [])
        if not isinstance(factors, list) or not all(map(_is_number, factors)):
            raise _wrong(path + key, factors, "a list of numbers of 0 or more")
    for key in ("mscale", "mscale_all_dim", "llama_4_scaling_beta"):
        if not _is_number(rope.get(key) or 0.0):
            raise _wrong(path + key, rope[key], "a number of 0 or more")


def _check_parts(path: str, values: Mapping[str, Any]) -> None:
    for key in _PARTS:
        value = values.get(key) or 0.0
        if not (_is_number(value) and value <= 1):
            raise _wrong(path + key, value, "a number from 0 to 1")


def _check_lists(values: Mapping[str, Any], keys: Iterable[str], kind: type, accepted: str) -> None:
    for key in keys:
        given = values.get(key, [])
        if not isinstance(given, list) or not all(isinstance(each, kind) for each in given):
            raise _wrong(key, given, accepted)


def _check_positive(path: str, values: Mapping[str, Any], keys: Iterable[str]) -> None:
    for key in keys:
        value = values.get(key)
        if value is not None and not (_is_number(value) and value > 0):
            raise _wrong(path + key, value, "a number above 0")


def _is_number(value: object) -> bool:
    """Return whether a value is a number of at least 0 that a float can hold. NaN is not."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0.0 <= value <= sys.float_info.max  # type: ignore[operator]


def _wrong(key: str, value: object, accepted: str) -> ConfigError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
    return ConfigError(
        f"config.json: '{key}' must be {accepted}, or null, got {shown}. Correct the file, or give "
        f"another value with hf_overrides"
    )


def check_window(window: object) -> None:
    """Refuse a sliding window that is used and is not a number of tokens.

    Raises:
        ConfigError: it is not an integer of 1 or more.
    """
    if type(window) is not int or window < 1:
        raise ConfigError(
            "config.json: 'sliding_window' must be an integer of at least 1, or null for none, "
            f"got {window!r}. Correct the file, or give another value with hf_overrides"
        )
