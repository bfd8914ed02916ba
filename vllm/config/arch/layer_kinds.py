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


_STATES = frozenset({"linear_attention", "mamba"})
"""Kinds of layers that keep a state, by the names that configs use."""


def read_state_layers(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Per layer: whether it keeps a state of fixed size in place of keys and values.

    Raises:
        ConfigError: the kinds of too few layers are given, or they are no list.
    """
    family = family_of(config.get("model_type"))
    if not family.has_attention:
        return (True,) * num_layers
    if family.attention_layers_key is not None:
        attends = config.get(family.attention_layers_key) or ()
        return tuple(index not in attends for index in range(num_layers))
    layer_types = config.get("layer_types") or config.get("layers_block_type")
    if not layer_types:
        # As Kimi Linear is published; the first layer is number 1.
        numbers = (config.get("linear_attn_config") or {}).get("kda_layers") or []
        if not isinstance(numbers, list):
            raise ConfigError(
                f"config.json: 'kda_layers' of linear_attn_config must be a list of layers, got "
                f"{numbers!r}. Correct the file"
            )
        return tuple(index + 1 in numbers for index in range(num_layers))
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
    return not family.has_attention
