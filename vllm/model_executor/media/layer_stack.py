"""The layers of an encoder of images or sounds, which run one after the other."""

from collections.abc import Callable, Collection, Iterable

from torch import Tensor, nn

RunLayers = Callable[[Tensor, Collection[int]], dict[int, Tensor] | None]
"""Runs all layers of a stack on hidden states [B, N, C]; see `LayerStack.run`. Its result is None
if it cannot run them."""


class LayerStack(nn.ModuleList):
    """Layers of one kind. A device may run all of them in one call.

    Args:
        layers: each maps hidden states [B, N, C], and a mask or None, to hidden states. It computes
            attention with `NativeOps.attend_within_items`; nothing else in it mixes tokens.
    """

    run_all: RunLayers | None = None
    """Runs the layers where no mask is given; None: they run one by one."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__(layers)

    def run(
        self, x: Tensor, wanted: Collection[int], mask: Tensor | None = None
    ) -> dict[int, Tensor]:
        """Return layer count -> hidden states [B, N, C] after this number of layers; 0 is `x`.

        Args:
            x: hidden states [B, N, C] of B items of N tokens. May be overwritten, if 0 is not
                wanted.
            wanted: the layer counts; others may be in the result.
            mask: bool, broadcasts to [B, heads, N, N]: which tokens of its item a token attends to;
                None: all.
        """
        if mask is None and self.run_all is not None:
            at_once = self.run_all(x, wanted)
            if at_once is not None:
                return at_once
        found = {0: x}
        for index, layer in enumerate(self, 1):
            x = layer(x, mask)
            if index in wanted:
                found[index] = x
        return found
