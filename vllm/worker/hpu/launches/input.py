"""The inputs of a padded forward pass: one host buffer, one copy to the device, then split.

The buffer holds the fields of the three dataclasses, and of those nested in them, in this order.
Their sizes depend only on the shape of the forward pass.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Generic

import numpy as np
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
from vllm.attention.backends.packed_fields import Array, PackedFields, packed, packed_fields_of
from vllm.bucketing import Phase
from vllm.messages import BoolArray, IntArray
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.hpu.launches.embeddings import DeviceEmbeddings
from vllm.worker.hpu.launches.planner import PaddedLaunch, PaddedShape
from vllm.worker.parts.image_attention import ImageAttention
from vllm.worker.parts.position_rows import PositionRows

RESIDENT = -1
"""Stands for a token that has been sampled on the device and is still there."""


@dataclass(frozen=True)
class DecodeInput(Generic[Array]):
    """Inputs of a decode of B padded requests with Q padded tokens each, T = B * Q."""

    token_ids: Array = packed("T")
    """[T]; RESIDENT where the device has it."""
    rows: Array = packed("B")
    """[B] row of each; the padding row for padding."""
    indices: Array = packed("T")
    """[T] of the tokens in their requests; padding repeats the index of the last token of a row."""
    position_offsets: Array = packed("B")
    """[B] position minus index of the tokens of each row."""
    metadata: HPUDecodeMetadata[Array] = packed_fields_of(HPUDecodeMetadata)
    replays: Array = packed("K R")
    """[3, B] tokens that the recurrent state of each lacks
    (`SchedulerOutput.num_replayed_tokens`); how many of them are before the state that is kept, all
    where none is; row of the states to which that state is copied, the padding row where none is.
    [3, 0] where Q is 1, as nothing is replayed then."""
    adapter_slots: Array = packed("B")
    """[B] slot of the LoRA adapter of each; -1: none."""
    sample_rows: Array = packed("L")
    """[L] row of each of the logits that are the first ones of their row; the padding row for all
    others, and where none is sampled."""


@dataclass(frozen=True)
class PrefillInput(Generic[Array]):
    """Inputs of a prefill of B padded requests with Q padded tokens each, T = B * Q."""

    token_ids: Array = packed("T")
    """[T]; negative where the embedding is given, see `DeviceEmbeddings.mark`."""
    rows: Array = packed("B")
    """[B] as in a decode."""
    positions: Array = packed("X T")
    """[X, T] positions by which tokens rotate; X is 1, or the number of positions of each token
    that the model supports."""
    last_tokens: Array = packed("B")
    """[B] index of the last token of each row among all T."""
    metadata: HPUPrefillMetadata[Array] = packed_fields_of(HPUPrefillMetadata)
    adapter_slots: Array = packed("B")
    """[B] as in a decode."""
    sample_rows: Array = packed("L")
    """[L] as in a decode."""


@dataclass(frozen=True)
class MergedInput(Generic[Array]):
    """Inputs of a prefill of P padded prompts that are merged into one sequence of Q
    padded tokens.
    """

    token_ids: Array = packed("Q")
    """[Q] as in a prefill."""
    positions: Array = packed("Y Q")
    """[Y, Q] as in a prefill; Y is 0 where requests give none: `metadata` has the indices."""
    metadata: MergedPrefillMetadata[Array] = packed_fields_of(MergedPrefillMetadata)
    adapter_slots: Array = packed("Q")
    """[Q] of each token."""
    sample_rows: Array = packed("L")
    """[L] as in a decode."""


_DECODE: PackedFields[DecodeInput[Any]] = PackedFields(DecodeInput)
_PREFILL: PackedFields[PrefillInput[Any]] = PackedFields(PrefillInput)
_MERGED: PackedFields[MergedInput[Any]] = PackedFields(MergedInput)


def padded_sizes(
    shape: PaddedShape, num_positions: int = 0, *, sees_ahead: bool = False
) -> dict[str, int]:
    """Return the sizes of the dimensions of fields, by the letters in their shapes.

    Args:
        shape: shape of the forward pass.
        num_positions: positions that requests may give for each prompt token; 0: none.
        sees_ahead: tokens of images attend to later ones.
    """
    bucket = shape.bucket
    num_rows = 1 if shape.merged_prompts else bucket.batch
    return {
        "B": bucket.batch,
        "Q": bucket.query_len,
        "T": bucket.num_tokens,
        "C": bucket.blocks,
        "N": shape.num_entries,
        "G": shape.num_shared if shape.is_contiguous else shape.num_entries,
        "P": shape.merged_prompts,
        "L": shape.num_rows,
        "K": 3,
        "R": bucket.batch if bucket.query_len > 1 else 0,
        "X": num_positions or 1,
        "Y": num_positions,
        "F": num_rows if sees_ahead else 0,
    }


def fields_of(shape: PaddedShape) -> PackedFields[Any]:
    """Return the fields of the packed input of a forward pass."""
    if shape.bucket.phase is Phase.DECODE:
        return _DECODE
    return _MERGED if shape.merged_prompts else _PREFILL


def unpack_decode(buffer: Tensor, shape: PaddedShape) -> DecodeInput[Tensor]:
    """Return views of the parts of a packed decode."""
    return _DECODE.unpack(buffer, padded_sizes(shape))


def unpack_prefill(
    buffer: Tensor, shape: PaddedShape, num_positions: int = 0, *, sees_ahead: bool = False
) -> PrefillInput[Tensor]:
    """Return views of the parts of a packed prefill."""
    return _PREFILL.unpack(buffer, padded_sizes(shape, num_positions, sees_ahead=sees_ahead))


def unpack_merged(
    buffer: Tensor, shape: PaddedShape, num_positions: int = 0, *, sees_ahead: bool = False
) -> MergedInput[Tensor]:
    """Return views of the parts of a packed merged prefill."""
    return _MERGED.unpack(buffer, padded_sizes(shape, num_positions, sees_ahead=sees_ahead))


class HPUInputBuilder:
    """Packs the inputs of forward passes, and tracks which newest tokens are only on the device.

    Args:
        batch: tokens and block tables of the requests.
        block_size: tokens per block.
        slot_of_row: [rows] int32: slot of the LoRA adapter of each request, or -1; None: there are
            no adapters.
        has_device_drafts: drafts are made on the card as well.
        embeddings: embeddings that requests give instead of tokens; None: not supported.
        positions: positions that requests give instead of indices; None: not supported.
        image_attention: how far ahead tokens attend; None: only up to themselves.
        reads_blocks: False: the model has no KV cache.
    """

    tokens_ahead: ClassVar[int] = 0
    """Distance from a position to the token that runs there: 0, or 1 for a speculator, which pairs
    a position with the token after it."""

    def __init__(
        self,
        batch: InputBatch,
        block_size: int,
        slot_of_row: IntArray | None = None,
        *,
        has_device_drafts: bool = False,
        embeddings: DeviceEmbeddings | None = None,
        positions: PositionRows | None = None,
        image_attention: ImageAttention | None = None,
        reads_blocks: bool = True,
    ) -> None:
        self._reads_blocks = reads_blocks
        self._embeddings, self._positions, self._image_attention = (
            embeddings,
            positions,
            image_attention,
        )
        self._num_positions = 0 if positions is None else positions.num_positions
        self._batch = batch
        self._has_device_drafts = has_device_drafts
        self._block_size = block_size
        self._num_rows = len(batch.num_tokens)
        self._is_on_device = np.zeros(self._num_rows, bool)
        if slot_of_row is None:
            slot_of_row = np.full(self._num_rows, -1, np.int32)
        self._slot_of_row = slot_of_row

    @property
    def padding_row(self) -> int:
        """The batch index used for padding, one after all others."""
        return self._num_rows

    def place(self, rows: list[int]) -> None:
        """Take the newest tokens of these requests from the host in the next forward pass.

        The requests are new, or the host has newer tokens than the device.
        """
        self._is_on_device[rows] = False

    def mark_sampled(self, rows: IntArray) -> None:
        """Note that the newest tokens of these requests are on the device."""
        self._is_on_device[rows] = True

    def are_on_device(self, rows: IntArray) -> BoolArray:
        """Return whether the newest token of each request is on the device."""
        return self._is_on_device[rows]

    def pack(self, launch: PaddedLaunch) -> tuple[IntArray, IntArray]:
        """Pack the inputs; return them, and the indices into `launch.rows` of requests
        that sample.
        """
        batch, start = self._batch, launch.num_computed_tokens
        seq_lens = start + launch.num_scheduled_tokens
        num_known = batch.num_tokens[launch.rows] - self.tokens_ahead
        sampled = np.flatnonzero(seq_lens >= num_known).astype(np.int32)
        sample_rows = self._padded(launch.shape.num_rows, self.padding_row)
        sample_rows[sampled * np.int32(launch.tokens_with_logits)] = launch.rows[sampled]
        given = self._input(launch, seq_lens, sample_rows)
        sees_ahead = self._image_attention is not None
        sizes = padded_sizes(launch.shape, self._num_positions, sees_ahead=sees_ahead)
        return self._fields(launch.shape).pack(given, sizes), sampled

    def _on_device(self, launch: PaddedLaunch) -> BoolArray:
        """Return [n, Q]: which tokens of a decode are only on the device."""
        on_device = np.zeros((len(launch.rows), launch.bucket.query_len), np.bool_)
        newest = launch.num_computed_tokens >= self._batch.num_tokens[launch.rows] - 1
        on_device[:, 0] = self._is_on_device[launch.rows] & newest
        if self._has_device_drafts and launch.num_drafts is not None:
            on_device[:, 1:] = True
        return on_device

    def _fields(self, shape: PaddedShape) -> PackedFields[Any]:
        return fields_of(shape)

    def _input(
        self, launch: PaddedLaunch, seq_lens: IntArray, sample_rows: IntArray
    ) -> DecodeInput[IntArray] | PrefillInput[IntArray] | MergedInput[IntArray]:
        if launch.bucket.phase is Phase.DECODE:
            return self._decode(launch, seq_lens, sample_rows)
        if launch.merged_prompts:
            return self._merged_prefill(launch, sample_rows)
        return self._prefill(launch, sample_rows)

    def _decode(
        self, launch: PaddedLaunch, seq_lens: IntArray, sample_rows: IntArray
    ) -> DecodeInput[IntArray]:
        batch, rows, bucket = self._batch, launch.rows, launch.bucket
        shape, start = launch.shape, launch.num_computed_tokens
        indices, query_lens = start[:, None], None
        if bucket.query_len > 1:
            query_lens = launch.num_scheduled_tokens
            column = np.arange(bucket.query_len, dtype=np.int32)
            indices = indices + np.minimum(column, query_lens[:, None] - 1)
        token_ids = batch.token_ids[rows[:, None], indices + self.tokens_ahead]
        token_ids[self._on_device(launch)] = RESIDENT
        metadata = build_decode_metadata(
            batch.block_table[rows],
            seq_lens,
            bucket.batch,
            bucket.blocks,
            self._block_size,
            padded_shared=shape.num_shared if shape.is_contiguous else None,
            query_lens=query_lens,
            padded_query_len=bucket.query_len,
            reads_blocks=self._reads_blocks,
        )
        return DecodeInput(
            token_ids=self._padded(bucket.num_tokens, 0, token_ids.ravel()),
            rows=self._padded(bucket.batch, self.padding_row, rows),
            indices=self._padded(bucket.num_tokens, 0, indices.ravel()),
            position_offsets=self._padded(bucket.batch, 0, self._offsets(rows)),
            metadata=metadata,
            replays=self._replays(launch),
            adapter_slots=self._padded(bucket.batch, -1, self._slot_of_row[rows]),
            sample_rows=sample_rows,
        )

    def _replays(self, launch: PaddedLaunch) -> IntArray:
        """Return the value of `DecodeInput.replays` for a decode."""
        batch, replayed = launch.bucket.batch, launch.num_replayed_tokens
        if launch.bucket.query_len == 1:
            return np.empty((3, 0), np.int32)
        before, kept_rows = replayed, self._padded(batch, self.padding_row)
        if replayed is not None and launch.kept_replays is not None:
            index_of = {row: index for index, row in enumerate(launch.rows.tolist())}
            before = replayed.copy()
            for row, count, number in launch.kept_replays.tolist():
                before[index_of[row]] += count
                kept_rows[index_of[row]] = number + 1  # index 0 is the padding row
        counts = (self._padded(batch, 0, values) for values in (replayed, before))
        return np.stack([*counts, kept_rows])

    def _prefill(self, launch: PaddedLaunch, sample_rows: IntArray) -> PrefillInput[IntArray]:
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
            self._later_keys(launch, bucket.batch),
            reads_blocks=self._reads_blocks,
        )
        token_ids = np.zeros((bucket.batch, bucket.query_len), np.int32)
        positions = np.zeros_like(token_ids)
        index, column = np.nonzero(np.arange(bucket.query_len) < count[:, None])
        indices = start[index] + column
        positions[index, column] = indices
        token_ids[index, column] = batch.token_ids[rows[index], indices + self.tokens_ahead]
        first = np.arange(len(rows), dtype=np.int32) * bucket.query_len
        if self._embeddings is not None:
            self._embeddings.mark(launch, token_ids.ravel())
        return PrefillInput(
            token_ids=token_ids.ravel(),
            rows=self._padded(bucket.batch, self.padding_row, rows),
            positions=self._positions_of(launch, positions.ravel()),
            last_tokens=self._padded(bucket.batch, 0, first + count - 1),
            metadata=metadata,
            adapter_slots=self._padded(bucket.batch, -1, self._slot_of_row[rows]),
            sample_rows=sample_rows,
        )

    def _merged_prefill(self, launch: PaddedLaunch, sample_rows: IntArray) -> MergedInput[IntArray]:
        batch, rows, bucket = self._batch, launch.rows, launch.bucket
        metadata = build_merged_prefill_metadata(
            batch.block_table[rows],
            launch.num_computed_tokens,
            launch.num_scheduled_tokens,
            launch.merged_prompts,
            bucket.query_len,
            bucket.blocks,
            self._block_size,
            self._later_keys(launch, 1),
        )
        num_tokens = int(launch.num_scheduled_tokens.sum())
        index, position = metadata.sequence_ids[:num_tokens], metadata.positions[:num_tokens]
        known = batch.token_ids[rows[index], position + self.tokens_ahead]
        token_ids = self._padded(bucket.query_len, 0, known)
        if self._embeddings is not None:
            self._embeddings.mark(launch, token_ids)
        slots = self._padded(bucket.query_len, -1, self._slot_of_row[rows[index]])
        positions = np.empty((0, bucket.query_len), np.int32)
        if self._positions is not None:
            positions = self._positions_of(launch, metadata.positions)
        return MergedInput(token_ids, positions, metadata, slots, sample_rows)

    def _later_keys(self, launch: PaddedLaunch, num_rows: int) -> IntArray | None:
        """Return the last key [rows, Q] that each token of a prefill sees; None: tokens never look
        ahead.
        """
        if self._image_attention is None:
            return None
        last_keys = np.zeros(num_rows * launch.bucket.query_len, np.int32)
        self._image_attention.lengthen(launch, last_keys)
        return last_keys.reshape(num_rows, -1)

    def _offsets(self, rows: IntArray) -> IntArray | None:
        """Return the offsets added to the indices of tokens after prompts; None: there are none."""
        return None if self._positions is None else self._positions.offsets[rows]

    def _positions_of(self, launch: PaddedLaunch, indices: IntArray) -> IntArray:
        """Return the positions [X, T] of the tokens of a prefill with these indices [T]."""
        if self._positions is None:
            return indices[None]
        positions = np.repeat(indices[None], self._num_positions, 0)
        starts, count = launch.starts, launch.num_scheduled_tokens
        for first, end, offset in zip(
            starts, starts + count, self._positions.offsets[launch.rows], strict=True
        ):
            positions[:, first:end] += offset
        self._positions.write_prompts(launch, positions)
        return positions

    @staticmethod
    def _padded(size: int, fill: int, values: IntArray | None = None) -> IntArray:
        out = np.full(size, fill, np.int32)
        if values is not None:
            out[: len(values)] = values
        return out
