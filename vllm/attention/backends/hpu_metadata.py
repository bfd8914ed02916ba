"""Build the metadata of a padded batch on HPU for its attention layers.

This module handles block tables and lengths. Padded sizes are given, and attention is computed
elsewhere.

A decode is a flat list of blocks, with one entry for every block that a request (row) sees:

    rows     len 6, table [3, 1]     len 4, table [2]          (block size 4)
    entries  block 3  block 1        block 2        padding ...
    groups   0        0              1              -1
    usage    4        2              4              1

All data on the device are tensors whose shapes depend only on the bucket: a Python number that
changes from step to step would create a new graph. The builders run on the host, in numpy, without
a Python loop over requests.
"""

from dataclasses import dataclass, fields
from typing import Any, Generic

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm.attention.backends.packed_fields import Array, packed
from vllm.messages import NULL_BLOCK_ID, IntArray

PADDING_GROUP = -1
"""Group of an entry that belongs to no row."""


@dataclass(frozen=True)
class HPUDecodeMetadata(Generic[Array]):
    """Metadata of Q new tokens for each of B padded requests, over N entries of the flat block
    list.

    Q is 1, or the number of drafts to verify plus one; fewer tokens are padded on the right. T is B
    * Q.

    The first N - G entries are blocks 0, 1, 2, ... of the cache, read as a slice without a gather.
    `block_list` has the other G entries. A plain batch gathers all blocks, so G is N; a contiguous
    one gathers only the repeats of shared blocks. All arrays are int32.
    """

    block_list: Array = packed("G")
    """[G] the blocks to gather; NULL_BLOCK_ID for padding."""
    block_groups: Array = packed("N")
    """[N] the row that each entry belongs to; PADDING_GROUP for none."""
    block_usage: Array = packed("N")
    """[N] tokens in the block, of its row; 1 for padding."""
    block_age: Array = packed("N")
    """[N] how many tokens the first slot of the block is older than the newest token of the row;
    0 for padding. Slot t is hidden by a window W when age - t >= W."""
    slot_mapping: Array = packed("T")
    """[T] where new keys and values go, block id * S + offset. Slots of padding are in the null
    block, and differ from each other as far as its size allows."""

    def to(self, device: torch.device | str) -> "HPUDecodeMetadata[Tensor]":
        """Copy the arrays from the host to the device."""
        return HPUDecodeMetadata(**to_tensors(self, device))


@dataclass(frozen=True)
class HPUPrefillMetadata(Generic[Array]):
    """Metadata of B padded requests with Q padded new tokens each, after up to C blocks of cached
    context.

    New tokens are padded on the right. All arrays are int32.
    """

    query_lens: Array = packed("B")
    """[B] new tokens of each row; 0 for a padded row."""
    context_lens: Array = packed("B")
    """[B] tokens before the new ones, of an earlier chunk or a prefix hit. They need not fill a
    block."""
    context_blocks: Array = packed("B C")
    """[B, C] blocks that contain the tokens of `context_lens`; NULL_BLOCK_ID for padding. C is 0 in
    a forward pass without context."""
    slot_mapping: Array = packed("B Q")
    """[B, Q] where new keys and values go; slots of padding are in the null block."""
    last_keys: Array = packed("F Q")
    """[B, Q] the last key that each token sees, as an index in its request, where it is not its
    own; else 0. F is 0 for models whose tokens see no later ones."""

    def to(self, device: torch.device | str) -> "HPUPrefillMetadata[Tensor]":
        """Copy the arrays from the host to the device."""
        return HPUPrefillMetadata(**to_tensors(self, device))


@dataclass(frozen=True)
class DecodeBlockCounts:
    """Bucket sizes that a decode needs."""

    references: int
    """Number of blocks in the block tables of all requests, which a plain launch gathers."""
    span: int
    """Highest block id + 1: the slice that a contiguous launch reads."""
    shared: int
    """References to a block beyond its first, which a contiguous launch gathers additionally."""


def count_decode_blocks(
    block_tables: npt.ArrayLike, seq_lens: npt.ArrayLike, block_size: int
) -> DecodeBlockCounts:
    """Return the smallest padded sizes with which `build_decode_metadata` accepts the same
    arguments.
    """
    block_list = _flatten(block_tables, seq_lens, block_size).block_list
    return DecodeBlockCounts(
        references=len(block_list),
        span=int(block_list.max(initial=-1)) + 1,
        shared=len(block_list) - len(np.unique(block_list)),
    )


