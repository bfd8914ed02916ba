"""What the layers of a model attend to, by the keys of its Hugging Face config."""

from collections.abc import Mapping
from typing import Any

from vllm.config.sizes import check_window
from vllm.errors import ConfigError

_WINDOW_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}
"""Model types of which every n-th layer has full attention, the others a window; for configs that
do not name the kinds of their layers."""
_NO_WINDOWS = frozenset({"llama", "opt", "bert", "roberta", "xlm-roberta", "camembert"})
"""Model types whose attention ignores `sliding_window`, though some checkpoints give one."""
_WINDOWS_IF_SWITCHED_ON = frozenset({"qwen2", "qwen3"})
"""Model types that use windows only with `use_sliding_window`."""


def read_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Per layer: how many of the most recent keys a query sees, itself included; None: all.

    Raises:
        ConfigError: the kinds of too few layers are given, or the window is no number of tokens.
    """
    window, model_type = config.get("sliding_window"), config.get("model_type")
    is_on = config.get("use_sliding_window", model_type not in _WINDOWS_IF_SWITCHED_ON)
    if window is None or model_type in _NO_WINDOWS or is_on is False:
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
    pattern = config.get("sliding_window_pattern") or _WINDOW_PATTERNS.get(str(model_type))
    if pattern:
        return tuple(None if (i + 1) % pattern == 0 else window for i in range(num_layers))
    first = config.get("max_window_layers") if config.get("use_sliding_window") else 0
    return tuple(None if i < (first or 0) else window for i in range(num_layers))


_WITHOUT_ATTENTION = frozenset({"mamba", "mamba2"})
"""Model types of which every layer keeps a state."""
_STATES = frozenset({"linear_attention", "mamba"})
"""Kinds of layers that keep a state, by the names that configs use."""


def read_state_layers(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Per layer: whether it keeps a state of fixed size in place of keys and values.

    Raises:
        ConfigError: the kinds of too few layers are given.
    """
    if config.get("model_type") in _WITHOUT_ATTENTION:
        return (True,) * num_layers
    if config.get("model_type") == "bamba":
        attends = config.get("attn_layer_indices") or ()
        return tuple(index not in attends for index in range(num_layers))
    layer_types = config.get("layer_types") or config.get("layers_block_type")
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
    model_type = config.get("model_type")
    if model_type == "granitemoehybrid":
        return config.get("position_embedding_type") != "rope"
    return model_type in _WITHOUT_ATTENTION
