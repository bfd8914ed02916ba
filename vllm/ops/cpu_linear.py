"""Weights of linear layers in the layout of the C++ kernels, and the products with them.

A packed weight is the only copy: both one row and a thousand are multiplied by the kernels of
csrc/cpu/linear.h, which on the processors measured so far are at least as fast as torch for any
number of rows. Knows no layers and no models.
"""

import ctypes
import functools
from ctypes import CDLL, Structure, c_int, c_int64, c_void_p
from enum import IntEnum
from typing import Any, NoReturn

import torch
from torch import Tensor

from vllm.ops.cpu_library import load_cpu_kernels

_PANEL = 64  # output features of a panel, csrc/cpu/linear_format.h
_ALIGNMENT = 64
_MAX_INT8_INPUTS = 66_000  # 255 * 127 * inputs stays below 2^31
_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}

_num_threads = torch.get_num_threads


class WeightFormat(IntEnum):
    """How a weight is stored; the values are those of csrc/cpu/linear_format.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    """One scale per output feature; inputs are rounded to int8 too, with one scale per row."""
    INT4 = 3
    """One bfloat16 scale per 32 inputs of an output feature; inputs stay as they are."""

    @property
    def inputs_per_word(self) -> int:
        """in_features must be a multiple of this."""
        return (1, 2, 4, 8)[self]


_DENSE_FORMATS = {torch.float32: WeightFormat.FLOAT32, torch.bfloat16: WeightFormat.BFLOAT16}


class _WeightStruct(Structure):
    """LinearWeight of csrc/cpu/linear_format.h."""

    _fields_ = (
        ("panels", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("format", c_int64),
    )


class _Functions:
    """The C functions, by the dtype of what is not the weight. `Any`: ctypes has no useful type."""

    def __init__(self, library: CDLL) -> None:
        def find(name: str, argtypes: list[Any]) -> Any:
            function = getattr(library, f"vllm_{name}")
            function.argtypes, function.restype = argtypes, c_int64
            return function

        def find_typed(name: str, argtypes: list[Any]) -> dict[torch.dtype, Any]:
            return {d: find(f"{name}_{suffix}", argtypes) for d, suffix in _SUFFIXES.items()}

        self.linear = find_typed("linear", [c_void_p] * 4 + [c_int64] * 2 + [c_int])
        self.quantize = find_typed("quantize_weight", [c_void_p] * 2 + [c_int])
        self.rows = find_typed("linear_rows", [c_void_p] * 2 + [c_int64, c_void_p, c_int])
        self.pack = find("pack_panels", [c_void_p] + [c_int64] * 2 + [c_int])
        self.packed_bytes = find("packed_bytes", [c_int64] * 3)


@functools.cache
def _functions() -> _Functions:
    library = load_cpu_kernels()
    if library is None:
        raise RuntimeError("packed weights need the C++ CPU kernels, which are not built")
    return _Functions(library)


def can_pack(weight: Tensor, weight_format: WeightFormat | None = None) -> bool:
    """Whether a dense weight [out_features, in_features] can be stored in a format.

    Args:
        weight: of any device and dtype.
        weight_format: None is the weight's own dtype.
    """
    own = _DENSE_FORMATS.get(weight.dtype)
    if load_cpu_kernels() is None or own is None or weight.device.type != "cpu":
        return False
    wanted = own if weight_format is None else weight_format
    in_features = weight.shape[1]
    fits = wanted is not WeightFormat.INT8 or in_features <= _MAX_INT8_INPUTS
    return fits and in_features > 0 and in_features % wanted.inputs_per_word == 0


class PackedWeight:
    """The weight of a linear layer [out_features, in_features] as the kernels read it.

    Made by `pack` or `quantize`. A row's result does not depend on the rows beside it, nor on
    the number of threads.
    """

    def __init__(self, weight_format: WeightFormat, shape: torch.Size, panels: Tensor) -> None:
        self.out_features, self.in_features = shape
        self.weight_format = weight_format
        self._panels = panels
        self._scales: Tensor | None = None
        self._sums: Tensor | None = None
        if weight_format is WeightFormat.INT8:
            padded = _round_up(self.out_features)
            self._scales = torch.zeros(padded)
            self._sums = torch.zeros(padded, dtype=torch.int32)
        self._struct = _WeightStruct(
            panels.data_ptr(),
            self._scales.data_ptr() if self._scales is not None else None,
            self._sums.data_ptr() if self._sums is not None else None,
            self.in_features,
            self.out_features,
            int(weight_format),
        )
        self._address = ctypes.addressof(self._struct)
        self._linear = dict(_functions().linear)
        if weight_format is WeightFormat.FLOAT32:
            del self._linear[torch.bfloat16]

    @classmethod
    def pack(cls, weight: Tensor) -> "PackedWeight":
        """Rearrange a dense float32 or bfloat16 weight, in its own memory.

        `weight` must not be used afterwards. When out_features is no multiple of 64, the result
        is in new memory, padded to one.

        Raises:
            ValueError: its dtype, shape, strides or alignment do not allow it.
            MemoryError: there is no scratch memory; the weight is as it was.
        """
        _check_weight(weight, None)
        num_out, num_in = weight.shape
        padded = _round_up(num_out)
        if padded == num_out:
            panels = weight.flatten()
        else:
            panels = weight.new_zeros(padded * num_in)
            panels[: num_out * num_in] = weight.flatten()
        weight_format = _DENSE_FORMATS[weight.dtype]
        num_words = num_in // weight_format.inputs_per_word
        functions = _functions()
        _check_memory(
            functions.pack(panels.data_ptr(), padded // _PANEL, num_words, _num_threads())
        )
        return cls(weight_format, weight.shape, panels)

    @classmethod
    def quantize(cls, weight: Tensor, weight_format: WeightFormat) -> "PackedWeight":
        """Round a dense float32 or bfloat16 weight to int8 or int4, in new memory.

        Raises:
            ValueError: its dtype, shape, strides or alignment do not allow it, or the format is
                a dense one.
            MemoryError: there is no scratch memory.
        """
        if weight_format not in (WeightFormat.INT8, WeightFormat.INT4):
            raise ValueError(f"{weight_format.name} is not a quantized format: use pack")
        _check_weight(weight, weight_format)
        num_out, num_in = weight.shape
        functions = _functions()
        num_bytes = functions.packed_bytes(int(weight_format), num_in, num_out)
        # What no row fills is read too: zero is a scale and a weight that change nothing.
        make = torch.zeros if num_out % _PANEL else torch.empty
        packed = cls(weight_format, weight.shape, make(num_bytes, dtype=torch.uint8))
        _check_memory(
            functions.quantize[weight.dtype](packed._address, weight.data_ptr(), _num_threads())
        )
        return packed

    @property
    def num_bytes(self) -> int:
        """Memory of the weight with its scales."""
        tensors = (self._panels, self._scales, self._sums)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in_features] @ weight.T + bias -> [..., out_features] of x's dtype.

        Args:
            x: float32 or bfloat16 (with a float32 weight: float32), dense; a matrix may have
                rows that are further apart.
            bias: [out_features] of x's dtype, or None.

        Raises:
            ValueError: dtypes, shapes or strides do not fit.
            MemoryError: there is no scratch memory.
        """
        function = self._linear.get(x.dtype)
        shape = x.shape
        if function is None or shape[-1] != self.in_features or not x.is_cpu:
            self._refuse("x", x)
        if x.is_contiguous():
            stride = self.in_features
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
        rows = shape[0] if len(shape) == 2 else x.numel() // self.in_features
        if function(
            self._address,
            x.data_ptr(),
            bias_pointer,
            out.data_ptr(),
            rows,
            stride,
            _num_threads(),
        ):
            raise MemoryError(f"no scratch memory for {rows} rows of a linear layer")
        return out

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight, such as token embeddings that share the weight of the output head.

        Args:
            ids: [N] int64, dense, each below out_features.
            dtype: of the result, float32 or bfloat16.

        Returns:
            [N, in_features]

        Raises:
            ValueError: `ids` is not as said, or the weight is int4.
            IndexError: an id is out of range.
        """
        is_dense = ids.is_contiguous() and ids.is_cpu
        if ids.dtype != torch.int64 or ids.dim() != 1 or not is_dense:
            self._refuse("ids", ids)
        if self.weight_format is WeightFormat.INT4:
            raise ValueError("rows of an int4 weight cannot be read")
        out = torch.empty(len(ids), self.in_features, dtype=dtype)
        bad = _functions().rows[dtype](
            self._address, ids.data_ptr(), len(ids), out.data_ptr(), _num_threads()
        )
        if bad >= 0:
            raise IndexError(f"ids[{bad}] is {ids[bad]} of {self.out_features} rows")
        return out

    def _refuse(self, name: str, x: Tensor) -> NoReturn:
        weight = f"{self.weight_format.name} [{self.out_features}, {self.in_features}]"
        raise ValueError(
            f"{name} is {x.dtype} {list(x.shape)} on {x.device}, the weight is {weight}"
        )


def _round_up(out_features: int) -> int:
    return -(-out_features // _PANEL) * _PANEL


def _check_weight(weight: Tensor, weight_format: WeightFormat | None) -> None:
    described = f"{weight.dtype} {list(weight.shape)} on {weight.device}"
    if weight.dim() != 2 or not can_pack(weight, weight_format):
        wanted = "its own format" if weight_format is None else weight_format.name
        raise ValueError(f"a weight {described} cannot be packed as {wanted}")
    if not weight.is_contiguous():
        raise ValueError(f"the weight {described} is not dense: strides {list(weight.stride())}")
    if weight.data_ptr() % _ALIGNMENT:
        raise ValueError(f"the weight {described} is not aligned to {_ALIGNMENT} bytes")


def _check_memory(status: int) -> None:
    if status:
        raise MemoryError("no scratch memory to pack a weight")
