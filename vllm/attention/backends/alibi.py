"""Compute the slopes of attention with linear biases (ALiBi; Press et al. 2021, arXiv
2108.12409).
"""

import torch
from torch import Tensor


def alibi_slopes(num_heads: int) -> Tensor:
    """Return the ALiBi slopes [num_heads] float32. A score is reduced by slope * distance in
    tokens.

    The tensor is always on the host, even while a model is built on the meta device. If the number
    n of heads is a power of two, the slopes are 2^(-8/n), 2^(-16/n), ... 2^-8. For other counts
    they are the slopes for the next lower power of two, then every second slope for the next higher
    power of two, as in the paper's code.

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
