"""Runs only some layers of a transformers decoder, as needed by a pipeline stage.

The forward method of such a decoder runs all of its layers, so the other layers are replaced by
modules that return their input. Its config class says which modules come before and after the
layers (`base_model_pp_plan`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_LAYERS = "layers"


class LayerRanges:
    """The layers of a decoder, some of which can be disabled temporarily.

    Args:
        decoder: decoder of transformers.
        config: config of the model.
        num_layers: number of layers of the model.
    """

    def __init__(self, decoder: nn.Module, config: Any, num_layers: int) -> None:
        self._decoder = decoder
        plan: Mapping[str, Any] = getattr(config, "base_model_pp_plan", None) or {}
        layers = getattr(decoder, _LAYERS, None)
        names = list(plan)
        self.is_planned = isinstance(layers, nn.ModuleList) and len(layers) == num_layers
        self.is_planned &= _LAYERS in plan and all(hasattr(decoder, name) for name in names)
        """Whether transformers says how the decoder is divided."""
        if self.is_planned:
            place = names.index(_LAYERS)
            self._before, self._after = names[:place], names[place + 1 :]
            self._left_out = [_LeftOut(layer) for layer in layers or ()]

    def modules_around(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return the modules that run before the layers, and the ones that run after them."""
        before, after = (
            [getattr(self._decoder, name) for name in names]
            for names in (self._before, self._after)
        )
        return before, after

    @contextmanager
    def only(self, first: int, end: int) -> Iterator[None]:
        """Let the decoder run only layers `first` to `end` - 1, while the context is open.

        The modules after the layers run only if `end` is the number of layers.
        """
        layers: nn.ModuleList = getattr(self._decoder, _LAYERS)
        own: Sequence[nn.Module] = list(layers)
        after = {name: getattr(self._decoder, name) for name in self._after}
        try:
            for index, left_out in enumerate(self._left_out):
                if not first <= index < end:
                    layers[index] = left_out
            if end < len(own):
                for name in after:
                    setattr(self._decoder, name, nn.Identity())
            yield
        finally:
            for index, layer in enumerate(own):
                layers[index] = layer
            for name, module in after.items():
                setattr(self._decoder, name, module)


class _LeftOut(nn.Module):
    """Replaces a layer and returns the hidden states unchanged.

    It has the attributes of the layer that decoders read.

    Args:
        layer: the layer that it replaces.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        plain = (str, int, float, bool, type(None))
        for name, value in vars(layer).items():
            if not name.startswith("_") and isinstance(value, plain):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states
