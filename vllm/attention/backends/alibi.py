"""Slopes of attention with linear biases (ALiBi; Press et al. 2021, arXiv 2108.12409)."""

import torch
from torch import Tensor


def alibi_slopes(num_heads: int) -> Tensor:
    """Return the slope of each head, which is subtracted from the score for each token of distance:
    [num_heads] float32, on the host even if models are built without memory.

    For n heads, n a power of two, they are 2^(-8/n), 2^(-16/n), ... 2^-8. Other counts take those
    of the next lower power of two, then every second one of the next higher, as the authors do.

    Args:
        num_heads: query heads of the model, over all ranks.

    >>> alibi_slopes(8)[:3].tolist()
    [0.5, 0.25, 0.125]
    >>> alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}")
    power = 1 << (num_heads.bit_length() - 1)
    exponents = [-8 * head / power for head in range(1, power + 1)]
    exponents += [-4 * head / power for head in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor(
        [2.0**exponent for exponent in exponents], dtype=torch.float32, device="cpu"
    )
