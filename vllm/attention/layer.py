"""Provide the attention layer of a model, with its heads and KV cache. The backend computes the
attention.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm.attention.backends.cache_scales import CacheScale, CacheScales, PromptScales
from vllm.attention.backends.native_attn import prompt_attention
from vllm.attention.cached_layer import CachedLayer
from vllm.attention.context import ContextHolder, ReadsContext
from vllm.kv_cache_spec import CacheKind, CacheTensor, KVCacheSpec
from vllm.ops.attention_options import FP8_DTYPES, PLAIN_ATTENTION, AttentionOptions


class Attention(CachedLayer, ReadsContext):
    """Causal attention of flattened tokens over the tokens of their requests in the KV cache.

    H query heads, G key/value heads (H a multiple of G), D head size; all per rank.

    Args:
        num_heads: H.
        head_size: D.
        num_kv_heads: G.
        options: scale, window and similar settings.
        alibi_slopes: [H] float32, ALiBi slopes: subtracted from the score of each head per token of
            distance; None without ALiBi.
        sinks: [H] float32, score of one additional key per head, whose value is zero; None without.
            A parameter of the checkpoint that the caller also holds.

    Shape: query [T, H, D], key and value [T, G, D] -> [T, H, D]
    """

    cache_names: ClassVar[tuple[str, ...]] = ("key_cache", "value_cache")
    scale_names: ClassVar[tuple[str, ...]] = (
        *("key_scales", "value_scales", "cache_scales"),
        "prompt_scales",
    )

    key_cache: Tensor | None
    """[num_blocks, S, G, D], or [num_blocks * S, G, D] where the cache is flat; bound by the
    runner, None until then."""
    value_cache: Tensor | int | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    key_scales: Tensor
    """[G] float32 on the host: an fp8 key cache holds key / scale of the head. 1 unless a
    checkpoint or measurements say otherwise; see `set_cache_scales`."""
    value_scales: Tensor
    measured_scales: tuple[float, float] | None = None
    """Scales of queries and of the weights of the softmax in fp8; None: not measured."""
    has_calculated_scales: bool = False
    """Whether the scales were measured when the engine started, and stay when other weights are
    read."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        num_kv_heads: int,
        options: AttentionOptions = PLAIN_ATTENTION,
        *,
        alibi_slopes: Tensor | None = None,
        sinks: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.launch = ContextHolder()
        if num_heads % num_kv_heads:
            raise ValueError(
                f"the number of query heads ({num_heads}) must be a multiple of the number of KV "
                f"heads ({num_kv_heads})"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.num_kv_heads = num_kv_heads
        self.options = options
        # Computed and not read from the checkpoint; float32 with any dtype of the model.
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.register_parameter("sinks", sinks)
        # Plain attributes on the CPU, on whatever device the model is.
        self.key_scales, self.value_scales = torch.ones(
            2, num_kv_heads, dtype=torch.float32, device="cpu"
        ).unbind()
        self.cache_scales: CacheScales | None = None
        self.prompt_scales: PromptScales | None = None
        self.key_cache = None
        self.value_cache = None

    def cache_spec(self, dtype: torch.dtype) -> KVCacheSpec:
        """Return a spec of keys and values of all tokens, or of the tokens in the window."""
        shape, name = (self.num_kv_heads, self.head_size), str(dtype).removeprefix("torch.")
        window = self.options.sliding_window
        kind = CacheKind.FULL if window is None else CacheKind.SLIDING_WINDOW
        tensor = CacheTensor(shape, name, dtype.itemsize)
        return KVCacheSpec(kind, (tensor, tensor), window)

    def bind_kv_cache(self, *tensors: Tensor) -> None:
        """Bind the KV cache, and create the scales for prompts."""
        super().bind_kv_cache(*tensors)
        self.cache_scales = self.prompt_scales = None
        if tensors[0].dtype in FP8_DTYPES:
            scales = (self.key_scales, self.value_scales)
            cached = CacheScales(*(CacheScale.on(tensors[0].device, s) for s in scales))
            self.cache_scales = cached
            is_one = cached.key.by_head is cached.value.by_head is None
            if self.measured_scales and is_one and tensors[0].dtype == torch.float8_e4m3fn:
                query, weights = (
                    CacheScale.on(tensors[0].device, torch.tensor([s], device="cpu"))
                    for s in self.measured_scales
                )
                self.prompt_scales = PromptScales(query, cached, weights)

    def set_cache_scales(
        self, key: float | Tensor | None = None, value: float | Tensor | None = None
    ) -> None:
        """Set the scales of an FP8 cache in place, because recorded programs read them at their
        addresses.

        Args:
            key: scales of keys, above 0: [G] float32, or one value for all heads; None: unchanged.
            value: scales of values, in the same form.
        """
        if key is not None:
            self.key_scales.copy_(torch.as_tensor(key))
        if value is not None:
            self.value_scales.copy_(torch.as_tensor(value))
        if self.cache_scales is not None:
            self.cache_scales.key.put(self.key_scales)
            self.cache_scales.value.put(self.value_scales)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor | None = None, *, stores: bool = True
    ) -> Tensor:
        """Compute attention.

        Args:
            query: [T, H, D]. May also come from a later layer that has no keys and values of its
                own.
            key: [T, G, D]
            value: [T, G, D]; None if values are a part of the keys.
            stores: False: the cache already has these keys and values, because this layer was
                called before in the same forward pass.
        """
        context = self.launch.context
        if context is None or context.attention is None or self.key_cache is None:
            # Without a cache, all tokens are one prompt and nothing is stored.
            return prompt_attention(self, query, key, value)
        return context.attention.attend(self, query, key, value, stores)