def build_decode_metadata(
    block_tables: npt.ArrayLike,
    seq_lens: npt.ArrayLike,
    padded_batch: int,
    padded_blocks: int,
    block_size: int,
    *,
    padded_shared: int | None = None,
    query_lens: IntArray | None = None,
    padded_query_len: int = 1,
    reads_blocks: bool = True,
) -> HPUDecodeMetadata[IntArray]:
    """Flatten the block tables of a decode.

    A contiguous batch has an entry for every block of the slice, at the index of its id. With
    prefix caching, two requests can share a block, but an entry serves one request. So the first
    reference uses the entry, and each further reference becomes a gathered entry. The batch has
    `padded_shared` of these. If they do not suffice, the batch is refused; the caller then builds
    one that gathers all blocks.

    Args:
        block_tables: [n, max_blocks]; entries after the last block of a request are not read.
        seq_lens: [n] tokens of each request, the new one included. 0: a padded request.
        padded_batch: padded number of requests, B >= n.
        padded_blocks: entries of a plain batch; size of the slice of a contiguous one, at most the
            number of blocks in the cache.
        block_size: S.
        padded_shared: number of gathered entries of a contiguous batch; None: a plain batch.
        query_lens: [n] new tokens of each request, the last ones; None: one each.
        padded_query_len: Q.
        reads_blocks: False: the model has no KV cache, so all entries are padding.

    Raises:
        ValueError: the requests do not fit the padded sizes or their tables.
    """
    flat = _flatten(block_tables, seq_lens, block_size, reads_blocks=reads_blocks)
    num_rows = len(flat.seq_lens)
    if num_rows > padded_batch:
        raise ValueError(
            f"a batch of {num_rows} requests does not fit a bucket of {padded_batch} requests"
        )
    if padded_shared is None:
        num_entries = num_listed = padded_blocks
        indices = np.arange(len(flat.block_list))
        if len(indices) > padded_blocks:
            raise ValueError(
                f"{len(indices)} block references do not fit a bucket of {padded_blocks} blocks"
            )
        block_list = _padded(num_listed, NULL_BLOCK_ID, indices, flat.block_list)
    else:
        num_entries, num_listed = padded_blocks + padded_shared, padded_shared
        is_repeat = np.ones(len(flat.block_list), bool)
        is_repeat[np.unique(flat.block_list, return_index=True)[1]] = False
        repeats = flat.block_list[is_repeat]
        span = int(flat.block_list.max(initial=-1)) + 1
        if span > padded_blocks or len(repeats) > padded_shared:
            raise ValueError(
                f"the decode batch does not fit its bucket: block ids up to {span - 1} (bucket: "
                f"{padded_blocks} blocks), {len(repeats)} extra references to shared blocks "
                f"(bucket: {padded_shared})"
            )
        indices = flat.block_list.astype(np.int64)
        indices[is_repeat] = padded_blocks + np.arange(len(repeats))
        block_list = _padded(num_listed, NULL_BLOCK_ID, np.arange(len(repeats)), repeats)
    return HPUDecodeMetadata(
        block_list=block_list,
        block_groups=_padded(num_entries, PADDING_GROUP, indices, flat.groups),
        block_usage=_padded(num_entries, 1, indices, np.minimum(flat.ages + 1, block_size)),
        block_age=_padded(num_entries, 0, indices, flat.ages),
        slot_mapping=_new_slots(flat, query_lens, (padded_batch, padded_query_len), block_size),
    )


