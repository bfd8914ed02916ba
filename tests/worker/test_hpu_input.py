"""Test the packed input of a forward pass, value by value."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.worker.hpu_helpers import input_sizes
from tests.worker.test_input_batch import int_array, new_request, step
from vllm.bucketing.bucket import Bucket, decode, prefill
from vllm.messages import TokenPositions
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.hpu.launches.input import (
    RESIDENT,
    HPUInputBuilder,
    unpack_decode,
    unpack_merged,
    unpack_prefill,
)
from vllm.worker.hpu.launches.planner import PaddedLaunch, PaddedShape
from vllm.worker.parts.position_rows import PositionRows

SIZE = 4
PADDING_ROW = 8


def filled_batch() -> InputBatch:
    """Return a batch: request 5 has 6 tokens in blocks 3 and 1, request 2 has 4 tokens in block 2,
    and request 7 has 9 tokens in blocks 4, 6 and 5.
    """
    batch = InputBatch(max_num_seqs=PADDING_ROW, max_model_len=64, max_blocks=16)
    batch.update(
        step(
            [
                new_request(5, [50, 51, 52, 53, 54, 55], blocks=[3, 1]),
                new_request(2, [20, 21, 22], output=[23], blocks=[2]),
                new_request(7, list(range(70, 79)), blocks=[4, 6, 5]),
            ]
        )
    )
    return batch


def launch_of(bucket: Bucket, *rows: tuple[int, int, int], **kind: Any) -> PaddedLaunch:
    """Return a forward pass of these requests, each as (batch index, computed tokens, scheduled
    tokens).
    """
    columns = [np.array(column, np.int32) for column in zip(*rows, strict=True)] or [
        int_array()
    ] * 3
    return PaddedLaunch(*columns, bucket, **kind)


def packed_parts(
    launch: PaddedLaunch, builder: HPUInputBuilder | None = None
) -> tuple[list[list[int]], list[int]]:
    """Return the parts of the packed input, and the batch indices that sample. The slots of
    adapters are omitted, because no request has an adapter.
    """
    builder = builder or HPUInputBuilder(filled_batch(), SIZE)
    packed, sampled = builder.pack(launch)
    ends = np.cumsum(input_sizes(launch.shape))
    assert packed.dtype == np.int32 and len(packed) == ends[-1]
    *parts, slots, sample_rows = (part.tolist() for part in np.split(packed, ends[:-1]))
    assert set(slots) == {-1}
    return [*parts, sample_rows], sampled.tolist()


@pytest.mark.parametrize(
    ("bucket", "rows", "merged_prompts", "want"),
    [
        (decode(3, 8), ((5, 5, 1), (2, 3, 1)), 0, [1, -1, -1]),
        (prefill(3, 5, 3), ((7, 5, 4), (5, 0, 3)), 0, [0, 1, -1]),
        (prefill(1, 9, 3), ((7, 5, 4), (5, 0, 3)), 4, [0] * 4 + [1] * 3 + [-1] * 2),
    ],
)
def test_rows_bring_the_slots_of_their_adapters(bucket, rows, merged_prompts, want):
    batch = filled_batch()
    slot_of_row = np.full(len(batch.num_tokens), -1, np.int32)
    slot_of_row[[7, 5]] = 0, 1
    launch = launch_of(bucket, *rows, merged_prompts=merged_prompts)
    packed, _ = HPUInputBuilder(batch, SIZE, slot_of_row).pack(launch)
    parts = np.split(packed, np.cumsum(input_sizes(launch.shape))[:-1])
    assert parts[-2].tolist() == want


DECODES = ((5, 5, 1), (2, 3, 1))


def test_a_plain_decode():
    parts, sampled = packed_parts(launch_of(decode(3, 8), *DECODES))
    assert parts == [
        [55, 23, 0],
        [5, 2, PADDING_ROW],
        [5, 3, 0],
        [0, 0, 0],  # offsets of positions: none
        [3, 1, 2, 0, 0, 0, 0, 0],  # block ids
        [0, 0, 1, -1, -1, -1, -1, -1],  # the request (group) of each block
        [4, 2, 4, 1, 1, 1, 1, 1],  # number of used slots in each block
        [5, 1, 3, 0, 0, 0, 0, 0],  # distance of the first slot of each block from the newest token
        [1 * 4 + 1, 2 * 4 + 3, 2],  # slots of the new tokens
        [],  # tokens that are replayed: none
        [5, 2, PADDING_ROW],
    ]
    assert sampled == [0, 1]


def test_a_decode_with_drafts_brings_what_recurrent_states_lack():
    """Request 2 replays 3 tokens, and its recurrent state is stored before the last of them."""
    launch = launch_of(
        decode(3, 8, 3),
        *((5, 3, 3), (2, 3, 1)),
        num_replayed_tokens=int_array(0, 3),
        kept_replays=np.array([[2, -1, PADDING_ROW + 4]], np.int32),
    )
    parts, _ = packed_parts(launch)
    assert parts[-2] == [
        *(0, 3, 0),
        *(0, 2, 0),
        *(PADDING_ROW, PADDING_ROW + 5, PADDING_ROW),
    ]


def test_a_contiguous_decode_has_each_block_at_its_id():
    parts, sampled = packed_parts(
        launch_of(decode(3, 5), *DECODES, is_contiguous=True, num_shared=3)
    )
    assert parts == [
        [55, 23, 0],
        [5, 2, PADDING_ROW],
        [5, 3, 0],
        [0, 0, 0],  # offsets of positions: none
        [0, 0, 0],  # repeated blocks: nothing is shared
        [-1, 0, 1, 0, -1, -1, -1, -1],
        [1, 2, 4, 4, 1, 1, 1, 1],
        [0, 1, 3, 5, 0, 0, 0, 0],
        [1 * 4 + 1, 2 * 4 + 3, 2],
        [],
        [5, 2, PADDING_ROW],
    ]
    assert sampled == [0, 1]


def test_a_prefill_with_context_and_padding():
    """Request 7 continues after 5 tokens and reaches its end; request 5 starts and stops before its
    end.
    """
    parts, sampled = packed_parts(launch_of(prefill(3, 5, 3), (7, 5, 4), (5, 0, 3)))
    assert parts == [
        [75, 76, 77, 78, 0, 50, 51, 52, 0, 0, 0, 0, 0, 0, 0],
        [7, 5, PADDING_ROW],
        [5, 6, 7, 8, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0],
        [3, 7, 0],  # indices of the last tokens
        [4, 3, 0],  # query lengths
        [5, 0, 0],  # context lengths
        [4, 6, 0, 0, 0, 0, 0, 0, 0],  # context blocks
        [25, 26, 27, 20, 0, 12, 13, 14, 0, 1, 2, 3, 0, 1, 2],  # slots; padding is in the null block
        [],  # last keys: no token sees a later token
        [7, PADDING_ROW, PADDING_ROW],
    ]
    assert sampled == [0]


def test_a_merged_prefill_has_all_prompts_in_one_row():
    launch = launch_of(prefill(1, 9, 3), (7, 5, 4), (5, 0, 3), merged_prompts=3)
    parts, sampled = packed_parts(launch)
    assert parts == [
        [75, 76, 77, 78, 50, 51, 52, 0, 0],
        [],  # offsets of positions: none
        [0, 0, 0, 0, 1, 1, 1, -1, -1],  # the request of each token
        [5, 6, 7, 8, 0, 1, 2, 0, 0],
        [25, 26, 27, 20, 12, 13, 14, 3, 0],  # slots of the new tokens
        [3, 6, 0],  # indices of the last tokens
        [4, 6, 0],  # context blocks
        [0, 0, -1],
        [0, 4, 0],  # position of the first slot of each context block
        [4, 1, 0],  # number of tokens in each context block
        [],  # last keys: no token sees a later token
        [7, PADDING_ROW, PADDING_ROW],
    ]
    assert sampled == [0]


def test_pieces_of_a_prompt_in_one_launch_sample_once():
    parts, sampled = packed_parts(launch_of(prefill(2, 5, 2), (7, 0, 5), (7, 5, 4)))
    assert parts[0] == [70, 71, 72, 73, 74, 75, 76, 77, 78, 0]
    assert parts[-1] == [PADDING_ROW, 7]
    assert sampled == [1]


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (PaddedShape(decode(3, 8)), (3, 3, 3, 3, 8, 8, 8, 8, 3, 0, 3)),
        (PaddedShape(decode(3, 8), is_contiguous=True), (3, 3, 3, 3, 0, 8, 8, 8, 3, 0, 3)),
        (
            PaddedShape(decode(3, 8), is_contiguous=True, num_shared=3),
            (3, 3, 3, 3, 3, 11, 11, 11, 3, 0, 3),
        ),
        (PaddedShape(decode(3, 8, 2)), (6, 3, 6, 3, 8, 8, 8, 8, 6, 9, 6)),
        (PaddedShape(prefill(2, 8)), (16, 2, 16, 2, 2, 2, 0, 16, 0, 2)),
        (PaddedShape(prefill(2, 8, 5)), (16, 2, 16, 2, 2, 2, 10, 16, 0, 2)),
        (PaddedShape(prefill(1, 8, 5), merged_prompts=3), (8, 0, 8, 8, 8, 3, 5, 5, 5, 5, 0, 3)),
    ],
)
def test_sizes_depend_on_the_shape_and_padding_alone_is_a_launch(shape, sizes):
    slots = shape.bucket.query_len if shape.merged_prompts else shape.bucket.batch
    assert input_sizes(shape) == (*sizes[:-1], slots, sizes[-1])
    kind = {f: getattr(shape, f) for f in ("is_contiguous", "merged_prompts", "num_shared")}
    parts, sampled = packed_parts(launch_of(shape.bucket, **kind))
    assert [len(part) for part in parts] == list(sizes)
    assert parts[-1] == [PADDING_ROW] * sizes[-1]
    assert sampled == []


# ---- tokens that are still on the device ---------------------------------------------------------


def sampled_on_device() -> tuple[InputBatch, HPUInputBuilder]:
    """Return a batch in which requests 5 and 2 have sampled a token, which the host knows
    already.
    """
    batch = filled_batch()
    builder = HPUInputBuilder(batch, SIZE)
    builder.mark_sampled(int_array(5, 2))
    batch.record(batch.expect(int_array(5, 2)), int_array(56, 24))
    return batch, builder


def token_ids(builder: HPUInputBuilder, *rows: tuple[int, int, int]) -> list[int]:
    return packed_parts(launch_of(decode(len(rows), 8), *rows), builder)[0][0]


def test_the_newest_token_is_taken_from_the_device():
    _, builder = sampled_on_device()
    assert token_ids(builder, (5, 6, 1), (2, 4, 1), (7, 8, 1)) == [RESIDENT, RESIDENT, 78]


def test_older_tokens_come_from_the_host():
    _, builder = sampled_on_device()
    assert token_ids(builder, (5, 5, 1), (2, 4, 1)) == [55, RESIDENT]


def test_a_new_request_in_a_row_has_nothing_on_the_device():
    batch, builder = sampled_on_device()
    batch.update(step([new_request(5, [1, 2], output=[3], blocks=[3])], freed=[5]))
    builder.place([5])
    assert token_ids(builder, (5, 2, 1), (2, 4, 1)) == [3, RESIDENT]


# ---- positions that requests specify -------------------------------------------------------------


def rows_with_positions(num_positions: int) -> PositionRows:
    """Return a batch in which request 7 gives positions for 9 prompt tokens, and request 5 for
    three.
    """
    rows = PositionRows(SimpleNamespace(num_positions=num_positions), 8, torch.device("cpu"))
    for row, count, offset in ((7, 9, -2), (5, 3, 4)):
        positions = 10 * row + np.arange(num_positions * count, dtype="<i4")
        given = TokenPositions(data=positions.tobytes(), offset=offset)
        request = SimpleNamespace(positions=given, prompt_token_ids=[0] * count)
        rows.add(SimpleNamespace(row=row, request=request))
    return rows


def test_a_decode_adds_an_offset_and_a_prefill_has_the_positions():
    builder = HPUInputBuilder(filled_batch(), SIZE, positions=rows_with_positions(2))
    launch = launch_of(decode(3, 8), *DECODES)
    given = unpack_decode(torch.from_numpy(builder.pack(launch)[0]), launch.shape)
    assert given.indices.tolist() == [5, 3, 0]
    assert given.position_offsets.tolist() == [4, 0, 0]

    launch = launch_of(prefill(3, 5, 3), (7, 5, 4), (5, 2, 3))
    given = unpack_prefill(torch.from_numpy(builder.pack(launch)[0]), launch.shape, 2)
    assert given.positions.tolist() == [
        [75, 76, 77, 78, 0, 52, 7, 8, 0, 0, 0, 0, 0, 0, 0],
        [84, 85, 86, 87, 0, 55, 7, 8, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert given.metadata.context_lens.tolist() == [5, 2, 0]

    launch = launch_of(prefill(1, 9, 3), (7, 5, 4), (5, 2, 3), merged_prompts=3)
    given = unpack_merged(torch.from_numpy(builder.pack(launch)[0]), launch.shape, 2)
    assert given.positions.tolist() == [
        [75, 76, 77, 78, 52, 7, 8, 0, 0],
        [84, 85, 86, 87, 55, 7, 8, 0, 0],
    ]
    assert given.metadata.positions.tolist() == [5, 6, 7, 8, 2, 3, 4, 0, 0]


def test_tokens_at_positions_of_their_own_are_no_decodes():
    rows = rows_with_positions(2)
    asked = int_array(7, 7, 5, 5, 2), int_array(8, 9, 2, 3, 0)
    assert rows.needs_prefill(*asked).tolist() == [True, False, True, False, False]
    rows.remove(7), rows.remove(5)
    assert rows.needs_prefill(*asked) is None
    assert not rows.offsets.any()


# ---- results from the device ---------------------------------------------------------------------


def on_device(launch: PaddedLaunch) -> torch.Tensor:
    packed, _ = HPUInputBuilder(filled_batch(), SIZE).pack(launch)
    return torch.from_numpy(packed)


def test_a_decode_is_split_into_its_parts():
    launch = launch_of(decode(3, 8), *DECODES)
    given = unpack_decode(on_device(launch), launch.shape)
    assert given.token_ids.tolist() == [55, 23, 0]
    assert given.rows.tolist() == [5, 2, PADDING_ROW]
    assert given.indices.tolist() == [5, 3, 0]
    assert given.position_offsets.tolist() == [0, 0, 0]
    assert given.metadata.block_list.tolist() == [3, 1, 2, 0, 0, 0, 0, 0]
    assert given.metadata.block_groups.tolist() == [0, 0, 1, -1, -1, -1, -1, -1]
    assert given.metadata.block_usage.tolist() == [4, 2, 4, 1, 1, 1, 1, 1]
    assert given.metadata.block_age.tolist() == [5, 1, 3, 0, 0, 0, 0, 0]
    assert given.metadata.slot_mapping.tolist() == [5, 11, 2]


def test_a_prefill_is_split_into_its_parts():
    launch = launch_of(prefill(2, 5, 3), (7, 5, 4))
    given = unpack_prefill(on_device(launch), launch.shape)
    assert given.token_ids.tolist() == [75, 76, 77, 78, 0, 0, 0, 0, 0, 0]
    assert given.positions.tolist() == [[5, 6, 7, 8, 0, 0, 0, 0, 0, 0]]
    assert given.last_tokens.tolist() == [3, 0]
    assert given.metadata.query_lens.tolist() == [4, 0]
    assert given.metadata.context_lens.tolist() == [5, 0]
    assert given.metadata.context_blocks.tolist() == [[4, 6, 0], [0, 0, 0]]
    assert given.metadata.slot_mapping.tolist() == [[25, 26, 27, 20, 0], [1, 2, 3, 0, 1]]


def test_a_merged_prefill_is_split_into_its_parts():
    launch = launch_of(prefill(1, 5, 3), (7, 5, 4), merged_prompts=2)
    given = unpack_merged(on_device(launch), launch.shape)
    assert given.token_ids.tolist() == [75, 76, 77, 78, 0]
    assert {name: part.tolist() for name, part in vars(given.metadata).items()} == {
        "sequence_ids": [0, 0, 0, 0, -1],
        "positions": [5, 6, 7, 8, 0],
        "slot_mapping": [25, 26, 27, 20, 0],
        "last_token_indices": [3, 0],
        "context_blocks": [4, 6, 0],
        "context_groups": [0, 0, -1],
        "context_starts": [0, 4, 0],
        "context_usage": [4, 1, 0],
        "last_keys": [],
    }
