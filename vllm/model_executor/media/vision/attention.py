"""Attention within images, the same for all towers. Independent of weights and KV caches."""

from torch import Tensor

from vllm.ops import get_ops


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute bidirectional attention: each query attends to the keys of its image.

    B images or tiles, H heads, N queries and K keys of size D.

    Args:
        query: [B, H, N, D].
        key: [B, H, K, D].
        value: [B, H, K, D].
        mask: bool, broadcasts to [B, H, N, K]: which keys a query sees. Every query sees at least
            one. None: all keys.
        scale: multiplies query @ key; None: 1 / sqrt(D).

    Returns:
        [B, H, N, D], dtype of query.
    """
    return get_ops().full_attention(query, key, value, mask, scale)
