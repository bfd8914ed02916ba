"""What the layers of a model attend to, by the keys of its Hugging Face config."""

from collections.abc import Mapping
from typing import Any

from vllm.config.arch.sizes import check_window
from vllm.config.families import family_of
from vllm.errors import ConfigError


def read_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Per layer: how many of the most recent keys a query sees, itself included; None: all.

    Raises:
        ConfigError: the kinds of too few layers are given, or the window is no number of tokens.
    """
    window, family = config.get("sliding_window"), family_of(config.get("model_type"))
    is_on = config.get("use_sliding_window", family.windows != "if_switched_on")
    if window is None or family.windows == "ignored" or is_on is False:
        return (None,) * num_layers
    check_window(window)
    layer_types = config.get("layer_types")
    if layer_types:
        if len(layer_types) < num_layers:
            raise ConfigError(
                f"layer_types names {len(layer_types)} layers, num_hidden_layers is {num_layers}"
            )
        kinds = layer_types[:num_layers]  # longer if num_hidden_layers was overridden
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    pattern = config.get("sliding_window_pattern") or family.full_attention_every
    if pattern:
        return tuple(None if (i + 1) % pattern == 0 else window for i in range(num_layers))
    first = config.get("max_window_layers") if config.get("use_sliding_window") else 0
    return tuple(None if i < (first or 0) else window for i in range(num_layers))


_STATES = frozenset({"linear_attention", "mamba", "conv"})
"""Kinds of layers that keep a state, by the names that configs use."""
_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letter of `hybrid_override_pattern` -> kind of a layer."""


def read_layer_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kinds of all layers, by the names that configs use; none if it does not say them.

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
            f"supported: {', '.join(map(repr, _PATTERN))}"
        )
    return tuple(_PATTERN[letter] for letter in pattern)


def read_state_layers(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Per layer: whether it keeps a state of fixed size, instead of keys and values or in addition
    to them.

    Raises:
        ConfigError: the kinds of too few layers are given.
    """
    family = family_of(config.get("model_type"))
    if not family.has_attention or family.has_states_beside_attention:
        return (True,) * num_layers
    if family.attention_period_keys is not None:
        period, first = (int(config.get(key) or 0) for key in family.attention_period_keys)
        return tuple(not period or index % period != first for index in range(num_layers))
    if family.attention_layers_key is not None:
        attends = config.get(family.attention_layers_key) or ()
        return tuple(index not in attends for index in range(num_layers))
    layer_types = read_layer_kinds(config)
    if not layer_types:
        return (False,) * num_layers
    if len(layer_types) < num_layers:
        raise ConfigError(
            f"layer_types names {len(layer_types)} layers, num_hidden_layers is {num_layers}"
        )
    return tuple(kind in _STATES for kind in layer_types[:num_layers])


def has_no_positions(config: Mapping[str, Any]) -> bool:
    """Whether the model has neither rotations nor a table of positions, so that nothing but memory
    limits the length of a text."""
    family = family_of(config.get("model_type"))
    if family.rope_switch is not None:
        key, value = family.rope_switch
        return config.get(key) != value
    return not (family.has_attention and family.has_positions)
