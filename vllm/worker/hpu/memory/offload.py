"""Keeps the weights of some layers on the host, for models that are larger than the card.

The parameters of these layers share one set of tensors on the card, the slot. It holds the weights
of the layer that runs next: after a layer has run, the weights of the next such layer are copied
while the layers in between, whose weights are on the card, are computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vllm.bucketing import format_bytes
from vllm.logger import init_logger
from vllm.model_executor.loader.stage import present_layers
from vllm.model_executor.models.interface import LoadableModel
from vllm.platforms.habana.bridge import HabanaBridge

logger = init_logger(__name__)

_Signature = tuple[tuple[str, torch.Size, torch.dtype], ...]
"""Name, shape and type of every parameter of a layer."""


def choose_layers(model: LoadableModel, num_bytes: int) -> list[nn.Module]:
    """Choose the layers whose weights are kept on the host: the fewest that save `num_bytes`.

    One of them still takes its memory on the card, for the slot. They are spread evenly, so that a
    copy has the time of several other layers. If `num_bytes` cannot be saved, all layers are
    chosen.

    Args:
        model: the model; its parameters may be on the meta device.
        num_bytes: bytes of device memory to save.
    """
    layers = present_layers(model)
    # Ascending order; which layers are chosen is decided below.
    sizes = sorted(map(_num_bytes, layers))
    counts = range(2, len(layers))
    count = next((n for n in counts if sum(sizes[:n]) - sizes[-1] >= num_bytes), len(layers))
    return [layers[(2 * i + 1) * len(layers) // (2 * count)] for i in range(count)]


def _num_bytes(layer: nn.Module) -> int:
    return sum(param.nbytes for param in layer.parameters())


@dataclass
class _Slot:
    """Parameters on the card that several layers share, and the index of the layer they
    hold now.
    """

    params: list[nn.Parameter]
    held: int | None = None


class StreamedLayers:
    """Copies weights from the host to the card, layer by layer, while the model is in use.

    Args:
        bridge: the card; its mode must not record graphs.
        layers: layers in the order they run; their parameters are on the host, and are replaced.

    Attributes:
        host_bytes: bytes of weights on the host.
        device_bytes: device memory of the slots.

    Raises:
        MemoryError: the card has no memory for a slot.
    """

    def __init__(self, bridge: HabanaBridge, layers: Sequence[nn.Module]) -> None:
        self._bridge = bridge
        self._weights: list[list[Tensor]] = []
        """Weights of each layer, in host memory."""
        self._slots: dict[_Signature, _Slot] = {}
        self._next: list[int] = []
        """For each layer, the next layer with the same slot; for the last one, the first."""
        self.host_bytes = sum(map(_num_bytes, layers))
        signatures = [_signature(layer) for layer in layers]
        for number, (layer, signature) in enumerate(zip(layers, signatures, strict=True)):
            self._weights.append([param.data for param in layer.parameters()])
            slot = self._slots.get(signature)
            if slot is None:
                params = [
                    nn.Parameter(bridge.zeros(param.shape, param.dtype), requires_grad=False)
                    for param in layer.parameters()
                ]
                slot = self._slots[signature] = _Slot(params)
            later = [*range(number + 1, len(layers)), *range(number + 1)]
            self._next.append(next(n for n in later if signatures[n] == signature))
            _replace_parameters(layer, slot.params)
            layer.register_forward_pre_hook(partial(self._before, slot, number))
            layer.register_forward_hook(partial(self._after, slot, number))
        slots = self._slots.values()
        self.device_bytes = sum(param.nbytes for slot in slots for param in slot.params)

    def _before(self, slot: _Slot, number: int, layer: nn.Module, _: Any) -> None:
        params = list(layer.parameters())
        # Other code has moved the weights, for example with `model.to`.
        if params[0] is not slot.params[0]:
            slot.params, slot.held = params, None
        if slot.held != number:  # the first launch, or the last one was interrupted
            self._fill(slot, number)

    def _after(self, slot: _Slot, number: int, *_: Any) -> None:
        following = self._next[number]
        if following != number:
            self._fill(slot, following)

    def _fill(self, slot: _Slot, number: int) -> None:
        # Launch recorded operations first: they read the weights that are in the slot now.
        self._bridge.mark_step()
        slot.held = None
        for param, weight in zip(slot.params, self._weights[number], strict=True):
            param.data.copy_(weight, non_blocking=True)
        slot.held = number


def stream_layers(
    bridge: HabanaBridge, model: LoadableModel, layers: Sequence[nn.Module], asked_bytes: int
) -> StreamedLayers:
    """Stream layers of a model from the host, and log how many bytes are kept there.

    Args:
        bridge: the card.
        model: has the layers.
        layers: layers from `choose_layers`, with their weights on the host.
        asked_bytes: bytes of device memory that was to be saved.
    """
    streamed = StreamedLayers(bridge, layers)
    logger.info(
        "%d of %d layers stay on the host with %s of weights; each step copies them to the card, "
        "into a buffer of %s",
        len(layers),
        len(model.layers),
        format_bytes(streamed.host_bytes),
        format_bytes(streamed.device_bytes),
    )
    spared_bytes = streamed.host_bytes - streamed.device_bytes
    if spared_bytes < asked_bytes:
        logger.warning(
            "cpu_offload_gb asks to keep %s of weights off the card, but even all layers on the "
            "host save only %s of its memory",
            format_bytes(asked_bytes),
            format_bytes(spared_bytes),
        )
    return streamed


def _signature(layer: nn.Module) -> _Signature:
    return tuple((name, param.shape, param.dtype) for name, param in layer.named_parameters())


def _replace_parameters(layer: nn.Module, params: Sequence[nn.Parameter]) -> None:
    for (name, _), param in zip(list(layer.named_parameters()), params, strict=True):
        owner, _, attribute = name.rpartition(".")
        setattr(layer.get_submodule(owner), attribute, param)
