"""`QUANT_CONFIG` on a checkpoint that is stored in FP8, such as DeepSeek's with 128 x 128 blocks.

Layers are loaded in the format of the checkpoint. Mode MEASURE measures them unchanged; mode
QUANTIZE dequantizes them, and quantizes again with the measured scales. Layers that the lists of
the config exclude keep the format of the checkpoint.
"""

import torch
from torch import Tensor, nn

from vllm.distributed import Stage, TPGroup
from vllm.model_executor.layers.embedding import EmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.layers.experts import Experts, ExpertsMethod
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.slice import CheckpointTensor, ParamTarget
from vllm.model_executor.layers.stored.stored_experts import RoundedExperts, StoredExperts
from vllm.model_executor.layers.stored.stored_linear import RoundedLinear, StoredHead, StoredLinear
from vllm.model_executor.quantization.inc.measure import (
    MeasuredExperts,
    MeasuredLinear,
    note,
    start_measuring,
)
from vllm.model_executor.quantization.interface import CheckpointNames, Quantization
from vllm.ops.stored_weight import StoredWeight


class IncOnStored(Quantization):
    """Combines the format of `QUANT_CONFIG` with the FP8 format of the checkpoint.

    Args:
        inc: quantization of `QUANT_CONFIG`; decides what is done with a layer.
        stored: quantization of the checkpoint; decides how the layer is loaded.
    """

    def __init__(self, inc: Quantization, stored: Quantization) -> None:
        self.inc = inc
        self.stored = stored

    def use_names(self, names: CheckpointNames) -> None:
        self.stored.use_names(names)
        self.inc.use_names(names)

    def start(self, tp: TPGroup, stage: Stage | None = None) -> None:
        self.stored.start(tp, stage)
        self.inc.start(tp, stage)

    def linear_method(self, name: str, layer: ParallelLinear) -> LinearMethod | None:
        stored = self.stored.linear_method(name, layer)
        if layer.is_held:  # of an expert: the layer of all experts does the rest
            return stored
        return _combined(stored, self.inc.linear_method(name, layer))

    def embedding_method(self, name: str, layer: VocabParallelEmbedding) -> EmbeddingMethod | None:
        stored, wanted = (f.embedding_method(name, layer) for f in (self.stored, self.inc))
        if not isinstance(stored, StoredHead) or not isinstance(wanted, StoredHead):
            return stored or wanted
        linear = _combined(stored.linear, wanted.linear)
        return None if linear is None else StoredHead(linear)

    def experts_method(self, name: str, layer: Experts) -> ExpertsMethod | None:
        stored, wanted = (f.experts_method(name, layer) for f in (self.stored, self.inc))
        if not isinstance(stored, StoredExperts):
            return wanted or stored
        if isinstance(wanted, MeasuredExperts):
            return MeasuredStoredExperts(name)
        return RoundedStoredExperts(wanted) if isinstance(wanted, RoundedExperts) else stored

    def finish_model(self, model: nn.Module) -> None:
        self.stored.finish_model(model)
        self.inc.finish_model(model)


def _combined(stored: LinearMethod | None, wanted: LinearMethod | None) -> LinearMethod | None:
    """Return a method that loads a layer as the checkpoint stores it, and then applies `wanted`."""
    if not isinstance(stored, StoredLinear):
        return wanted or stored
    if isinstance(wanted, MeasuredLinear):
        return MeasuredStoredLinear(stored, wanted.measures_outputs)
    if isinstance(wanted, RoundedLinear):
        return RoundedStoredLinear(stored, wanted)
    return stored


class _OnStoredLinear(StoredLinear):
    """Base class: loads a linear layer with the method of the checkpoint's format."""

    def __init__(self, stored: StoredLinear) -> None:
        super().__init__(stored.name)
        self.stored = stored
        self.optional_parameters = stored.optional_parameters

    def create_parameters(self, layer: ParallelLinear) -> None:
        self.stored.create_parameters(layer)

    def load(self, target: ParamTarget, name: str, source: CheckpointTensor, tp: TPGroup) -> None:
        self.stored.load(target, name, source, tp)

    def fill_missing(self, target: ParamTarget) -> None:
        self.stored.fill_missing(target)

    def fill_indices(self, layer: ParallelLinear) -> None:
        self.stored.fill_indices(layer)

    def stored_weight(self, layer: ParallelLinear) -> StoredWeight:
        return self.stored.stored_weight(layer)


class RoundedStoredLinear(_OnStoredLinear):
    """A linear layer that is requantized once it is loaded.

    Args:
        stored: the method that loads it.
        rounded: the method that quantizes it again.
    """

    def __init__(self, stored: StoredLinear, rounded: RoundedLinear) -> None:
        super().__init__(stored)
        self.round_weight = rounded.round_weight

    def stored_weight(self, layer: ParallelLinear) -> StoredWeight:
        return self.round_weight(super().stored_weight(layer).dequantize())


class MeasuredStoredLinear(_OnStoredLinear):
    """A stored linear layer that measures its largest input, weight and, if asked for, output."""

    def __init__(self, stored: StoredLinear, measures_outputs: bool) -> None:
        super().__init__(stored)
        self.measures_outputs = measures_outputs

    @torch.no_grad()
    def finish(self, layer: ParallelLinear) -> None:
        largest = super().stored_weight(layer).dequantize().abs().amax()
        device = next(layer.parameters()).device
        super().finish(layer)
        start_measuring(layer, largest.to(device), self.measures_outputs)

    def apply(self, layer: ParallelLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        note(layer, "input", x)
        out = super().apply(layer, x, bias)
        if self.measures_outputs:
            note(layer, "output", out)
        return out


class RoundedStoredExperts(StoredExperts):
    """Stored experts that are requantized once they are loaded.

    Args:
        rounded: the method that quantizes them again.
    """

    def __init__(self, rounded: RoundedExperts) -> None:
        super().__init__(rounded.name)
        self.round_weights = rounded.round_weights

    def read(self, layer: Experts) -> tuple[list[StoredWeight], ...]:
        rounded = []
        for number, (gate, up, down) in enumerate(zip(*super().read(layer), strict=True)):
            gate_up = torch.cat((gate.dequantize(), up.dequantize()))
            rounded.append(self.round_weights(number, gate_up, down.dequantize()))
        return tuple(list(part) for part in zip(*rounded, strict=True))


class MeasuredStoredExperts(StoredExperts):
    """Stored experts that measure their largest input and weights."""

    def read(self, layer: Experts) -> tuple[list[StoredWeight], ...]:
        parts = super().read(layer)
        gate, up, down = ([float(w.dequantize().abs().max()) for w in part] for part in parts)
        self.largest = torch.tensor(
            [[max(a, b), c] for a, b, c in zip(gate, up, down, strict=True)]
        )
        return parts

    @torch.no_grad()
    def finish(self, layer: Experts) -> None:
        device = next(layer.parameters()).device
        super().finish(layer)
        start_measuring(layer, self.largest.to(device))

    def apply(self, layer: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        note(layer, "input", x)
        return super().apply(layer, x, ids, weights)
