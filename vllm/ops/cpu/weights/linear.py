"""Weights of linear layers in the layout of the C++ kernels, and the matmuls with them.

A packed weight is the only copy: the kernels of csrc/cpu/linear.h multiply with any number of
tokens, and on the processors measured so far are at least as fast as torch for each number. Knows
no layers and no models.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from vllm.ops.cpu.library import CPUKernels, require_cpu_kernels
from vllm.ops.cpu.symbols import Ids, Rows
from vllm.ops.cpu.weights.int4_layouts import Int4Groups
from vllm.ops.cpu.weights.int4_minimums import MinimumGroups, minimum_panels
from vllm.ops.cpu.weights.weight_format import DENSE_FORMATS, WeightFormat, can_pack
from vllm.ops.stored_weight import MinimumWeight
from vllm.platforms.cpu import allocate_weight

_ALIGNMENT = 64

_num_threads = torch.get_num_threads


@dataclass(frozen=True, kw_only=True)
class ByteGroups:
    """Scales of a weight [out_features, in_features] of bytes, for blocks of neighbouring
    inputs.
    """

    scales: Tensor
    """[blocks, out_features]"""
    zeros: Tensor | None = None
    """Zero points, as many as scales, from 0 to 256; None: fp8 has none."""
    order: Tensor | None = None
    """[in_features] int32: the input that each column of the weight is for; None: as they come."""
    block_inputs: int
    """Inputs that share a scale: a divisor or a multiple of 128 and a multiple of 4, or all. With a
    table a multiple of 8."""
    table: Tensor | None = None
    """[16] values that the codes of a weight represent; None: it has no codes."""


class PackedWeight:
    """The weight of a linear layer [out_features, in_features] as the kernels read it.

    Made by `pack`, `quantize` or one of the methods named `from_...`.
    The result of a token does not depend on other tokens, nor on the number of threads.
    """

    def __init__(
        self,
        weight_format: WeightFormat,
        shape: torch.Size,
        panels: Tensor | None = None,
        groups: Int4Groups | ByteGroups | MinimumGroups | None = None,
        *,
        has_values: bool = True,
    ) -> None:
        """Wrap given panels, or allocate new ones: zeroed, or uninitialised.

        An int4 weight without groups has blocks of 32 inputs.
        """
        self.out_features, self.in_features = shape
        self.num_inputs = self.in_features
        """Number of inputs of a token; fewer than `in_features` if some are read twice."""
        self.weight_format = weight_format
        self.order = groups.order if groups is not None else None
        """[in_features] int32, the order in which inputs are read; None: as they come."""
        self._behind: tuple[PackedWeight, ...] = ()
        self._scales: Tensor | None = None
        self._sums: Tensor | None = None
        self._zeros: Tensor | None = None
        self._table: Tensor | None = None
        padded = _round_up(self.out_features)
        if isinstance(groups, ByteGroups):
            self._scales = _padded(groups.scales, padded)
            self._zeros = None if groups.zeros is None else _padded(groups.zeros, padded)
            self._table = None if groups.table is None else groups.table.bfloat16().contiguous()
        elif weight_format in (WeightFormat.INT8, WeightFormat.INT4, WeightFormat.MXFP4):
            self._scales = torch.zeros(padded)
        if weight_format is WeightFormat.INT8:
            self._sums = torch.zeros(padded, dtype=torch.int32)
        default_block = 32 if weight_format is WeightFormat.INT4 else 0
        kernels = _kernels()
        self._struct = kernels.plain.LinearWeight(
            scales=_address(self._scales),
            zeros=_address(self._zeros),
            sums=_address(self._sums),
            table=_address(self._table),
            order=_address(self.order),
            in_features=self.in_features,
            out_features=self.out_features,
            format=kernels.plain.WeightFormat[weight_format.value],
            block_inputs=default_block if groups is None else groups.block_inputs,
            factor_inputs=groups.factor_inputs if isinstance(groups, MinimumGroups) else 0,
            has_zeros=groups is not None and groups.zeros is not None,
        )
        self._address = ctypes.addressof(self._struct)
        if panels is None:
            num_bytes = kernels.plain.packed_bytes(self._address)
            panels = allocate_weight([num_bytes], torch.uint8)
            if has_values:
                panels.zero_()
        self._panels = panels
        self._struct.panels = panels.data_ptr()
        self._linear = {dtype: of_dtype.linear for dtype, of_dtype in kernels.of.items()}
        if weight_format is WeightFormat.FLOAT32:
            del self._linear[torch.bfloat16]

    @classmethod
    def pack(cls, weight: Tensor) -> "PackedWeight":
        """Pack a dense float32 or bfloat16 weight, in its own memory.

        `weight` must not be used afterwards. If out_features is not a multiple of 64, the result is
        in new memory, padded to a multiple.

        Raises:
            ValueError: its dtype, shape, strides or alignment do not allow it.
            MemoryError: there is no scratch memory; the weight is unchanged.
        """
        _check_weight(weight, None)
        num_out, num_in = weight.shape
        padded = _round_up(num_out)
        rows = weight if padded == num_out else _padded_panels(weight, padded)
        panels = rows.flatten()
        weight_format = DENSE_FORMATS[weight.dtype]
        _pack_panels(panels, padded, num_in // weight_format.inputs_per_word)
        return cls(weight_format, weight.shape, panels)

    @classmethod
    def from_int8(cls, weight: Tensor, scales: Tensor) -> "PackedWeight":
        """Pack int8 values [out_features, in_features] with one scale per output feature.

        Args:
            weight: int8, in_features a multiple of 4 and at most 65,000.
            scales: [out_features].

        Raises:
            MemoryError: there is no scratch memory.
        """
        num_out, num_in = weight.shape
        padded = _round_up(num_out)
        panels = _padded_panels(weight, padded)
        _pack_panels(panels, padded, num_in // WeightFormat.INT8.inputs_per_word)
        packed = cls(WeightFormat.INT8, weight.shape, panels.flatten())
        assert packed._scales is not None and packed._sums is not None
        packed._scales[:num_out] = scales
        packed._sums[:num_out] = weight.sum(1, dtype=torch.int32)
        return packed

    @classmethod
    def from_bytes(
        cls, weight_format: WeightFormat, codes: Tensor, groups: ByteGroups
    ) -> "PackedWeight":
        """Pack a weight of bytes whose elements the kernels convert to bf16.

        Args:
            weight_format: FP8, UINT8 or TABLE4.
            codes: [out_features, in_features] uint8: the elements, the bits of float8_e4m3fn
                without NaN, or indices of the table; in_features a multiple of 4, with a table 8.
            groups: the scales.

        Raises:
            MemoryError: there is no scratch memory.
        """
        num_out, num_in = codes.shape
        padded = _round_up(num_out)
        # The order of the four inputs of a word that the kernels expect (csrc/cpu/linear_format.h).
        in_words = codes.unflatten(1, (-1, 4))[..., [0, 2, 1, 3]]
        if weight_format is WeightFormat.TABLE4:
            in_words = in_words[:, ::2] | in_words[:, 1::2] << 4
        panels = _padded_panels(in_words.flatten(1), padded)
        _pack_panels(panels, padded, num_in // weight_format.inputs_per_word)
        return cls(weight_format, codes.shape, panels.flatten(), groups)

    @classmethod
    def quantize(cls, weight: Tensor, weight_format: WeightFormat) -> "PackedWeight":
        """Quantize a dense float32 or bfloat16 weight to int8 or int4, in new memory.

        Raises:
            ValueError: its dtype, shape, strides or alignment do not allow it, or the format is
                a dense one.
            MemoryError: there is no scratch memory.
        """
        if weight_format not in (WeightFormat.INT8, WeightFormat.INT4):
            raise ValueError(f"{weight_format.name} is not a quantized format: use pack")
        _check_weight(weight, weight_format)
        packed = cls(weight_format, weight.shape)
        quantize_weight = _kernels().of[weight.dtype].quantize_weight
        _check_memory(quantize_weight(packed._address, weight.data_ptr(), _num_threads()))
        return packed

    @classmethod
    def from_minimums(cls, weight: MinimumWeight) -> "PackedWeight":
        """Pack 4- or 5-bit values with scales and minimums.

        Args:
            weight: in_features a multiple of 16 (5 bits: 32). Multipliers are for 16 or 32 inputs
                (5 bits: 32), factors for a divisor of 512 inputs.
        """
        is_int4, num_in = weight.bits == 4, weight.shape[1]
        groups = MinimumGroups(
            block_inputs=num_in // weight.scales.multipliers.shape[1],
            factor_inputs=num_in // weight.scales.factors.shape[1],
        )
        weight_format = WeightFormat.INT4_MINIMUMS if is_int4 else WeightFormat.INT5_MINIMUMS
        panels = _padded_panels(minimum_panels(weight, _kernels().plain.kPanel))
        return cls(weight_format, weight.shape, panels, groups)

    @classmethod
    def from_groups(
        cls,
        words: Tensor,
        groups: Int4Groups,
        is_awq: bool,
        weight_format: WeightFormat = WeightFormat.INT4,
    ) -> "PackedWeight":
        """Pack 4-bit values in the layout of AWQ or GPTQ, with groups that were read before.

        Args:
            words: the packed values; with MXFP4, elements of E2M1.
            groups: the groups; with MXFP4, scales must be half of the format's scales.
            is_awq: True: the layout of AWQ; False: of GPTQ.
            weight_format: INT4 or MXFP4.
        """
        packed = cls(weight_format, groups.shape, groups=groups)
        kernels = _kernels()
        source = kernels.plain.Int4Source(
            words=words.data_ptr(),
            scales=groups.scales.data_ptr(),
            zeros=_address(groups.zeros),
            num_groups=len(groups.scales),
            group_inputs=groups.group_inputs,
            is_awq=is_awq,
        )
        kernels.plain.convert_int4(packed._address, ctypes.addressof(source), _num_threads())
        return packed

    @classmethod
    def stack(cls, parts: Sequence["PackedWeight"]) -> "PackedWeight":
        """Join weights with the same inputs: their outputs follow one another.

        Args:
            parts: the weights. The first becomes the result; do not use any of them otherwise.
        """
        first = parts[0]
        first._behind = tuple(parts[1:])
        first.out_features = sum(part.out_features for part in parts)
        for part, following in pairwise(parts):
            part._struct.next = following.address
        return first

    def read_inputs(self, order: Tensor, num_inputs: int) -> None:
        """Let the weight read its inputs in this order, some of them more than once.

        Args:
            order: [in_features] int32, below num_inputs. Of several columns for an input, all but
                the last one must be 0.
            num_inputs: number of inputs of a token.
        """
        assert len(order) == self.in_features >= num_inputs and self.order is None
        self.order, self.num_inputs = order, num_inputs
        self._struct.order = order.data_ptr()

    def scale_outputs(self, factors: Tensor) -> None:
        """Multiply the weights of each output by a factor [out_features], permanently."""
        assert self._scales is not None and self._scales.dim() == 1
        self._scales[: self.out_features] *= factors

    @property
    def address(self) -> int:
        """Address of the kernels' LinearWeight struct, valid as long as this object exists."""
        return self._address

    @property
    def layout(self) -> tuple[WeightFormat, int, int, bool]:
        """(format, inputs per scale, inputs per factor of scales, whether there are zero points).

        Weights with the same layout and shape differ only in their values.
        """
        weight = self._struct
        return (
            self.weight_format,
            weight.block_inputs,
            weight.factor_inputs,
            bool(weight.has_zeros),
        )

    def has_order_of(self, other: "PackedWeight") -> bool:
        """Return whether two weights read their inputs in the same order."""
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight with its scales."""
        tensors = (self._panels, self._scales, self._zeros, self._sums, self._table, self.order)
        own = sum(t.nbytes for t in tensors if t is not None)
        return own + sum(part.num_bytes for part in self._behind)

    def linear(self, x: Any, bias: Tensor | None = None) -> Tensor:
        """Compute x [..., num_inputs] @ weight.T + bias -> [..., out_features] of x's dtype.

        Args:
            x: float32 or bfloat16 (with a float32 weight: float32), dense, except that the rows of
                a matrix may be further apart.
            bias: [out_features] of x's dtype, or None.

        Raises:
            ValueError: dtypes, shapes or strides do not fit.
            MemoryError: there is no scratch memory.
        """
        function = self._linear.get(x.dtype)
        shape = x.shape
        if function is None or shape[-1] != self.num_inputs or not x.is_cpu:
            if isinstance(x, Rows):
                return cast(Tensor, x.recorder.linear(x, self, bias))
            self._refuse("x", x)
        if x.is_contiguous():
            stride = self.num_inputs
        elif len(shape) == 2 and x.stride(1) == 1:
            stride = x.stride(0)
        else:
            raise ValueError(f"x is not dense: shape {list(shape)}, strides {list(x.stride())}")
        bias_pointer = None
        if bias is not None:
            is_dense = bias.is_contiguous() and bias.is_cpu
            if bias.dtype != x.dtype or bias.shape != (self.out_features,) or not is_dense:
                self._refuse("bias", bias)
            bias_pointer = bias.data_ptr()
        out = x.new_empty(*shape[:-1], self.out_features)
        rows = shape[0] if len(shape) == 2 else x.numel() // self.num_inputs
        if function(
            self._address, x.data_ptr(), bias_pointer, out.data_ptr(), rows, stride, _num_threads()
        ):
            raise MemoryError(f"not enough memory for {rows} rows of a linear layer")
        return out

    def rows(self, ids: Any, dtype: torch.dtype) -> Tensor:
        """Return rows of the weight, such as token embeddings tied to the output head.

        Args:
            ids: [N] int64, dense, each below out_features.
            dtype: data type of the result, float32 or bfloat16.

        Returns:
            [N, num_inputs]

        Raises:
            ValueError: `ids` or `dtype` are not supported.
            IndexError: an id is out of range.
        """
        if isinstance(ids, Ids):
            return cast(Tensor, ids.recorder.lookup(ids, self, dtype))
        is_dense = ids.is_contiguous() and ids.is_cpu
        if ids.dtype != torch.int64 or ids.dim() != 1 or not is_dense:
            self._refuse("ids", ids)
        of_dtype = _kernels().of.get(dtype)
        if of_dtype is None:
            raise ValueError(f"activations must be float32 or bfloat16, got {dtype}")
        out = torch.empty(len(ids), self.in_features, dtype=dtype)
        bad = of_dtype.linear_rows(
            self._address, ids.data_ptr(), len(ids), out.data_ptr(), _num_threads()
        )
        if bad >= 0:
            raise IndexError(
                f"ids[{bad}] must be at least 0 and below {self.out_features}, got {ids[bad]}"
            )
        return out[:, : self.num_inputs]

    def _refuse(self, name: str, x: Tensor) -> NoReturn:
        weight = f"{self.weight_format.name} [{self.out_features}, {self.num_inputs}]"
        raise ValueError(
            f"{name} is {x.dtype} {list(x.shape)} on {x.device}, the weight is {weight}"
        )


def _kernels() -> CPUKernels:
    return require_cpu_kernels("packed weights need")


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _round_up(out_features: int) -> int:
    panel: int = _kernels().plain.kPanel
    return -(-out_features // panel) * panel


def _padded_panels(values: Tensor, num_out: int | None = None) -> Tensor:
    """Copy values to the memory of a weight, with zeros up to num_out outputs; None: as many as
    there are.
    """
    size = len(values) if num_out is None else num_out
    panels = allocate_weight([size, *values.shape[1:]], values.dtype)
    panels[: len(values)] = values
    panels[len(values) :] = 0
    return panels


def _pack_panels(panels: Tensor, num_out: int, num_words: int) -> None:
    """Rearrange [num_out, num_words] as [num_out / 64, num_words, 64] words, in place."""
    plain = _kernels().plain
    num_panels = num_out // plain.kPanel
    _check_memory(plain.pack_panels(panels.data_ptr(), num_panels, num_words, _num_threads()))


def _padded(values: Tensor, size: int) -> Tensor:
    """Pad [blocks, out_features] to float32 [blocks, size] with zeros."""
    out = torch.zeros(len(values), size)
    out[:, : values.shape[1]] = values
    return out


def _check_weight(weight: Tensor, weight_format: WeightFormat | None) -> None:
    described = f"{weight.dtype} {list(weight.shape)} on {weight.device}"
    if weight.dim() != 2 or not can_pack(weight, weight_format):
        wanted = "its own format" if weight_format is None else weight_format.name
        raise ValueError(f"a weight {described} cannot be packed as {wanted}")
    if not weight.is_contiguous():
        raise ValueError(
            f"the weight {described} must be dense, got strides {list(weight.stride())}"
        )
    if weight.data_ptr() % _ALIGNMENT:
        raise ValueError(f"the weight {described} must be aligned to {_ALIGNMENT} bytes")


def _check_memory(status: int) -> None:
    if status:
        raise MemoryError("not enough memory to pack a weight")
