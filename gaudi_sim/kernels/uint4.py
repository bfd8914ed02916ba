"""4-bit values on the simulated card: `torch.ops.hpu.convert_from_uint4`."""

from collections.abc import Callable

import torch
from torch import Tensor

SCHEMAS = {
    "convert_from_uint4": (
        "(Tensor input, Tensor scale, Tensor? zero_point, ScalarType out_dtype) -> Tensor"
    ),
}


def _convert_from_uint4(
    input: Tensor, scale: Tensor, zero_point: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Dequantize 4-bit values: [R, W] int32, eight in a word from the lowest bits -> [R, 8 * W].

    The zero point is subtracted, and the result multiplied by the scale of its group of rows [G, 8
    * W].
    """
    if input.dtype != torch.int32:
        raise RuntimeError(f"convert_from_uint4: input must be torch.int32, got {input.dtype}")
    numbers = _nibbles(input)
    num_rows, num_columns = numbers.shape
    if scale.shape[1] != num_columns or num_rows % scale.shape[0]:
        raise RuntimeError(
            f"convert_from_uint4: scales {list(scale.shape)} do not fit the dequantized shape "
            f"{list(numbers.shape)}"
        )
    grouped = numbers.view(scale.shape[0], -1, num_columns)
    if zero_point is not None:
        grouped = grouped - _nibbles(zero_point)[:, None]
    return (grouped * scale.float()[:, None]).view(num_rows, num_columns).to(out_dtype)


def _nibbles(words: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & 15).flatten(-2).float()


KERNELS: dict[str, Callable[..., object]] = {"convert_from_uint4": _convert_from_uint4}
