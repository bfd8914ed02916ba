"""Define the interface between attention layers and the metadata of a batch.

Only the metadata knows which tokens belong to which request, whether they are padded, and how a
device computes attention.
"""

from typing import Protocol

from torch import Tensor

from vllm.attention.backends.cache_scales import CacheScales, PromptScales
from vllm.ops.attention_options import AttentionOptions


class AttentionLayer(Protocol):
    """The attributes of an attention layer that attention metadata reads."""

    key_cache: Tensor | None
    """[num_blocks, S, G, D], or [num_blocks * S, G, D] where the cache is flat."""
    value_cache: Tensor | int | None
    """Values in the same shape as key_cache. If it is an integer V, there is no such tensor, and
    the first V elements of a key are its value."""
    cache_group: int
    """Index of the group of layers whose block tables this one reads."""
    options: AttentionOptions
    """Scale, window and the like; fixed when the layer is made."""
    alibi_slopes: Tensor | None
    """[H] float32, subtracted from the score of each head per token of distance; None without
    ALiBi."""
    sinks: Tensor | None
    """[H] float32, the score of one more key of each head, whose value is zero; None without."""
    key_scales: Tensor
    """[G] float32 on the host: an fp8 key cache holds key / scale of the head."""
    value_scales: Tensor
    cache_scales: CacheScales | None
    """Scales of the cache on the device; None: the cache has the dtype of the queries, or none is
    bound."""
    prompt_scales: PromptScales | None
    """Scales on the device for prompts whose attention may run in fp8; None: it may not."""


class AttentionMetadata(Protocol):
    """Metadata for the attention of the tokens in one batch, on one kind of device."""

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        stores: bool = True,
    ) -> Tensor:
        """Store the new keys and values, and compute attention over all tokens of each request in
        the cache.

        Args:
            layer: layer whose caches are bound.
            query: [T, H, D].
            key: [T, G, D].
            value: [T, G, D]; None if values are a part of the keys.
            stores: False: the cache already has the new keys and values.

        Returns:
            [T, H, D], or [T, H, V] if values are the first V elements of the keys.
        """
        ...
