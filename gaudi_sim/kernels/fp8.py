"""FP8 on the simulated card: casts and matmuls as operators of `torch.ops.hpu`.

On Gaudi 2, e4m3 values are at most 240: the bit patterns of larger ones, in files from other
devices, mean infinity or NaN. Scales multiply; matmuls are summed in fp32.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gaudi_sim.card.device import active_card

SCHEMAS = {
    "cast_to_fp8_v2": (
        "(Tensor input, Tensor? scale=None, bool stochastic_rounding=False, bool is_amax=False,"
        " ScalarType? dtype=None, int[]? scale_shape=None) -> (Tensor, Tensor)"
    ),
    "cast_to_fp8_v2.scalar": (
        "(Tensor input, float scale, bool stochastic_rounding=False, bool is_amax=False,"
        " ScalarType? dtype=None, int[]? scale_shape=None) -> (Tensor, Tensor)"
    ),
    "cast_from_fp8": (
        "(Tensor input, Tensor? scale, ScalarType out_dtype, int[]? scale_shape=None) -> Tensor"
    ),
    "cast_from_fp8.scalar": (
        "(Tensor input, float scale, ScalarType out_dtype, int[]? scale_shape=None) -> Tensor"
    ),
    "fp8_gemm_v2": (
        "(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype,"
        " Tensor? A_scale_inv=None, Tensor? B_scale_inv=None, Tensor? bias=None,"
        " bool accumulate=False, int[]? B_scale_shape=None) -> Tensor"
    ),
    "fp8_gemm_v2.scalar": (
        "(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype,"
        " float A_scale_inv, float B_scale_inv, Tensor? bias=None, bool accumulate=False,"
        " int[]? B_scale_shape=None) -> Tensor"
    ),
}

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def is_fp8(dtype: torch.dtype) -> bool:
    """Return whether the dtype is one of the two FP8 dtypes of the card."""
    return dtype in (_E4M3, _E5M2)


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp x to the range of `dtype` on the card, without converting it."""
    largest = active_card().spec.e4m3_max if dtype == _E4M3 else torch.finfo(_E5M2).max
    return x.clamp(-largest, largest)


def round_rows(x: Tensor) -> Tensor:
    """Round each row of x to e4m3 with its own scale, and return the rounded values."""
    scale = (x.abs().amax(-1, keepdim=True) + 1e-8) / active_card().spec.e4m3_max
    return decode(saturate(x / scale, _E4M3).to(_E4M3)) * scale


def decode(x: Tensor) -> Tensor:
    """Convert to fp32, reading the bits as the card does."""
    numbers = x.float()
    largest = active_card().spec.e4m3_max
    if x.dtype != _E4M3 or largest == torch.finfo(_E4M3).max:
        return numbers
    size = numbers.abs()
    numbers = numbers.masked_fill(size > largest, float("nan"))
    # 256 is the code S.1111.000, which is infinity.
    return numbers.where(size != 256, x.float().sign() * float("inf"))


def _cast_to_fp8_v2(
    input: Tensor,
    scale: Tensor | float | None = None,
    stochastic_rounding: bool = False,
    is_amax: bool = False,
    dtype: torch.dtype | None = None,
    scale_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    if stochastic_rounding:
        raise RuntimeError("cast_to_fp8_v2: the simulation does not support stochastic_rounding")
    if dtype is None or not is_fp8(dtype):
        raise RuntimeError(f"cast_to_fp8_v2: dtype must be {_E4M3} or {_E5M2}, got {dtype}")
    amax = input.abs().amax().float() if is_amax else torch.empty(0)
    scaled = input.float() if scale is None else input.float() * _shaped(scale, scale_shape)
    return saturate(scaled, dtype).to(dtype), amax


def _cast_from_fp8(
    input: Tensor,
    scale: Tensor | float | None,
    out_dtype: torch.dtype,
    scale_shape: list[int] | None = None,
) -> Tensor:
    numbers = decode(input)
    return (numbers if scale is None else numbers * _shaped(scale, scale_shape)).to(out_dtype)


def _fp8_gemm_v2(
    A: Tensor,
    trans_A: bool,
    B: Tensor,
    trans_B: bool,
    D: Tensor | None,
    out_dtype: torch.dtype,
    A_scale_inv: Tensor | float | None = None,
    B_scale_inv: Tensor | float | None = None,
    bias: Tensor | None = None,
    accumulate: bool = False,
    B_scale_shape: list[int] | None = None,
) -> Tensor:
    if accumulate and D is None:
        raise RuntimeError(
            "fp8_gemm_v2: accumulate=True needs the tensor D, to which the result is added"
        )
    left, right = decode(A), decode(B)
    product = (left.mT if trans_A else left) @ (right.mT if trans_B else right)
    if A_scale_inv is not None:
        product = product * A_scale_inv
    if B_scale_inv is not None:
        product = product * _shaped(B_scale_inv, B_scale_shape)
    if bias is not None:
        product = product + bias.float()
    if accumulate and D is not None:
        product = product + D.float()
    return product.to(out_dtype)


def _shaped(scale: Tensor | float, shape: list[int] | None) -> Tensor | float:
    return scale.view(shape) if isinstance(scale, Tensor) and shape else scale


def _shape_of_cast(
    input: Tensor,
    scale: object = None,
    stochastic_rounding: bool = False,
    is_amax: bool = False,
    dtype: torch.dtype | None = None,
    scale_shape: object = None,
) -> tuple[Tensor, Tensor]:
    amax = input.new_empty(() if is_amax else (0,), dtype=torch.float32)
    return input.new_empty(input.shape, dtype=dtype or _E4M3), amax


SHAPES: dict[str, Callable[..., object]] = {
    "cast_to_fp8_v2": _shape_of_cast,
    "cast_to_fp8_v2.scalar": _shape_of_cast,
}
"""Results without values, for what traces a graph: torch cannot trace how casts saturate."""

KERNELS: dict[str, Callable[..., object]] = {
    "cast_to_fp8_v2": _cast_to_fp8_v2,
    "cast_to_fp8_v2.scalar": _cast_to_fp8_v2,
    "cast_from_fp8": _cast_from_fp8,
    "cast_from_fp8.scalar": _cast_from_fp8,
    "fp8_gemm_v2": _fp8_gemm_v2,
    "fp8_gemm_v2.scalar": _fp8_gemm_v2,
}