def build_prefill_metadata(
    block_tables: npt.ArrayLike,
    context_lens: npt.ArrayLike,
    query_lens: npt.ArrayLike,
    padded_batch: int,
    padded_query_len: int,
    padded_context_blocks: int,
    block_size: int,
    last_keys: IntArray | None = None,
    *,
    reads_blocks: bool = True,
) -> HPUPrefillMetadata[IntArray]:
    """Build the padded metadata of a prefill.

    Args:
        block_tables: [n, max_blocks]; entries after the last block of a request are not read.
        context_lens: [n] tokens of each request that are in the cache.
        query_lens: [n] new tokens after them.
        padded_batch: B >= n.
        padded_query_len: Q.
        padded_context_blocks: C; 0 if no request of the batch has context.
        block_size: S.
        last_keys: `last_keys` of `HPUPrefillMetadata`; None: F is 0.
        reads_blocks: False: the model has no KV cache, so no context has blocks.

    Raises:
        ValueError: the requests do not fit the padded sizes or their tables.
    """
    tables, contexts, queries = (
        np.asarray(x, np.int32) for x in (block_tables, context_lens, query_lens)
    )
    num_rows = len(queries)
    needed = -(-contexts // block_size) if reads_blocks else np.zeros_like(contexts)
    longest, most = int(queries.max(initial=0)), int(needed.max(initial=0))
    if num_rows > padded_batch or longest > padded_query_len or most > padded_context_blocks:
        raise ValueError(
            f"{num_rows} requests with up to {longest} new tokens and {most} context blocks do "
            f"not fit a bucket of {padded_batch} x {padded_query_len} tokens and "
            f"{padded_context_blocks} context blocks"
        )
    check_tables(tables, contexts + queries, block_size)

    context_blocks = np.full((padded_batch, padded_context_blocks), NULL_BLOCK_ID, np.int32)
    column = np.arange(most)
    context_blocks[:num_rows, :most] = np.where(
        column < needed[:, None], tables[:, :most], NULL_BLOCK_ID
    )
    slots = padding_slots(padded_batch * padded_query_len, block_size)
    slots = slots.reshape(padded_batch, padded_query_len)
    row, token = np.nonzero(np.arange(padded_query_len) < queries[:, None])
    position = contexts[row] + token
    slots[row, token] = tables[row, position // block_size] * block_size + position % block_size
    return HPUPrefillMetadata(
        query_lens=_padded(padded_batch, 0, np.arange(num_rows), queries),
        context_lens=_padded(padded_batch, 0, np.arange(num_rows), contexts),
        context_blocks=context_blocks,
        slot_mapping=slots,
        last_keys=np.empty((0, padded_query_len), np.int32) if last_keys is None else last_keys,
    )


@dataclass(frozen=True)
class _FlatBlocks:
    """The entries of a decode without padding, in the order of the requests."""

    tables: IntArray
    seq_lens: IntArray
    block_list: IntArray
    groups: IntArray
    ages: IntArray


def _flatten(
    block_tables: npt.ArrayLike,
    seq_lens: npt.ArrayLike,
    block_size: int,
    *,
    reads_blocks: bool = True,
) -> _FlatBlocks:
    tables, lengths = np.asarray(block_tables, np.int32), np.asarray(seq_lens, np.int32)
    check_tables(tables, lengths, block_size)
    count = -(-lengths // block_size) if reads_blocks else np.zeros_like(lengths)
    groups = np.repeat(np.arange(len(lengths), dtype=np.int32), count)
    starts = np.repeat(np.cumsum(count) - count, count)
    index = (np.arange(len(groups), dtype=np.int32) - starts).astype(np.int32)
    return _FlatBlocks(
        tables=tables,
        seq_lens=lengths,
        block_list=tables[groups, index],
        groups=groups,
        ages=lengths[groups] - 1 - index * np.int32(block_size),
    )


def _new_slots(
    flat: "_FlatBlocks", query_lens: IntArray | None, shape: tuple[int, int], block_size: int
) -> IntArray:
    """Return the slots [T] of the new tokens of a decode with the shape (B, Q)."""
    slots = padding_slots(shape[0] * shape[1], block_size)
    rows = np.flatnonzero(flat.seq_lens)
    position, targets = flat.seq_lens[rows] - 1, rows * shape[1]
    if query_lens is not None:
        rows, column = np.nonzero(np.arange(shape[1]) < query_lens[:, None])
        position = (flat.seq_lens - query_lens)[rows] + column
        targets = rows * shape[1] + column
    slots[targets] = flat.tables[rows, position // block_size] * block_size + position % block_size
    return slots


def to_tensors(arrays: Any, device: torch.device | str) -> dict[str, Tensor]:
    """Copy the fields of a dataclass of arrays to the device."""
    return {f.name: torch.from_numpy(getattr(arrays, f.name)).to(device) for f in fields(arrays)}


def check_tables(tables: IntArray, seq_lens: IntArray, block_size: int) -> None:
    """Refuse tables [n, max_blocks] that are too narrow for the n lengths.

    Raises:
        ValueError: a table is too narrow.
    """
    needed = -(-int(seq_lens.max(initial=0)) // block_size)
    if tables.ndim != 2 or len(tables) != len(seq_lens) or tables.shape[1] < needed:
        raise ValueError(
            f"block_tables must be [{len(seq_lens)}, {needed} or more] for blocks of {block_size} "
            f"tokens, got {list(tables.shape)}"
        )


def _padded(size: int, fill: int, indices: npt.NDArray[np.int64], values: IntArray) -> IntArray:
    out = np.full(size, fill, np.int32)
    out[indices] = values
    return out


def padding_slots(count: int, block_size: int) -> IntArray:
    """Return `count` slots of the null block, with repeats."""
    cycle = np.arange(count, dtype=np.int32) % np.int32(block_size)
    return cycle + np.int32(NULL_BLOCK_ID * block_size)
