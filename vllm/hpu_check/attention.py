"""Check padded attention over a paged cache against the torch operators on the host.

Letters: B requests (rows), H query heads, G key/value heads, D head size, S block size.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vllm.attention.backends.flat_pa import derive_decode_blocks
from vllm.attention.backends.hpu_attn import (
    decode_attention,
    derive_prefill_blocks,
    prefill_attention,
    prefill_mask,
)
from vllm.attention.backends.hpu_metadata import (
    build_decode_metadata,
    build_prefill_metadata,
    count_decode_blocks,
)
from vllm.attention.backends.sdpa import bridge_sdpa
from vllm.hpu_check.check import LIMITS, MAX_STEP_S, Comparison, Outcome
from vllm.hpu_check.stopwatch import shortest_s
from vllm.messages import IntArray
from vllm.ops.attention_options import AttentionOptions
from vllm.ops.native.operators import NativeOps
from vllm.platforms.habana.bridge import HabanaBridge

_NATIVE = NativeOps()
_HEADS, _KV_HEADS, _HEAD_SIZE, _BLOCK_SIZE = 4, 2, 64, 128
_SCALE = _HEAD_SIZE**-0.5
_PADDING = 2
"""Rows, and blocks, that a launch has more than it needs."""


@dataclass(frozen=True)
class _Cache:
    """Random keys and values of some requests in shuffled blocks, on the host."""

    keys: Tensor
    """[num_blocks, S, G, D]"""
    values: Tensor
    tables: IntArray

    def slots(self, row: int, start: int, end: int) -> Tensor:
        """Return the slots of the tokens from `start` to `end` of a request."""
        position = np.arange(start, end)
        blocks = self.tables[row, position // _BLOCK_SIZE].astype(np.int64)
        return torch.from_numpy(blocks * _BLOCK_SIZE + position % _BLOCK_SIZE)

    def tokens(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values in these slots, [n, G, D] each."""
        return self.keys.flatten(0, 1)[slots], self.values.flatten(0, 1)[slots]

    def without(self, slots: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the flat caches on a device, with these slots overwritten, as before their tokens
        are stored.
        """
        caches = self.keys.flatten(0, 1).clone(), self.values.flatten(0, 1).clone()
        for cache in caches:
            cache[slots] = 9.0
        return caches[0].to(device), caches[1].to(device)


def check_decode(bridge: HabanaBridge) -> Outcome:
    """Check a decode: one new token for each request, with plain and contiguous block lists, and a
    window.
    """
    comparison = Comparison()
    seq_lens = np.array([5, 128, 129, 300], np.int32)
    for dtype in LIMITS:
        cache = _random_cache(seq_lens, dtype)
        for is_contiguous in (False, True):
            for window in (None, 100):
                got, want, seconds = _decode(bridge, cache, seq_lens, is_contiguous, window)
                kind = "contiguous" if is_contiguous else "plain"
                case = f"{dtype}, {kind} blocks, window {window}"
                comparison.add(case, got, want)
                comparison.add_time(case, seconds, MAX_STEP_S)
    return comparison.outcome()


def _decode(
    bridge: HabanaBridge, cache: _Cache, seq_lens: IntArray, is_contiguous: bool, window: int | None
) -> tuple[Tensor, Tensor, float]:
    num_rows, device, dtype = len(seq_lens), bridge.device, cache.keys.dtype
    options = AttentionOptions(sliding_window=window)
    counts = count_decode_blocks(cache.tables, seq_lens, _BLOCK_SIZE)
    metadata = build_decode_metadata(
        cache.tables,
        seq_lens,
        num_rows + _PADDING,
        counts.span if is_contiguous else counts.references + _PADDING,
        _BLOCK_SIZE,
        padded_shared=_PADDING if is_contiguous else None,
    ).to(device)
    query = torch.randn(num_rows + _PADDING, _HEADS, _HEAD_SIZE).to(dtype)
    slots = torch.cat([cache.slots(b, n - 1, n) for b, n in enumerate(seq_lens.tolist())])
    key, value = cache.tokens(slots)
    key_cache, value_cache = cache.without(slots, device)
    run = partial(
        decode_attention,
        query.to(device),
        _padded(key).to(device),
        _padded(value).to(device),
        key_cache,
        value_cache,
        derive_decode_blocks(metadata, _BLOCK_SIZE, dtype, options),
        options,
    )
    got = run()
    want = _NATIVE.paged_attention_decode(
        query[:num_rows].float(),
        cache.keys.float(),
        cache.values.float(),
        torch.from_numpy(cache.tables),
        torch.from_numpy(seq_lens),
        options,
    )
    padded = torch.cat((want, torch.zeros(_PADDING, _HEADS, _HEAD_SIZE)))
    return got, padded, shortest_s(bridge, run)


def check_prefill(bridge: HabanaBridge) -> Outcome:
    """Check a prefill with the fused kernel: several new tokens for each request, without and with
    context, and with a window.
    """
    comparison = Comparison()
    query_lens = np.array([60, 7, 33], np.int32)
    for dtype in LIMITS:
        for what, context_lens, window in (
            ("no context", [0, 0, 0], None),
            ("context", [0, 128, 200], None),
            ("context and window", [0, 128, 200], 50),
        ):
            contexts = np.array(context_lens, np.int32)
            cache = _random_cache(contexts + query_lens, dtype)
            got, want, seconds = _prefill(bridge, cache, contexts, query_lens, window)
            case = f"{dtype}, {what}"
            comparison.add(case, got, want)
            comparison.add_time(case, seconds, MAX_STEP_S)
    return comparison.outcome()


def _prefill(
    bridge: HabanaBridge,
    cache: _Cache,
    context_lens: IntArray,
    query_lens: IntArray,
    window: int | None,
) -> tuple[Tensor, Tensor, float]:
    device, dtype, query_len = bridge.device, cache.keys.dtype, 64
    options = AttentionOptions(sliding_window=window)
    batch = len(query_lens) + _PADDING
    num_context_blocks = -(-int(context_lens.max()) // _BLOCK_SIZE)
    metadata = build_prefill_metadata(
        cache.tables, context_lens, query_lens, batch, query_len, num_context_blocks, _BLOCK_SIZE
    ).to(device)
    query = torch.randn(batch, query_len, _HEADS, _HEAD_SIZE).to(dtype)
    key, value = torch.randn(2, batch, query_len, _KV_HEADS, _HEAD_SIZE).to(dtype)
    bounds = zip(context_lens.tolist(), (context_lens + query_lens).tolist(), strict=True)
    row_slots = [cache.slots(row, start, end) for row, (start, end) in enumerate(bounds)]
    for row, slots in enumerate(row_slots):
        key[row, : len(slots)], value[row, : len(slots)] = cache.tokens(slots)
    new_slots = torch.cat(row_slots)
    key_cache, value_cache = cache.without(new_slots, device)
    run = partial(
        prefill_attention,
        query.to(device),
        key.to(device),
        value.to(device),
        key_cache,
        value_cache,
        derive_prefill_blocks(metadata, _BLOCK_SIZE),
        prefill_mask(metadata, _BLOCK_SIZE, options),
        _SCALE,
        bridge_sdpa(bridge.kernels),
    )
    out = run()
    want = _NATIVE.paged_attention_prefill(
        _ragged(query, query_lens).float(),
        cache.keys.float(),
        cache.values.float(),
        torch.from_numpy(cache.tables),
        np.concatenate(([0], np.cumsum(query_lens))),
        context_lens + query_lens,
        options,
    )
    # Compare the stored keys and values too, as additional heads, because no query has read them.
    stored = [x.cpu()[new_slots] for x in (key_cache, value_cache)]
    got = torch.cat((_ragged(out.cpu(), query_lens), *stored), dim=1)
    return got, torch.cat((want, *cache.tokens(new_slots)), dim=1), shortest_s(bridge, run)


def _random_cache(seq_lens: IntArray, dtype: torch.dtype) -> _Cache:
    max_blocks = -(-int(seq_lens.max()) // _BLOCK_SIZE)
    num_blocks = len(seq_lens) * max_blocks + 1
    tables = torch.randperm(num_blocks - 1).view(len(seq_lens), max_blocks) + 1
    shape = (2, num_blocks, _BLOCK_SIZE, _KV_HEADS, _HEAD_SIZE)
    keys, values = torch.randn(shape).to(dtype)
    return _Cache(keys, values, tables.numpy().astype(np.int32))


def _padded(x: Tensor) -> Tensor:
    """Append random padding to the real requests."""
    return torch.cat((x, torch.randn(_PADDING, *x.shape[1:]).to(x.dtype)))


def _ragged(x: Tensor, lengths: IntArray) -> Tensor:
    """Remove the padding: [B, Q, ...] -> [T, ...]."""
    return torch.cat([x[row, :length] for row, length in enumerate(lengths.tolist())])
