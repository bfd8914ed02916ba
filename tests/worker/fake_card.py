"""A card in plain numpy that reads packed inputs like the model.

Instead of keys and values, its cache stores for each slot a hash of everything that determines
them: the tokens up to the one in the slot. The card computes what it writes from what it reads, so
a read of a wrong slot makes all later results wrong.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from tests.core.reference import next_content
from tests.worker.hpu_helpers import input_sizes
from vllm.attention.backends.hpu_metadata import PADDING_GROUP
from vllm.bucketing import Phase
from vllm.messages import IntArray
from vllm.worker.hpu.launches.input import RESIDENT, unpack_decode, unpack_merged, unpack_prefill
from vllm.worker.hpu.launches.planner import PaddedShape

NEVER = -99
"""Instead of a token or a content: none was written."""


@dataclass
class RowRun:
    """The tokens, reads and writes of one padded request in a forward pass."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Of these tokens."""
    slots: list[int] = field(default_factory=list)
    """The slots of their keys and values."""
    visible: dict[int, int] = field(default_factory=dict)
    """Position -> slot of what the last of them attends to, itself included."""
    contents: dict[int, int] = field(default_factory=dict)
    """Position -> content of these slots, as the row sees it."""


class FakeCard:
    """The cache and the newest tokens of a device.

    Args:
        num_blocks: KV blocks.
        block_size: tokens per block.
        num_rows: rows of the runner, padding not counted.
        root: content before the first token.
    """

    def __init__(self, num_blocks: int, block_size: int, num_rows: int, root: int) -> None:
        self._size = block_size
        self._root = root
        self.cache = [NEVER] * (num_blocks * block_size)
        self.last_token_ids: IntArray = np.full(num_rows + 1, NEVER, np.int32)

    def forget(self, row: int) -> None:
        """Prepare for a new request at a batch index, whose newest token must not be read."""
        self.last_token_ids[row] = NEVER

    def run(self, packed: IntArray, shape: PaddedShape) -> list[RowRun]:
        """Run one forward pass: everything is written before anything is read."""
        if shape.bucket.phase is Phase.DECODE:
            runs = list(self._decodes(packed, shape))
        elif shape.merged_prompts:
            runs = list(self._merged(packed, shape))
        else:
            runs = list(self._prefills(packed, shape))
        for run in runs:
            for position, token_id, slot in zip(
                run.positions, run.token_ids, run.slots, strict=True
            ):
                before = run.visible.get(position - 1)
                content = self._root if before is None else self.cache[before]
                self.cache[slot] = next_content(content, token_id)
        for run in runs:
            run.contents = {position: self.cache[slot] for position, slot in run.visible.items()}
        return runs

    def keep(self, packed: IntArray, shape: PaddedShape, token_ids: dict[int, int]) -> None:
        """Store sampled tokens at the batch indices in the packed input; padding gets an invalid
        token.
        """
        rows = packed[-input_sizes(shape)[-1] :]
        self.last_token_ids[rows] = [token_ids.get(row, NEVER) for row in rows.tolist()]

    def _decodes(self, packed: IntArray, shape: PaddedShape) -> Iterator[RowRun]:
        given = unpack_decode(torch.from_numpy(packed), shape)
        metadata = given.metadata
        token_ids = given.token_ids.numpy().copy()
        is_resident = token_ids == RESIDENT
        of_rows = np.repeat(given.rows.numpy(), shape.bucket.query_len)
        token_ids[is_resident] = self.last_token_ids[of_rows[is_resident]]
        groups, usage, age = (
            part.numpy()
            for part in (metadata.block_groups, metadata.block_usage, metadata.block_age)
        )
        num_sliced = len(groups) - len(metadata.block_list)
        assert num_sliced * self._size <= len(self.cache), "a slice beyond the cache"
        blocks = np.concatenate([np.arange(num_sliced), metadata.block_list.numpy()])
        shape_of_rows = (shape.bucket.batch, shape.bucket.query_len)
        columns = (token_ids, given.indices.numpy(), metadata.slot_mapping.numpy())
        rows = zip(*(column.reshape(shape_of_rows).tolist() for column in columns), strict=True)
        for index, (of_row, positions, slots) in enumerate(rows):
            visible: dict[int, int] = {}
            for entry in np.flatnonzero(groups == index).tolist():
                first = positions[-1] - int(age[entry])
                for offset in range(int(usage[entry])):
                    assert first + offset not in visible, "a position is seen twice"
                    visible[first + offset] = int(blocks[entry]) * self._size + offset
            yield RowRun(of_row, positions, slots, visible)

    def _prefills(self, packed: IntArray, shape: PaddedShape) -> Iterator[RowRun]:
        given = unpack_prefill(torch.from_numpy(packed), shape)
        metadata, (batch, query_len) = given.metadata, given.metadata.slot_mapping.shape
        token_ids = given.token_ids.view(batch, query_len).tolist()
        positions = given.positions.view(batch, query_len).tolist()
        slots, blocks = metadata.slot_mapping.tolist(), metadata.context_blocks.tolist()
        lens = zip(metadata.context_lens.tolist(), metadata.query_lens.tolist(), strict=True)
        for index, (context_len, count) in enumerate(lens):
            visible = {
                position: blocks[index][position // self._size] * self._size + position % self._size
                for position in range(context_len)
            }
            visible.update(zip(positions[index][:count], slots[index][:count], strict=True))
            if count:
                assert given.last_tokens[index] == index * query_len + count - 1
            yield RowRun(token_ids[index], positions[index], slots[index], visible)

    def _merged(self, packed: IntArray, shape: PaddedShape) -> Iterator[RowRun]:
        """Yield the run of each prompt, and one more for all padding."""
        given = unpack_merged(torch.from_numpy(packed), shape)
        parts = {name: part.numpy() for name, part in vars(given.metadata).items()}
        for index in [*range(shape.merged_prompts), PADDING_GROUP]:
            own = np.flatnonzero(parts["sequence_ids"] == index)
            columns = (given.token_ids.numpy(), parts["positions"], parts["slot_mapping"])
            token_ids, positions, slots = (column[own].tolist() for column in columns)
            visible: dict[int, int] = {}
            if index == PADDING_GROUP:
                yield RowRun(token_ids, positions, slots, visible)
                continue
            for entry in np.flatnonzero(parts["context_groups"] == index).tolist():
                for offset in range(int(parts["context_usage"][entry])):
                    position = int(parts["context_starts"][entry]) + offset
                    assert position not in visible, "a position is seen twice"
                    slot = int(parts["context_blocks"][entry]) * self._size + offset
                    visible[position] = slot
            visible.update(zip(positions, slots, strict=True))
            if positions:
                assert parts["last_token_indices"][index] == own[-1]
            yield RowRun(token_ids, positions, slots, visible)
