"""A mixture of experts on packed weights: one call of the kernel of csrc/cpu/moe.h.

The contract is `NativeOps.moe`; `vllm.ops.cpu.weights.linear` packs the weights. Knows no router
and no models.
"""

import ctypes
from collections.abc import Sequence
from ctypes import Array, c_void_p
from typing import Any, cast

import torch
from torch import Tensor

from vllm.ops.cpu.library import require_cpu_kernels
from vllm.ops.cpu.symbols import Rows
from vllm.ops.cpu.weights.linear import PackedWeight
from vllm.ops.cpu.weights.weight_format import WeightFormat
from vllm.ops.expert_options import NO_BIASES, SILU_EXPERTS, ExpertBiases, ExpertOptions

_ALIGNMENT = 64

_num_threads = torch.get_num_threads


class PackedExperts:
    """The weights of E experts in the layout of the kernels.

    The result of a token does not depend on other tokens, nor on the number of threads.
    """

    def __init__(
        self,
        gate: Sequence[PackedWeight],
        up: Sequence[PackedWeight],
        down: Sequence[PackedWeight],
        biases: ExpertBiases = NO_BIASES,
        options: ExpertOptions = SILU_EXPERTS,
    ) -> None:
        """Join the packed weights of E experts.

        Args:
            gate: E weights [I, H], all in the same format; for experts without gates the same
                objects as `up`.
            up: E weights [I, H], in the format of the gates.
            down: E weights [H, I], all in the same format.
            biases: biases of the dtype of activations.
            options: options; see `NativeOps.moe`.

        Raises:
            ValueError: counts, shapes or formats do not fit, or a gate and its up have different
                orders of inputs.
        """
        if not len(gate) == len(up) == len(down) > 0:
            raise ValueError(
                f"gate, up and down must be lists of the same length, at least 1, got {len(gate)}, "
                f"{len(up)} and {len(down)} weights"
            )
        self.intermediate_size, self.hidden_size = gate[0].out_features, gate[0].in_features
        self.num_experts, self._has_gate = len(gate), options.has_gate
        _check_alike([*gate, *up], self.intermediate_size, self.hidden_size)
        _check_alike(down, self.hidden_size, self.intermediate_size)
        for number, (a, b) in enumerate(zip(gate, up, strict=True)):
            if not a.has_order_of(b):
                raise ValueError(f"gate and up of expert {number} have different orders of inputs")
        self._weights = (tuple(gate), tuple(up), tuple(down))
        self._addresses = tuple(_addresses(weights) for weights in self._weights)
        self._biases = biases
        kernels = require_cpu_kernels("packed experts need")
        self._args = kernels.plain.MoeArgs
        self._kernels = {dtype: of_dtype.moe for dtype, of_dtype in kernels.of.items()}
        if WeightFormat.FLOAT32 in (gate[0].weight_format, down[0].weight_format):
            del self._kernels[torch.bfloat16]
        if biases.gate_up is not None and not options.has_gate:
            raise ValueError("experts without gates must not have biases")
        for bias, width in (
            (biases.gate_up, 2 * self.intermediate_size),
            (biases.down, self.hidden_size),
        ):
            if bias is not None:
                self._check_bias(bias, width)
        activations = kernels.plain.ExpertActivation
        activation = activations.kSilu
        if options.is_gelu:
            activation = activations.kGeluTanh
        if options.limit is not None:
            activation = activations.kClampedSwiglu
        if not options.has_gate:
            activation = activations.kSquaredRelu
        pointers = (ctypes.addressof(addresses) for addresses in self._addresses)
        self._struct = kernels.plain.Experts(
            **dict(zip(("gate", "up", "down"), pointers, strict=True)),
            gate_up_bias=None if biases.gate_up is None else biases.gate_up.data_ptr(),
            down_bias=None if biases.down is None else biases.down.data_ptr(),
            num_experts=self.num_experts,
            first_id=options.first_expert or 0,
            has_others=options.first_expert is not None,
            has_orders=any(weight.order is not None for weight in gate),
            scales_inputs=options.scales_inputs,
            activation=activation,
            alpha=options.alpha,
            limit=options.limit or 0.0,
        )
        self.address = ctypes.addressof(self._struct)
        """Address of the Experts that kernels take, valid while this object lives."""

    def _check_bias(self, bias: Tensor, width: int) -> None:
        """Check a bias; from now on activations must have its dtype."""
        if bias.shape != (self.num_experts, width) or not bias.is_contiguous() or not bias.is_cpu:
            raise ValueError(
                f"a bias must be dense [{self.num_experts}, {width}] on cpu, got "
                f"{list(bias.shape)} on {bias.device}"
            )
        self._kernels = {d: kernel for d, kernel in self._kernels.items() if d == bias.dtype}

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of activations that `forward` accepts."""
        return tuple(self._kernels)

    @classmethod
    def pack(
        cls,
        gate_up: Tensor,
        down: Tensor,
        weight_format: WeightFormat | None = None,
        biases: ExpertBiases = NO_BIASES,
        options: ExpertOptions = SILU_EXPERTS,
    ) -> "PackedExperts":
        """Pack or quantize dense experts.

        Args:
            gate_up: [E, 2 * I, H], gate then up; [E, I, H] without gates. Must not be used
                afterwards.
            down: [E, H, I]. Must not be used afterwards.
            weight_format: int8 or int4, in new memory; None packs the weights unchanged, in
                their own memory if H and I are multiples of 64.
            biases: biases; see `__init__`.
            options: options; see `__init__`.

        Raises:
            ValueError: dtypes, shapes or strides do not allow it.
            MemoryError: there is no scratch memory.
        """
        num_first = len(options.parts) - 1
        if gate_up.dim() != 3 or down.dim() != 3 or gate_up.shape[1] % num_first:
            raise ValueError(
                "gate_up must be [experts, 2 * intermediate, hidden] and down [experts, hidden, "
                f"intermediate], got {list(gate_up.shape)} and {list(down.shape)}"
            )
        parts = (*gate_up.chunk(num_first, dim=1), down)
        *gates, ups, downs = ([_pack(matrix, weight_format) for matrix in part] for part in parts)
        return cls(gates[0] if gates else ups, ups, downs, biases, options)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights with their scales."""
        parts = self._weights if self._has_gate else self._weights[1:]
        return sum(weight.num_bytes for part in parts for weight in part)

    def multiply_gate_up(self, expert: int, x: Tensor) -> Tensor:
        """Multiply x with gate and up of one expert, without biases; see `ExpertMatmuls`."""
        gate, up, _ = self._weights
        if not self._has_gate:
            return up[expert].linear(x)
        return torch.cat([gate[expert].linear(x), up[expert].linear(x)], dim=1)

    def multiply_down(self, expert: int, x: Tensor) -> Tensor:
        """Multiply x with down of one expert, without biases; see `ExpertMatmuls`."""
        return self._weights[2][expert].linear(x)

    def forward(self, x: Any, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Compute the experts of each token; see `NativeOps.moe`.

        Args:
            x: [T, hidden], float32 or bfloat16 (with float32 weights: float32); rows may be
                further apart.
            topk_ids: [T, k] int64; rows may be further apart.
            topk_weights: [T, k] float32; rows may be further apart.

        Returns:
            [T, hidden] of x's dtype.

        Raises:
            ValueError: dtypes, shapes or strides do not fit.
            IndexError: an id is out of range.
            MemoryError: there is no scratch memory.
        """
        kernel = self._kernels.get(x.dtype)
        if kernel is None or x.dim() != 2 or x.shape[1] != self.hidden_size or not x.is_cpu:
            if isinstance(x, Rows):
                return cast(Tensor, x.recorder.experts(self, x, topk_ids, topk_weights))
            raise ValueError(
                f"x {x.dtype} {list(x.shape)} on {x.device} does not fit experts with hidden size "
                f"{self.hidden_size} and {self._weights[0][0].weight_format.name} weights"
            )
        if x.stride(1) != 1:
            raise ValueError(f"x is not dense: strides {list(x.stride())}")
        choices = (
            ("topk_ids", topk_ids, torch.int64),
            ("topk_weights", topk_weights, torch.float32),
        )
        for name, values, dtype in choices:
            is_dense = values.is_cpu and values.dim() == 2 and values.stride(1) == 1
            is_whole = values.dim() == 2 and values.shape == (len(x), topk_ids.shape[-1])
            if values.dtype != dtype or not is_whole or not is_dense or topk_ids.shape[1] == 0:
                raise ValueError(
                    f"{name} must be {dtype} with one dense row for each of {len(x)} tokens, got "
                    f"{values.dtype} {list(values.shape)} on {values.device}"
                )
        out = x.new_empty(x.shape)
        args = self._args(
            experts=self.address,
            x=x.data_ptr(),
            ids=topk_ids.data_ptr(),
            weights=topk_weights.data_ptr(),
            out=out.data_ptr(),
            num_tokens=len(x),
            top_k=topk_ids.shape[1],
            x_stride=x.stride(0),
            ids_stride=topk_ids.stride(0),
            weights_stride=topk_weights.stride(0),
        )
        status = kernel(ctypes.addressof(args), _num_threads())
        if status >= 0:
            bad = topk_ids.flatten()[status]
            raise IndexError(
                f"topk_ids[{status}] must be one of the {self.num_experts} experts, got {bad}"
            )
        if status != -1:
            raise MemoryError(
                f"not enough memory to run {self.num_experts} experts for {len(x)} tokens"
            )
        return out


def _addresses(weights: Sequence[PackedWeight]) -> "Array[c_void_p]":
    return (c_void_p * len(weights))(*(weight.address for weight in weights))


def _pack(matrix: Tensor, weight_format: WeightFormat | None) -> PackedWeight:
    if matrix.data_ptr() % _ALIGNMENT:
        matrix = matrix.clone()
    if weight_format is None:
        return PackedWeight.pack(matrix)
    return PackedWeight.quantize(matrix, weight_format)


def _check_alike(weights: Sequence[PackedWeight], num_out: int, num_in: int) -> None:
    """Check that all weights have the same size and format.

    Raises:
        ValueError: not all are [num_out, num_in] in the same format.
    """
    for weight in weights:
        if (weight.out_features, weight.in_features) != (num_out, num_in):
            raise ValueError(
                f"an expert's weight must be [{num_out}, {num_in}], got [{weight.out_features}, "
                f"{weight.in_features}]"
            )
        if weight.layout != weights[0].layout:
            raise ValueError(
                f"all experts must have the same layout, got {weight.layout} and "
                f"{weights[0].layout}"
            )
