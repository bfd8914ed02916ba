"""Convert config.json of DeciLM and Llama Nemotron to the keys of Llama, with a value for each
layer.
"""

from collections.abc import Mapping
from typing import Any

from vllm.errors import ConfigError

_MULTIPLE = 256
"""The sizes of MLPs are rounded up to a multiple of it."""
_UNSUPPORTED = {
    "attention": ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens"),
    "ffn": ("replace_with_linear", "sparsify"),
}
"""Keys of a part of a block that are supported only if they are absent, null or false."""


def complete_decilm_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the keys of Llama, and with values for each layer.

    For each layer it has the number of key/value heads (`per_layer_config`) and the size of the MLP
    (`layer_intermediate_sizes`), and whether it has attention and an MLP (`layers_with_attention`,
    `layers_with_mlp`).

    Raises:
        ConfigError: a layer has values that are not supported.
    """
    usual = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0}
    raw = {**usual, **{key: value for key, value in raw.items() if value is not None}}
    num_layers, num_heads = (
        _size(raw, key) for key in ("num_hidden_layers", "num_attention_heads")
    )
    blocks = raw.get("block_configs")
    if blocks is None:
        counts = raw.get("num_key_value_heads_per_layer")  # key of DeciLM 7B
        if counts is None:
            return raw
        if not isinstance(counts, list) or len(counts) < num_layers:
            raise ConfigError(
                f"config.json: num_key_value_heads_per_layer must have a value for each of the "
                f"{num_layers} layers, got {counts!r}. Correct the file"
            )
        return {**raw, **_with_heads(dict(enumerate(counts[:num_layers])))}
    is_list = isinstance(blocks, list) and all(isinstance(block, Mapping) for block in blocks)
    if not is_list or len(blocks) < num_layers:
        raise ConfigError(
            f"config.json: block_configs must be a list with an object for each of the "
            f"{num_layers} layers. Correct the file, or give another value with hf_overrides"
        )
    heads, sizes = {}, []
    attends, has_mlp = [], []
    for index, block in enumerate(blocks[:num_layers]):
        attention, ffn = (_part(block, name, index) for name in ("attention", "ffn"))
        attends.append(not attention.get("no_op"))
        has_mlp.append(not ffn.get("no_op"))
        if attends[-1]:
            heads[index] = _num_kv_heads(attention, num_heads, index)
        sizes.append(_intermediate_size(ffn, raw, index) if has_mlp[-1] else _MULTIPLE)
    return {
        **raw,
        **_with_heads(heads),
        "intermediate_size": max(sizes),
        "layer_intermediate_sizes": sizes,
        "layers_with_attention": attends,
        "layers_with_mlp": has_mlp,
    }


def _with_heads(counts: Mapping[int, int]) -> dict[str, Any]:
    if not counts:
        raise ConfigError("config.json: no layer of block_configs has attention. Correct the file")
    layers = {index: {"num_key_value_heads": count} for index, count in counts.items()}
    return {"num_key_value_heads": max(counts.values()), "per_layer_config": layers}


def _part(block: Mapping[str, Any], name: str, index: int) -> Mapping[str, Any]:
    part = block.get(name) or {}
    if not isinstance(part, Mapping):
        raise ConfigError(
            f"config.json: {name} of layer {index} in block_configs must be an object, got "
            f"{part!r}. Correct the file"
        )
    for key in _UNSUPPORTED[name]:
        if part.get(key):
            raise ConfigError(
                f"config.json: layer {index} in block_configs has {name}.{key}={part[key]!r}, "
                f"which is not supported. Use a checkpoint without it"
            )
    return part


def _num_kv_heads(attention: Mapping[str, Any], num_heads: int, index: int) -> int:
    group = attention.get("n_heads_in_group")
    if type(group) is not int or group < 1 or num_heads % group:
        raise ConfigError(
            f"config.json: attention.n_heads_in_group of layer {index} in block_configs must be an "
            f"integer that divides num_attention_heads ({num_heads}), got {group!r}. Correct the "
            f"file"
        )
    return num_heads // group


def _intermediate_size(ffn: Mapping[str, Any], raw: Mapping[str, Any], index: int) -> int:
    """Return the size of an MLP: two thirds of a multiple of the hidden size, rounded up."""
    factor: Any = ffn.get("ffn_mult")
    if factor is None and "intermediate_size" in raw:
        return _size(raw, "intermediate_size")
    if not isinstance(factor, (int, float)) or not 0 < factor < 1000:
        raise ConfigError(
            f"config.json: ffn.ffn_mult of layer {index} in block_configs must be a number from 0 "
            f"to 1000, got {factor!r}. Correct the file"
        )
    size = int(2 * factor * _size(raw, "hidden_size") / 3)
    return -(-size // _MULTIPLE) * _MULTIPLE


def _size(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"{key} in config.json must be an integer of at least 1, got {value!r}. Correct the "
            f"file"
        )
    return value
