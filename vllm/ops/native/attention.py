"""Compute rotary embedding, the KV cache and paged attention in torch.

Letters used in shapes: T tokens of one forward pass, B requests, H query heads, G key/value heads
(H is a multiple of G), D head size, N blocks of the cache, S block size. Float tensors of one call
have one dtype unless a line says otherwise. Tokens may be strided (a slice of a packed QKV tensor):
only the dimensions after the first have to be dense.

A position, slot, length or block id out of range raises IndexError if the host can see it (on the
CPU); on a device its effect is undefined.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.attention_options import FP8_DTYPES, NO_TENSORS, AttentionOptions, AttentionTensors


class NativeAttention:
    """The attention operators of `NativeOps`: rotary embedding, KV cache, and attention to it."""

    def rotary_embedding(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None,
        cos_sin_cache: Tensor,
        is_neox: bool,
        sections: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Rotate the first rot_dim elements of every head by its token's position.

        May write over query and key (they are usually slices of a packed QKV tensor that is not
        read again); the caller uses only what is returned.

        Args:
            positions: [T], int64, each below the number of angles N. With sections [P, T]; P of 1
                means that all positions of a token are the same.
            query: [T, H, D].
            key: [T, G, D]; None: rotate only queries.
            cos_sin_cache: [N, rot_dim], float32: rot_dim / 2 cosines, then as many sines. They
                are rounded to the dtype of query before use, as Hugging Face models do.
            is_neox: True pairs element i with i + rot_dim / 2 (Llama, NeoX); False pairs
                2 i with 2 i + 1 (GPT-J).
            sections: [rot_dim / 2] int32, which of its positions rotates each pair of a token;
                None: tokens have one position.

        Returns:
            (query, key) with the same shapes and dtypes. Elements from rot_dim on are not changed.

        Raises:
            ValueError: rot_dim is odd or above D, or the numbers of tokens differ.
        """
        check_rotary(positions, query, key, cos_sin_cache)
        angles = self.rotary_angles(positions, cos_sin_cache, query.dtype, is_neox, sections)
        return self.rotate(query, key, angles, is_neox)

    def rotary_angles(
        self,
        positions: Tensor,
        cos_sin_cache: Tensor,
        dtype: torch.dtype,
        is_neox: bool,
        sections: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        # [T, 1, rot_dim / 2] each: one row of angles per token, the same for every head
        """Look up the rotation angles of tokens, for `rotate`; layers with the same table share
        them.

        Args:
            positions: positions; see `rotary_embedding`.
            cos_sin_cache: table of cosines and sines; see `rotary_embedding`.
            dtype: data type of the queries.
            is_neox: layout of the rotated elements; see `rotary_embedding`.
            sections: sections; see `rotary_embedding`.
        """
        angles = angles_at(positions, cos_sin_cache, sections)
        cos, sin = angles.to(dtype)[:, None].chunk(2, dim=-1)
        return cos, sin

    def rotate(
        self, query: Tensor, key: Tensor | None, angles: tuple[Tensor, Tensor], is_neox: bool
    ) -> tuple[Tensor, Any]:
        """Rotate like `rotary_embedding`, with angles from `rotary_angles`."""
        cos, sin = angles
        rotated = None if key is None else _rotate(key, cos, sin, is_neox)
        return _rotate(query, cos, sin, is_neox), rotated

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
        """Store the keys and values of new tokens in the cache, in place.

        Args:
            key: [T, G, D].
            value: [T, G, D]; None, like value_cache, if values are a part of the keys.
            key_cache: [N, S, G, D], dense. Written. Of the dtype of key, or of a dtype in
                FP8_DTYPES: then it holds key / key_scales, rounded to nearest; values that are too
                large become the largest value, and NaN is kept.
            value_cache: [N, S, G, D], dense, of the dtype of key_cache. Written.
            slot_mapping: [T], int64: block id * S + offset. A negative slot is not written
                (padding). No slot may occur twice.
            key_scales: [G] float32 on the host, dense, one above 0 for each head; None: 1. Has no
                effect on a cache of the dtype of key.
            value_scales: [G], the scales of value_cache.

        Raises:
            ValueError: the shapes or dtypes do not fit each other.
        """
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
        """Compute the attention of one new token per request to all tokens of its request.

        The key and value of the new token are already in the cache; its position is seq_len - 1,
        and it attends to itself. The host never reads a value of a device tensor, so a graph can
        capture this.

        Args:
            query: [B, H, D].
            key_cache: [N, S, G, D], dense, of the dtype of query or of one in FP8_DTYPES.
            value_cache: [N, S, G, V] of the dtype and strides of key_cache, V at most D: a separate
                tensor with V = D, or the first V elements of each key (latent attention).
            block_tables: [B, max_blocks], int32. Entries after the last block of a request are
                never used as content but must be valid block ids (NULL_BLOCK_ID).
            seq_lens: [B], int32, the new token included. 0 marks padding.
            options: options of the layer.
            tensors: tensors of the layer.

        Returns:
            [B, H, V], new and dense, zero for padding. The unused part of a block has no effect,
            even if it contains NaN.

        Raises:
            ValueError: H is not a multiple of G, or shapes or dtypes are wrong.
        """
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
        """Compute the causal attention of several new tokens per request, without padding.

        Request b has the entries query_start_loc[b] to query_start_loc[b + 1] of query. They are
        the LAST tokens of its seq_lens[b] tokens; the ones before them (an earlier chunk, a prefix
        hit) are only in the cache. Keys and values of the new tokens are already in the cache as
        well.

        Args:
            query: [T, H, D].
            key_cache: [N, S, G, D], see `paged_attention_decode`.
            value_cache: [N, S, G, V], see `paged_attention_decode`.
            block_tables: [B, max_blocks], int32.
            query_start_loc: [B + 1], on the host: 0, then the running sum of query lengths.
            seq_lens: [B], on the host: tokens of the context plus new tokens.
            options: options of the layer.
            tensors: tensors of the layer.
            last_keys: [T] int32, on the host: the last key that each query attends to, as an index
                in its request: its own or a later one. A sliding window is counted back from its
                own key in any case. None: its own.

        Returns:
            [T, H, V], new and dense. Entries from query_start_loc[B] on (padding) are zero.

        Raises:
            ValueError: H is not a multiple of G, a request has more new tokens than tokens, a
                table is too short, or a last key is before the own one or not in its request.
        """
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
        """Compute attention in both directions without a cache, for images or encoders of text.

        Args:
            query: [B, H, N, D].
            key: [B, H, K, D].
            value: [B, H, K, D].
            mask: bool, broadcasts to [B, H, N, K]: which keys a query sees. Every query sees at
                least one. None: all keys.
            scale: multiplies query @ key; None: 1 / sqrt(D).

        Returns:
            [B, H, N, D], dtype of query.
        """
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)

    def attend_within_items(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Compute attention in both directions within items of N tokens each: `full_attention` with
        other dimensions.

        Args:
            query: [B, N, H, D].
            key: [B, N, H, D].
            value: [B, N, H, D].
            mask: as in `full_attention`, [B, H, N, N].

        Returns:
            [B, N, H, D], dtype of query.
        """
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        return self.full_attention(query, key, value, mask).transpose(1, 2)


def check_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, tensors: AttentionTensors
) -> None:
    """Check arguments of attention that decodes and prefills have in common.

    Raises:
        ValueError: heads, head sizes or dtypes do not fit, or slopes or sinks do not fit the heads.
    """
    *slots, head_size = key_cache.shape
    *value_slots, value_size = value_cache.shape
    if slots != value_slots or not value_size <= head_size == query.shape[2]:
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
    """Return `cache[block_ids]`. It accepts FP8, which torch cannot index."""
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
    `NativeOps.paged_attention_prefill`.
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


def check_rotary(
    positions: Tensor, query: Tensor, key: Tensor | None, cos_sin_cache: Tensor
) -> None:
    """Check the arguments of `rotary_embedding`; raise ValueError if they are wrong."""
    rot_dim, head_size = cos_sin_cache.shape[1], query.shape[2]
    if rot_dim % 2 or rot_dim > head_size:
        raise ValueError(
            f"rot_dim must be even and at most the head size {head_size}, got {rot_dim}"
        )
    num_tokens = positions.shape[-1]
    num_keys = num_tokens if key is None else key.shape[0]
    if query.shape[0] != num_tokens or num_keys != num_tokens:
        raise ValueError(
            f"positions ({num_tokens}), queries ({query.shape[0]}) and keys ({num_keys}) must "
            "have the same number of tokens"
        )


def angles_at(positions: Tensor, cos_sin_cache: Tensor, sections: Tensor | None) -> Tensor:
    """Look up the cosines and sines [T, rot_dim] of tokens at [T] or [P, T] positions.

    See `rotary_embedding`.
    """
    if positions.dim() == 1 or positions.shape[0] == 1:
        return cos_sin_cache.index_select(0, positions.flatten())
    if sections is None:
        raise ValueError(
            "positions must have one entry for each token unless the rotation has sections, got "
            f"{list(positions.shape)}"
        )
    axes = torch.cat((sections, sections))
    angles = cos_sin_cache.index_select(0, positions[0])
    for axis in range(1, positions.shape[0]):
        others = cos_sin_cache.index_select(0, positions[axis])
        angles = torch.where(axes == axis, others, angles)
    return angles


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
    """Rotate pairs of the first 2 * cos.shape[-1] elements of every head of x [T, H, D]."""
    rot_dim = 2 * cos.shape[-1]
    rotated, rest = x[..., :rot_dim], x[..., rot_dim:]
    if is_neox:
        first, second = rotated.chunk(2, dim=-1)
    else:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    # Written as (x * cos) + (rotate_half(x) * sin) so that bf16 rounds as Hugging Face does.
    new_first = first * cos + -second * sin
    new_second = second * cos + first * sin
    if is_neox:
        return torch.cat((new_first, new_second, rest), dim=-1)
    return torch.cat((torch.stack((new_first, new_second), dim=-1).flatten(-2), rest), dim=-1)
