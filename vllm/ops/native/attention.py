"""The KV cache and paged attention in torch."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.attention_interface import FP8_DTYPES
from vllm.ops.attention_options import NO_TENSORS, AttentionOptions, AttentionTensors
from vllm.ops.interface import Ops


class NativeAttention(Ops):
    """The KV cache and attention operators of `Ops` in torch."""

    def reshape_and_cache(
        self,
        key: Tensor,
        value: Tensor | None,
        key_cache: Tensor,
        value_cache: Tensor | None,
        slot_mapping: Tensor,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> None:
        pairs = [(key, key_cache, key_scales)]
        if value is not None and value_cache is not None:
            pairs.append((value, value_cache, value_scales))
        for new, cache, _ in pairs:
            if new.shape[1:] != cache.shape[2:] or new.shape[0] != slot_mapping.shape[0]:
                raise ValueError(
                    f"the cache {list(cache.shape)} must have the heads of the new tokens "
                    f"{list(new.shape)}, and slot_mapping one entry for each, got "
                    f"{list(slot_mapping.shape)}"
                )
        if slot_mapping.shape[0] == 0:
            return
        # A boolean mask would read its size back to the host. Instead, padding tokens repeat
        # the first real token (the same row to the same slot), or, when no token is real,
        # write back what slot 0 holds.
        is_real = slot_mapping >= 0
        first_real = is_real.int().argmax(dim=0, keepdim=True)
        source = torch.where(is_real, torch.arange(len(key), device=key.device), first_real)
        slots = slot_mapping[source].clamp(min=0)
        for pair in pairs:
            new, cache = _as_stored(*pair)
            flat = cache.flatten(0, 1)
            flat[slots] = torch.where(is_real.any(), new[source], flat[slots])

    def paged_attention_decode(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        options: AttentionOptions,
        tensors: AttentionTensors = NO_TENSORS,
    ) -> Tensor:
        check_attention(query, key_cache, value_cache, tensors)
        num_kv_heads = key_cache.shape[2]
        grouped = query.float().unflatten(1, (num_kv_heads, -1))  # [B, G, H / G, D]
        # [B, max_blocks, S, G, D] -> [B, K, G, D], K = keys a table can hold
        slopes, sinks, key_scales, value_scales = tensors
        keys = _as_read(_read_blocks(key_cache, block_tables), key_scales).flatten(1, 2).float()
        values = _as_read(_read_blocks(value_cache, block_tables), value_scales)
        values = values.flatten(1, 2).float()
        newest = seq_lens[:, None] - 1
        age = newest - torch.arange(keys.shape[1], device=query.device)  # [B, K]
        is_hidden = age < 0
        seen = options.sees(age, newest)
        if seen is not None:
            is_hidden |= ~seen
        # A block may hold NaN past the end, and 0 * NaN is NaN: clear it.
        values = values.masked_fill(is_hidden[:, :, None, None], 0.0)
        scores = torch.einsum("bgrd,bkgd->bgrk", grouped, keys)
        scores = options.adjusted(scores * options.scale_of(query.shape[2]))
        if slopes is not None:
            scores -= slopes.view(1, num_kv_heads, -1, 1) * age[:, None, None]
        scores = scores.masked_fill(is_hidden[:, None, None], float("-inf"))
        if sinks is not None:
            sinks = sinks.view(1, num_kv_heads, -1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1).masked_fill((seq_lens == 0)[:, None, None, None], 0.0)
        weights = weights[..., : keys.shape[1]]
        return torch.einsum("bgrk,bkgd->bgrd", weights, values).flatten(1, 2).to(query.dtype)

    def paged_attention_prefill(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_start_loc: Sequence[int] | np.ndarray,
        seq_lens: Sequence[int] | np.ndarray,
        options: AttentionOptions,
        tensors: AttentionTensors = NO_TENSORS,
        last_keys: np.ndarray | None = None,
    ) -> Tensor:
        check_attention(query, key_cache, value_cache, tensors)
        # For an FP8 cache compute in float32, because bfloat16 would round value times scale.
        dtype = torch.float32 if key_cache.dtype in FP8_DTYPES else query.dtype
        block_size = key_cache.shape[1]
        shape = (*query.shape[:2], value_cache.shape[3])
        out = torch.zeros(shape, dtype=query.dtype, device=query.device)
        for b, seq_len in enumerate(map(int, seq_lens)):
            start, end = int(query_start_loc[b]), int(query_start_loc[b + 1])
            num_blocks = -(-seq_len // block_size)
            if end - start > seq_len or num_blocks > block_tables.shape[1]:
                raise ValueError(
                    f"request {b}: its new tokens must not be more than its tokens ({seq_len}), "
                    f"and its block table must have blocks for all of them; got {end - start} new "
                    f"tokens and {block_tables.shape[1]} blocks of {block_size} tokens"
                )
            if end == start:
                continue
            block_ids = block_tables[b, :num_blocks]
            # [1, heads, tokens, D], as scaled_dot_product_attention wants them
            q = query[start:end].transpose(0, 1)[None].to(dtype)
            k, v = (
                _as_read(_read_blocks(cache, block_ids).flatten(0, 1)[:seq_len], scales)
                .transpose(0, 1)[None]
                .to(dtype)
                for cache, scales in (
                    (key_cache, tensors.key_scales),
                    (value_cache, tensors.value_scales),
                )
            )
            ends: Tensor | None = None
            if last_keys is not None:
                checked = check_last_keys(b, last_keys[start:end], seq_len)
                ends = torch.from_numpy(checked).to(query.device)
            attended = attend_prompt(q, k, v, options, tensors, ends)
            out[start:end] = attended[0].transpose(0, 1)
        return out

    def full_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def check_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, tensors: AttentionTensors
) -> None:
    """Check arguments of attention that decodes and prefills have in common.

    Raises:
        ValueError: heads, head sizes or dtypes do not fit, or slopes or sinks do not fit the heads.
    """
    *places, head_size = key_cache.shape
    *value_places, value_size = value_cache.shape
    if places != value_places or not value_size <= head_size == query.shape[2]:
        raise ValueError(
            f"query {list(query.shape)}, key_cache {list(key_cache.shape)} and value_cache "
            f"{list(value_cache.shape)} do not fit together"
        )
    if query.shape[1] % key_cache.shape[2]:
        raise ValueError(
            f"the number of query heads ({query.shape[1]}) must be a multiple of the number of KV "
            f"heads ({key_cache.shape[2]})"
        )
    is_known = key_cache.dtype == query.dtype or key_cache.dtype in FP8_DTYPES
    if not is_known or key_cache.dtype != value_cache.dtype:
        raise ValueError(
            f"query ({query.dtype}) and the caches ({key_cache.dtype} and {value_cache.dtype}) "
            "must have the same dtype"
        )
    for name, numbers in (("alibi_slopes", tensors.alibi_slopes), ("sinks", tensors.sinks)):
        if numbers is not None and (
            numbers.shape != query.shape[1:2]
            or numbers.dtype != torch.float32
            or not numbers.is_contiguous()
        ):
            raise ValueError(
                f"{name} must be dense torch.float32 with one value for each of {query.shape[1]} "
                f"heads, got {numbers.dtype} {list(numbers.shape)} with strides "
                f"{list(numbers.stride())}"
            )


def to_fp8(x: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Compute x / scale in one of FP8_DTYPES, rounded to nearest and limited; NaN is kept."""
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def _as_stored(new: Tensor, cache: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return new tokens [T, G, D] and the cache with one dtype in which torch can index.

    FP8 values are viewed as bytes.
    """
    if cache.dtype not in FP8_DTYPES:
        return new, cache
    scale = 1.0 if scales is None else scales.to(new.device)[:, None]
    return to_fp8(new, scale, cache.dtype).view(torch.uint8), cache.view(torch.uint8)


def _as_read(stored: Tensor, scales: Tensor | None) -> Tensor:
    """Return values of a cache [..., G, D] for attention; an FP8 cache is multiplied by
    its scales.
    """
    if stored.dtype not in FP8_DTYPES:
        return stored
    return stored.float() if scales is None else stored.float() * scales.to(stored.device)[:, None]


def _read_blocks(cache: Tensor, block_ids: Tensor) -> Tensor:
    """Return `cache[block_ids]`, also for FP8, for which torch cannot index."""
    if cache.dtype not in FP8_DTYPES:
        return cache[block_ids]
    return cache.view(torch.uint8)[block_ids].view(cache.dtype)


def check_last_keys(b: int, last_keys: np.ndarray, seq_len: int) -> np.ndarray:
    """Return the last keys [Q] of the queries of request b, after checking them.

    Raises:
        ValueError: one is before the own key of its query, or not in the request.
    """
    own = np.arange(seq_len - len(last_keys), seq_len)
    if (last_keys < own).any() or (last_keys >= seq_len).any():
        raise ValueError(
            f"last keys of the tokens {own[0]} to {own[-1]} of request {b} must be from the token "
            f"itself to the last of its {seq_len} tokens, got {last_keys.tolist()}"
        )
    return last_keys


def _prefill_mask(
    query_len: int,
    seq_len: int,
    options: AttentionOptions,
    device: torch.device,
    last_keys: Tensor | None,
) -> tuple[Tensor | None, bool]:
    """Return (attn_mask, is_causal) of one request; the mask is bool [query_len, seq_len]."""
    hides_keys = options.reach is not None and options.reach < seq_len
    if query_len == seq_len and not hides_keys and last_keys is None:
        return None, True
    if query_len == 1 and not hides_keys:
        return None, False
    # Bottom right: the last query sees the last key.
    query_pos = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    key_pos = torch.arange(seq_len, device=device)
    age = query_pos - key_pos
    mask = age >= 0 if last_keys is None else key_pos <= last_keys[:, None]
    seen = options.sees(age, query_pos)
    if seen is not None:
        mask &= seen
    return mask, False


def attend_prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    tensors: AttentionTensors,
    last_keys: Tensor | None = None,
) -> Tensor:
    """Compute the attention of the last Q tokens of one request: [1, H, Q, V].

    Shapes: q [1, H, Q, D], k [1, G, K, D], v [1, G, K, V]; last_keys [Q], see
    `Ops.paged_attention_prefill`.
    """
    query_len, seq_len, scale = q.shape[2], k.shape[2], options.scale_of(q.shape[3])
    slopes, sinks = tensors.alibi_slopes, tensors.sinks
    mask, is_causal = _prefill_mask(query_len, seq_len, options, q.device, last_keys)
    if slopes is None and sinks is None and not options.adjusts_scores:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    position = torch.arange(seq_len, device=q.device)
    distance = position[seq_len - query_len :, None] - position
    scores = options.adjusted((q.float() @ k.transpose(2, 3) * scale)[0])
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance
    is_hidden = distance < 0 if mask is None else ~mask
    scores = scores.masked_fill(is_hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(*scores.shape[:2], 1)), dim=-1)
    return (scores.softmax(-1)[..., :seq_len] @ v).to(q.dtype)
