"""The inputs of a padded launch: one host buffer, one copy to the device, one split into parts.

All parts are int32. Their sizes depend on the shape of the launch alone.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from vllm.attention.backends.hpu_metadata import (
    HPUDecodeMetadata,
    HPUPrefillMetadata,
    build_decode_metadata,
    build_prefill_metadata,
)
from vllm.attention.backends.merged_prefill import (
    MergedPrefillMetadata,
    build_merged_prefill_metadata,
)
from vllm.bucketing import Phase
from vllm.messages import IntArray
from vllm.worker.hpu.planner import BucketLaunch, LaunchShape
from vllm.worker.input_batch import InputBatch

RESIDENT = -1
"""Stands for a token that has been sampled on the device and is still there."""


@dataclass(frozen=True)
class DecodeInput:
    """Parts of a decode of B padded rows."""

    token_ids: Tensor
    """[B]; RESIDENT where the device has it."""
    rows: Tensor
    """[B] row of each token; the padding row for padding."""
    positions: Tensor
    """[B]"""
    metadata: HPUDecodeMetadata


@dataclass(frozen=True)
class PrefillInput:
    """Parts of a prefill of B padded rows with Q padded tokens each."""

    token_ids: Tensor
    """[B * Q]"""
    positions: Tensor
    """[B * Q]"""
    last_tokens: Tensor
    """[B] index of the last token of each row among all B * Q."""
    metadata: HPUPrefillMetadata


@dataclass(frozen=True)
class MergedInput:
    """Parts of a prefill of P padded prompts in one row of Q padded tokens."""

    token_ids: Tensor
    """[Q]"""
    metadata: MergedPrefillMetadata


def input_sizes(shape: LaunchShape) -> tuple[int, ...]:
    """Elements of each part of the packed input; the last one is a row for each of the logits."""
    bucket = shape.bucket
    if shape.merged_prompts:
        prompts, tokens, blocks = shape.merged_prompts, bucket.query_len, bucket.blocks
        return (tokens, tokens, tokens, tokens, prompts, blocks, blocks, blocks, blocks, prompts)
    batch, tokens = bucket.batch, bucket.num_tokens
    if bucket.phase is Phase.DECODE:
        entries = shape.num_entries
        gathered = shape.num_shared if shape.is_contiguous else entries
        return (batch, batch, batch, gathered, entries, entries, entries, batch, batch)
    return (tokens, tokens, batch, batch, batch, batch * bucket.blocks, tokens, batch)


def unpack_decode(packed: Tensor, shape: LaunchShape) -> DecodeInput:
    """Views of the parts of a packed decode."""
    token_ids, rows, positions, block_list, groups, usage, age, slots, _ = packed.split(
        input_sizes(shape)
    )
    metadata = HPUDecodeMetadata(block_list, groups, usage, age, slots)
    return DecodeInput(token_ids, rows, positions, metadata)


def unpack_prefill(packed: Tensor, shape: LaunchShape) -> PrefillInput:
    """Views of the parts of a packed prefill."""
    bucket = shape.bucket
    token_ids, positions, last, query_lens, context_lens, context, slots, _ = packed.split(
        input_sizes(shape)
    )
    metadata = HPUPrefillMetadata(
        query_lens=query_lens,
        context_lens=context_lens,
        context_blocks=context.view(bucket.batch, bucket.blocks),
        slot_mapping=slots.view(bucket.batch, bucket.query_len),
    )
    return PrefillInput(token_ids, positions, last, metadata)


def unpack_merged(packed: Tensor, shape: LaunchShape) -> MergedInput:
    """Views of the parts of a packed merged prefill."""
    token_ids, *parts, _ = packed.split(input_sizes(shape))
    return MergedInput(token_ids, MergedPrefillMetadata(*parts))


class HPUInputBuilder:
    """Packs launches. Keeps which rows have their newest token on the device.

    Args:
        batch: tokens and block tables of the rows.
        block_size: tokens per block.
    """

    def __init__(self, batch: InputBatch, block_size: int) -> None:
        self._batch = batch
        self._block_size = block_size
        self._num_rows = len(batch.num_tokens)
        self._is_resident = np.zeros(self._num_rows, bool)

    @property
    def padding_row(self) -> int:
        """The row of padding, one beyond all others."""
        return self._num_rows

    def place(self, rows: list[int]) -> None:
        """Rows have new requests: the device has none of their tokens."""
        self._is_resident[rows] = False

    def mark_sampled(self, rows: IntArray) -> None:
        """The newest tokens of these rows are on the device."""
        self._is_resident[rows] = True

    def pack(self, launch: BucketLaunch) -> tuple[IntArray, IntArray]:
        """(packed input on the host, indices into `launch.rows` of the rows that sample)."""
        batch, start = self._batch, launch.num_computed_tokens
        seq_lens = start + launch.num_scheduled_tokens
        sampled = np.flatnonzero(seq_lens >= batch.num_tokens[launch.rows]).astype(np.int32)
        sample_rows = self._padded(launch.shape.num_rows, self.padding_row)
        sample_rows[sampled] = launch.rows[sampled]
        if launch.bucket.phase is Phase.DECODE:
            parts = self._decode_parts(launch, seq_lens)
        elif launch.merged_prompts:
            parts = self._merged_parts(launch)
        else:
            parts = self._prefill_parts(launch)
        packed = np.concatenate([*(part.ravel() for part in parts), sample_rows], dtype=np.int32)
        return packed, sampled

    def _decode_parts(self, launch: BucketLaunch, seq_lens: IntArray) -> list[IntArray]:
        batch, rows, padded = self._batch, launch.rows, launch.bucket.batch
        shape = launch.shape
        positions = seq_lens - 1
        token_ids = batch.token_ids[rows, positions]
        newest = positions == batch.num_tokens[rows] - 1
        token_ids[self._is_resident[rows] & newest] = RESIDENT
        metadata = build_decode_metadata(
            batch.block_table[rows],
            seq_lens,
            padded,
            launch.bucket.blocks,
            self._block_size,
            padded_shared=shape.num_shared if shape.is_contiguous else None,
        )
        return [
            self._padded(padded, 0, token_ids),
            self._padded(padded, self.padding_row, rows),
            self._padded(padded, 0, positions),
            metadata.block_list,
            metadata.block_groups,
            metadata.block_usage,
            metadata.block_age,
            metadata.slot_mapping,
        ]

    def _prefill_parts(self, launch: BucketLaunch) -> list[IntArray]:
        batch, rows, bucket = self._batch, launch.rows, launch.bucket
        start, count = launch.num_computed_tokens, launch.num_scheduled_tokens
        metadata = build_prefill_metadata(
            batch.block_table[rows],
            start,
            count,
            bucket.batch,
            bucket.query_len,
            bucket.blocks,
            self._block_size,
        )
        token_ids = np.zeros((bucket.batch, bucket.query_len), np.int32)
        positions = np.zeros_like(token_ids)
        index, column = np.nonzero(np.arange(bucket.query_len) < count[:, None])
        positions[index, column] = start[index] + column
        token_ids[index, column] = batch.token_ids[rows[index], start[index] + column]
        first = np.arange(len(rows), dtype=np.int32) * bucket.query_len
        return [
            token_ids,
            positions,
            self._padded(bucket.batch, 0, first + count - 1),
            metadata.query_lens,
            metadata.context_lens,
            metadata.context_blocks,
            metadata.slot_mapping,
        ]

    def _merged_parts(self, launch: BucketLaunch) -> list[IntArray]:
        batch, rows, bucket = self._batch, launch.rows, launch.bucket
        metadata = build_merged_prefill_metadata(
            batch.block_table[rows],
            launch.num_computed_tokens,
            launch.num_scheduled_tokens,
            launch.merged_prompts,
            bucket.query_len,
            bucket.blocks,
            self._block_size,
        )
        num_tokens = int(launch.num_scheduled_tokens.sum())
        index, position = metadata.sequence_ids[:num_tokens], metadata.positions[:num_tokens]
        token_ids = self._padded(bucket.query_len, 0, batch.token_ids[rows[index], position])
        return [token_ids, *(getattr(metadata, f.name) for f in fields(metadata))]

    @staticmethod
    def _padded(size: int, fill: int, values: IntArray | None = None) -> IntArray:
        out = np.full(size, fill, np.int32)
        if values is not None:
            out[: len(values)] = values
        return out


def to_device(packed: IntArray, device: torch.device) -> Tensor:
    """The one copy of a launch."""
    return torch.from_numpy(packed).to(device)
