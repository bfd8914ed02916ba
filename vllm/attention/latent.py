"""Provide the attention layer over a latent cache: one vector per token, for keys and values of all
heads.

Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1), in the form in which
the projections of keys and values are absorbed into the projections of queries and outputs. All
query heads attend to one key/value head. Its key is the latent vector followed by the rotated part,
and its value is the latent vector.
"""

import torch

from vllm.attention.layer import Attention
from vllm.kv_cache_spec import CacheKind, CacheTensor, KVCacheSpec
from vllm.ops.attention_options import AttentionOptions


class LatentAttention(Attention):
    """Causal attention of flattened tokens over the latent vectors of their requests.

    H query heads, per rank; V latent size, R size of the rotated part. Every rank stores the whole
    cache.

    Args:
        num_heads: H.
        latent_size: V.
        rotary_size: R.
        scale: multiplies query @ key.

    Shape: query [T, H, V + R], key [T, 1, V + R] -> [T, H, V]
    """

    cache_names = ("key_cache",)

    value_cache: int
    """V: the first V numbers of a key are its value."""

    def __init__(self, num_heads: int, latent_size: int, rotary_size: int, scale: float) -> None:
        super().__init__(num_heads, latent_size + rotary_size, 1, AttentionOptions(scale))
        self.value_cache = latent_size

    def cache_spec(self, dtype: torch.dtype) -> KVCacheSpec:
        """Return a spec of one vector of V + R elements for each token."""
        shape, name = (1, self.head_size), str(dtype).removeprefix("torch.")
        tensor = CacheTensor(shape, name, dtype.itemsize)
        return KVCacheSpec(CacheKind.LATENT, (tensor,))
