"""Read from the Hugging Face config which tokens each layer of a model attends to."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.config.arch.sizes import check_window
from vllm.config.families import family_of
from vllm.errors import ConfigError


def read_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer: the number of most recent keys that a query sees,
    itself included; None: all.

    Raises:
        ConfigError: the kinds of too few layers are given, or the window is not a number of tokens.
    """
    window, family = config.get("sliding_window"), family_of(config.get("model_type"))
    is_on = config.get("use_sliding_window", family.windows != "if_switched_on")
    if window is None or family.windows == "ignored" or is_on is False:
        return (None,) * num_layers
    check_window(window)
    layer_types = config.get("layer_types")
    if layer_types:
        _check_covers(layer_types, num_layers)
        # layer_types is longer if num_hidden_layers was overridden.
        kinds = layer_types[:num_layers]
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    pattern = config.get("sliding_window_pattern") or family.full_attention_every
    if pattern:
        if type(pattern) is not int or pattern < 1:
            raise ConfigError(
                "config.json: sliding_window_pattern must be an integer of at least 1 if "
                f"layer_types is missing, got {pattern!r}. Add layer_types to the file"
            )
        return tuple(None if (i + 1) % pattern == 0 else window for i in range(num_layers))
    first = config.get("max_window_layers") if config.get("use_sliding_window") else 0
    return tuple(None if i < (first or 0) else window for i in range(num_layers))


def read_heads(
    config: Mapping[str, Any], usual: tuple[int, int], num_heads: int, windows: Sequence[int | None]
) -> tuple[tuple[int, int], ...]:
    """Return (head size, number of key/value heads) of each layer.

    Args:
        config: config of the model.
        usual: default for layers for which the config has no other values.
        num_heads: query heads of each layer.
        windows: sliding windows of the layers.

    Raises:
        ConfigError: the sizes of a layer are not possible.
    """
    given = config.get("per_layer_config") or {}
    if not isinstance(given, Mapping) or not all(isinstance(v, Mapping) for v in given.values()):
        raise ConfigError(
            f"per_layer_config in config.json must be an object with an object for each layer, got "
            f"{given!r}. Correct the file"
        )
    found, of_windows = [], family_of(config.get("model_type")).window_kv_heads
    for index, window in enumerate(windows):
        own = given.get(index) or given.get(str(index)) or {}
        usual_count = usual[1] if window is None else usual[1] * of_windows
        head_size = own.get("head_dim") or usual[0]
        num_kv_heads = own.get("num_key_value_heads") or usual_count
        if (head_size, num_kv_heads) == usual:
            found.append(usual)
            continue
        are_sizes = all(type(n) is int and 0 < n < 2**14 for n in (head_size, num_kv_heads))
        if not are_sizes or num_heads % num_kv_heads:
            raise ConfigError(
                f"config.json: layer {index} has head_dim {head_size!r} and "
                f"num_key_value_heads {num_kv_heads!r}; they must be positive numbers, and the "
                f"second one must divide num_attention_heads ({num_heads}). Correct the file"
            )
        found.append((head_size, num_kv_heads))
    return tuple(found)


def read_kv_sources(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Return for each layer the earlier layer whose keys and values it reads; None: it has its own.

    Some of the last layers have no keys and values. Each of them reads the latest layer of the same
    kind that has some.

    Raises:
        ConfigError: there is no such layer.
    """
    num_shared = config.get("num_kv_shared_layers") or 0
    if type(num_shared) is not int or not 0 <= num_shared < num_layers:
        raise ConfigError(
            f"num_kv_shared_layers in config.json must be from 0 to {num_layers - 1}, got "
            f"{num_shared!r}. Correct the file"
        )
    if not num_shared:
        return (None,) * num_layers
    kinds = list(config.get("layer_types") or ["full_attention"] * num_layers)[:num_layers]
    own = kinds[: num_layers - num_shared]
    last = {kind: index for index, kind in enumerate(own)}
    for kind in kinds:
        if kind not in last:
            raise ConfigError(
                f"num_kv_shared_layers in config.json is {num_shared}: at least one layer of the "
                f"kind {kind!r} must compute its own keys and values. Lower num_kv_shared_layers"
            )
    return (*(None for _ in own), *(last[kind] for kind in kinds[len(own) :]))


_STATES = frozenset({"linear_attention", "mamba", "conv"})
"""Kinds of layers that keep a state, by the names that configs use."""
_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letter of `hybrid_override_pattern` -> kind of a layer."""


def read_layer_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kinds of all layers, by the names that configs use; empty if the config has none.

    Raises:
        ConfigError: a pattern has an unknown letter.
    """
    given = config.get("layer_types") or config.get("layers_block_type")
    pattern = config.get("hybrid_override_pattern")
    if given or not pattern:
        return tuple(given or ())
    unknown = sorted(set(map(str, pattern)) - _PATTERN.keys())
    if unknown:
        raise ConfigError(
            f"hybrid_override_pattern in config.json has {', '.join(map(repr, unknown))}; "
            f"supported: {', '.join(map(repr, _PATTERN))}. Correct the file"
        )
    return tuple(_PATTERN[letter] for letter in pattern)


def read_state_layers(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has a recurrent state, instead of or in addition to keys and
    values.

    Raises:
        ConfigError: the kinds of too few layers are given, or they are not a list.
    """
    family = family_of(config.get("model_type"))
    if not family.has_attention or family.has_states_and_attention:
        return (True,) * num_layers
    if family.attention_period_keys is not None:
        period, first = (config.get(key) for key in family.attention_period_keys)
        if not isinstance(period, int) or not isinstance(first, int) or period < 1:
            keys = " and ".join(family.attention_period_keys)
            raise ConfigError(
                f"config.json: {keys} must be integers, the first of them at least 1, got "
                f"{period!r} and {first!r}. Correct the file"
            )
        return tuple(index % period != first for index in range(num_layers))
    if family.attention_layers_key is not None:
        attends = config.get(family.attention_layers_key) or ()
        return tuple(index not in attends for index in range(num_layers))
    layer_types = read_layer_kinds(config)
    if not layer_types:
        # Config of Kimi Linear: a list of layer indices that begin at 1.
        numbers = (config.get("linear_attn_config") or {}).get("kda_layers") or []
        if not isinstance(numbers, list):
            raise ConfigError(
                "config.json: 'kda_layers' of linear_attn_config must be a list of layer "
                f"indices, got {numbers!r}. Correct the file"
            )
        return tuple(index + 1 in numbers for index in range(num_layers))
    _check_covers(layer_types, num_layers)
    return tuple(kind in _STATES for kind in layer_types[:num_layers])


def has_no_positions(config: Mapping[str, Any]) -> bool:
    """Return whether the model has neither rotary nor learned positions, so that only memory limits
    the length of a request.
    """
    family = family_of(config.get("model_type"))
    if family.rope_switch is not None:
        key, value = family.rope_switch
        return config.get(key) != value
    return not (family.has_attention and family.has_positions)


def _check_covers(layer_types: Sequence[Any], num_layers: int) -> None:
    if len(layer_types) < num_layers:
        raise ConfigError(
            f"config.json: layer_types has {len(layer_types)} entries; it must have one for each "
            f"layer (num_hidden_layers: {num_layers}). Correct the file"
        )
