"""Experts with the weights of quantized checkpoints.

While they are loaded, each expert is three linear layers in the format of the checkpoint. Then the
weights of all experts become one layer in the layout of the device.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from vllm.errors import WeightLoadError
from vllm.model_executor.layers.experts import DenseExperts, Experts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    ParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.slice import dtype_name
from vllm.model_executor.layers.stored.stored_linear import Kept, StoredLinear, bytes_of
from vllm.model_executor.layers.stored.without_values import without_values
from vllm.ops import get_ops
from vllm.ops.expert_options import SILU_EXPERTS
from vllm.ops.prepared import ExpertMatmuls, PreparedExperts
from vllm.ops.stored_weight import StoredWeight

EXPERT_PARTS = SILU_EXPERTS.parts
"""Names of the parts of a gated expert."""


def are_plain(layer: Experts) -> bool:
    """Return whether the experts are gated with silu and have no biases.

    Only these can be calibrated, or be written by `vllm quantize`.
    """
    return layer.options.is_silu and layer.gate_up_bias is None


class DeviceExperts(DenseExperts):
    """Experts that are converted to the layout of the device after loading.

    They stay dense if the device has no layout for them.

    Args:
        name: name of the module, for errors.
    """

    stored_as: str | None = None
    """Words of the log for the format in the checkpoint; None: the log has no line about it, or the
    layer is not finished."""
    kept: Kept | None = None
    """Format and bytes on the device, for the log; None until the layer is finished."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.packed: PreparedExperts | None = None

    def remove_loaded(self, layer: Experts) -> None:
        """Remove the parameters into which the weights were loaded."""
        layer.remove_weights()

    def finish_like(self, layer: Experts, first: Experts, second: Experts) -> None:
        """Give the layer uninitialised memory like finished layers with fewer experts.

        Sizes grow by the same amount with each further expert.

        Args:
            layer: layer with parameters in the format of the checkpoint.
            first: a finished layer with one expert that is like the experts of `layer`.
            second: a finished layer with two such experts, or with one if `layer` has no more.
        """
        methods = first.method, second.method
        one, two = (each for each in methods if isinstance(each, DeviceExperts))
        device, growth = next(layer.parameters()).device, len(layer.expert_ids) - 1
        own = [(first._parameters[name], layer._parameters[name]) for name in layer.own_parameters]
        shared: dict[int, Tensor] = {id(theirs): ours for theirs, ours in own if ours is not None}
        self.remove_loaded(layer)
        finished = without_values(first, device, second, growth, shared)
        layer._parameters, layer._buffers = finished._parameters, finished._buffers
        layer._modules = finished._modules
        self.stored_as = one.stored_as
        if one.kept is not None and two.kept is not None:
            more = growth * (two.kept.num_bytes - one.kept.num_bytes)
            self.kept = Kept(one.kept.kind, one.kept.num_bytes + more)
        if isinstance(one.packed, nn.Module):
            self.packed = finished.packed
        elif one.packed is not None:
            assert self.kept is not None, "the other layers are finished"
            self.packed = _ExpertsWithoutValues(self.kept.num_bytes, device)

    def to_device_layout(
        self,
        layer: Experts,
        gate: list[StoredWeight],
        up: list[StoredWeight],
        down: list[StoredWeight],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Set `packed` to the weights in the layout of the device, if the device supports them.

        Each list has one weight per expert; `gate` is empty for experts without gates.

        Raises:
            WeightLoadError: the weights cannot be used.
        """
        try:
            self.packed = get_ops().prepare_experts(
                gate, up, down, dtype, layer.biases, layer.options
            )
        except ValueError as error:
            raise WeightLoadError(f"the weights of {self.name} cannot be used: {error}") from error
        if isinstance(self.packed, nn.Module):  # makes its tensors a part of the model
            layer.packed = self.packed.to(device)

    @property
    def is_dequantized(self) -> bool:
        return self.packed is None

    def apply(self, layer: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if self.packed is None:
            return super().apply(layer, x, ids, weights)
        return self.packed.forward(x, ids, weights)

    def matmuls(self, layer: Experts) -> ExpertMatmuls | None:
        if self.packed is None:
            return super().matmuls(layer)
        return self.packed if isinstance(self.packed, ExpertMatmuls) else None


class _ExpertsWithoutValues:
    """Memory of prepared experts that have no parameters of their own; it computes nothing.

    Args:
        num_bytes: size of the memory.
        device: device of the memory.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        raise AssertionError("the weights have no values")

    def multiply_gate_up(self, expert: int, x: Tensor) -> Tensor:
        raise AssertionError("the weights have no values")

    def multiply_down(self, expert: int, x: Tensor) -> Tensor:
        raise AssertionError("the weights have no values")


class RoundedExperts(DeviceExperts):
    """Dense experts that are quantized once they are loaded; their inputs are not quantized.

    They stay dense if the device has no kernel for them.

    Args:
        name: name of the module, for errors.
        round_weights: given the index of an expert on this rank, its gate and up [2 * I, hidden]
            (or up [I, hidden]) and its down [hidden, I], returns its quantized parts in the order
            of `ExpertOptions.parts`.
    """

    def __init__(
        self, name: str, round_weights: Callable[[int, Tensor, Tensor], tuple[StoredWeight, ...]]
    ) -> None:
        super().__init__(name)
        self.round_weights = round_weights

    @torch.no_grad()
    def finish(self, layer: Experts) -> None:
        gate_up, down = layer.gate_up.data, layer.down.data
        rounded = [
            self.round_weights(number, *(both.cpu() for both in weights))
            for number, weights in enumerate(zip(gate_up, down, strict=True))
        ]
        *gate, up, downs = (list(part) for part in zip(*rounded, strict=True))
        gates = gate[0] if gate else []
        self.to_device_layout(layer, gates, up, downs, down.dtype, down.device)
        self.stored_as = dtype_name(down.dtype)
        if self.packed is not None:
            self.kept = Kept(up[0].kind, bytes_of(self.packed))
            self.remove_loaded(layer)


class StoredExperts(DeviceExperts):
    """Experts in the format of the checkpoint until they are loaded, then in the device layout.

    Args:
        name: name of the module, for errors.
    """

    def create_weights(self, layer: Experts) -> None:
        self.dtype = torch.get_default_dtype()
        total, hidden, tp = layer.intermediate_size * layer.tp.size, layer.hidden_size, layer.tp
        for number in layer.built_ids:
            expert = nn.Module()
            *first, second = layer.options.parts
            for part in first:
                expert.add_module(part, ColumnParallelLinear(hidden, {"": total}, tp))
            expert.add_module(second, RowParallelLinear(total, hidden, tp))
            for linear in expert.children():
                assert isinstance(linear, ParallelLinear)
                linear.is_held = True
            layer.add_module(str(number), expert)

    @torch.no_grad()
    def finish(self, layer: Experts) -> None:
        device = next(layer.parameters()).device
        gate, up, down = self.read(layer)
        self.remove_loaded(layer)
        self.to_device_layout(layer, gate, up, down, self.dtype, device)
        if self.packed is not None:
            self.kept = Kept(up[0].kind, bytes_of(self.packed))
            return
        width = layer.options.first_width(layer.intermediate_size)
        dense = torch.empty(len(up), width, layer.hidden_size)
        gate_up = dense.to(device, self.dtype)
        downs = torch.empty(
            len(down), layer.hidden_size, layer.intermediate_size, dtype=self.dtype, device=device
        )
        for number in range(len(up)):
            both = [part[number].dequantize() for part in (gate, up) if part]
            gate_up[number].copy_(torch.cat(both))
            downs[number].copy_(down[number].dequantize())
        layer.gate_up = nn.Parameter(gate_up, requires_grad=False)
        layer.down = nn.Parameter(downs, requires_grad=False)
        self.kept = Kept(dtype_name(self.dtype), gate_up.nbytes + downs.nbytes)

    def remove_loaded(self, layer: Experts) -> None:
        for number in layer.built_ids:
            for linear in layer.get_submodule(str(number)).children():
                assert isinstance(linear, ParallelLinear)
                linear.remove_weights()  # the loader still has a reference to the layer
            delattr(layer, str(number))

    def read(self, layer: Experts) -> tuple[list[StoredWeight], ...]:
        """Return the gate, up and down weights, each a list with one weight per expert of this
        rank.

        The list of gates is empty for experts without gates.
        """
        parts = layer.options.parts
        return tuple(
            list(self._weights(layer, part)) if part in parts else [] for part in EXPERT_PARTS
        )

    def _weights(self, layer: Experts, part: str) -> Iterator[StoredWeight]:
        for number in layer.built_ids:
            linear = layer.get_submodule(f"{number}.{part}")
            assert isinstance(linear, ParallelLinear)
            if not isinstance(linear.method, StoredLinear):
                raise WeightLoadError(
                    f"{self.name}.{number}.{part} is not quantized, and other experts are: all "
                    f"experts of a layer must be stored alike"
                )
            yield linear.method.stored_weight(linear)
