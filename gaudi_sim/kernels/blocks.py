"""The block softmax of paged decodes on the simulated card: operators of `torch.ops.hpu`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SCHEMAS = {
    "block_softmax": (
        "(Tensor attn, Tensor block_bias, Tensor block_ind, *, float output_scale=1.0,"
        " ScalarType? output_dtype=None, bool fp8_exp=False) -> (Tensor, Tensor, Tensor)"
    ),
    "block_softmax_adjustment": (
        "(Tensor block_maxes, Tensor block_sums, Tensor block_groups, int batch_size,"
        " int[]? out_shape=None, *, Tensor? attn_fused_mult=None, float output_scale=1.0,"
        " ScalarType? output_dtype=None, bool is_staged=False) -> Tensor"
    ),
}

_MULTIPLES = {torch.float32: 64, torch.bfloat16: 128}
"""Number of copies of the highest scores and sums that `block_softmax` returns for a block."""


def _block_softmax(
    attn: Tensor,
    block_bias: Tensor,
    block_ind: Tensor,
    *,
    output_scale: float = 1.0,
    output_dtype: torch.dtype | None = None,
    fp8_exp: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    if attn.dim() != 5 or attn.dtype not in _MULTIPLES:
        raise RuntimeError(
            f"block_softmax: attn must have 5 dimensions and be one of "
            f"{', '.join(map(str, _MULTIPLES))}, got {attn.dtype} {list(attn.shape)}"
        )
    if output_scale != 1.0 or output_dtype is not None or fp8_exp:
        raise NotImplementedError(
            "block_softmax: the simulated kernel does not support output_scale, output_dtype and "
            "fp8_exp"
        )
    scores = (attn + block_bias).float()
    highest = scores.amax(-1, keepdim=True)
    is_padding = (block_ind < 0).view(-1, 1, 1, 1, 1)
    weights = (scores - highest).exp().masked_fill(is_padding, 0.0)
    sums = weights.sum(-1, keepdim=True)
    num_values = highest[0].numel()
    extra = -num_values % _MULTIPLES[attn.dtype]
    # For a block without a request, these values are undefined on a card: use NaN.
    known = (x.masked_fill(is_padding, float("nan")).flatten(1) for x in (highest, sums))
    flat = [torch.nn.functional.pad(x, (0, extra)) for x in known]
    return weights.to(attn.dtype), flat[0].to(attn.dtype), flat[1].to(attn.dtype)


def _block_softmax_adjustment(
    block_maxes: Tensor,
    block_sums: Tensor,
    block_groups: Tensor,
    batch_size: int,
    out_shape: Sequence[int] | None = None,
    *,
    attn_fused_mult: Tensor | None = None,
    output_scale: float = 1.0,
    output_dtype: torch.dtype | None = None,
    is_staged: bool = False,
) -> Tensor:
    if attn_fused_mult is not None or output_scale != 1.0 or output_dtype is not None or is_staged:
        raise NotImplementedError(
            "block_softmax_adjustment: the simulated kernel does not support attn_fused_mult, "
            "output_scale, output_dtype and is_staged"
        )
    if out_shape is None and block_maxes.dim() != 5:
        raise RuntimeError(
            "If no out_shape provided, block_maxes tensor must be 5-dimensional, got "
            f"{block_maxes.dim()}"
        )
    shape = list(block_maxes.shape if out_shape is None else out_shape)
    groups = block_groups.long()
    maxima, sums = (x.flatten(1).float() for x in (block_maxes, block_sums))
    empty = maxima.new_full((batch_size, maxima.shape[1]), float("-inf"))
    highest = empty.index_reduce(0, groups, maxima, "amax").index_select(0, groups)
    factors = (maxima - highest).exp()
    totals = torch.zeros_like(empty).index_add(0, groups, factors * sums).index_select(0, groups)
    num_values = 1
    for size in shape[1:]:
        num_values *= size
    return (factors / totals)[:, :num_values].reshape(shape).to(block_maxes.dtype)


KERNELS: dict[str, Callable[..., object]] = {
    "block_softmax": _block_softmax,
    "block_softmax_adjustment": _block_softmax_adjustment,
}
