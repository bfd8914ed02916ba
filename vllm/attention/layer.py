"""The attention layer of a model: heads and KV cache; how to compute is the backend's."""

from torch import Tensor, nn

from vllm.attention.backends.native_attn import prompt_attention
from vllm.attention.metadata import current_metadata


class Attention(nn.Module):
    """Causal attention of flattened tokens over what their requests have in the KV cache.

    H query heads, G key/value heads (H a multiple of G), D head size; all per rank.

    Args:
        num_heads: H.
        head_size: D.
        num_kv_heads: G.
        scale: multiplies query @ key. None: 1 / sqrt(D).
        sliding_window: most recent keys a query sees, itself included; None for all.

    Shape: query [T, H, D], key and value [T, G, D] -> [T, H, D]
    """

    key_cache: Tensor | None
    """[num_blocks, S, G, D], bound by the runner; None until then."""
    value_cache: Tensor | None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        num_kv_heads: int,
        scale: float | None = None,
        sliding_window: int | None = None,
    ) -> None:
        super().__init__()
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads is not a multiple of {num_kv_heads}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.num_kv_heads = num_kv_heads
        self.scale = head_size**-0.5 if scale is None else scale
        self.sliding_window = sliding_window
        self.key_cache = None
        self.value_cache = None

    def bind_kv_cache(self, key_cache: Tensor, value_cache: Tensor) -> None:
        """Use these caches, [num_blocks, S, G, D] each, from now on."""
        self.key_cache, self.value_cache = key_cache, value_cache

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        metadata = current_metadata()
        if metadata is None or self.key_cache is None:
            # No cache: all tokens are one prompt, and nothing is kept.
            return prompt_attention(query, key, value, self.scale, self.sliding_window)
        return metadata.attend(self, query, key, value)
