"""Test the builders of padded forward passes: worked examples, refused inputs, and no lost
tokens.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.attention.backends.hpu_metadata import (
    HPUDecodeMetadata,
    build_decode_metadata,
    build_prefill_metadata,
    count_decode_blocks,
)
from vllm.messages import NULL_BLOCK_ID


@st.composite
def decodes(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Draw block tables (with shared prefixes), lengths (0 for padded requests), and the block
    size.
    """
    block_size = draw(st.sampled_from([1, 4, 16, 128]))
    lengths = np.array(draw(st.lists(st.integers(0, 6 * block_size), min_size=1, max_size=8)))
    ids = draw(st.permutations(range(1, 6 * len(lengths) + 1)))
    tables = np.array(ids).reshape(len(lengths), 6)
    # Let several tables share a block, at the same index of each table.
    for row in range(1, len(lengths)):
        tables[row, : draw(st.integers(0, 6))] = -1
        tables[row] = np.where(tables[row] < 0, tables[row - 1], tables[row])
    return tables, lengths, block_size


def entries(launch: HPUDecodeMetadata) -> list[tuple[int, int, int, int]]:
    """Return (request, block, age, usage) of every entry that is not padding, as the device reads
    them.
    """
    num_sliced = len(launch.block_groups) - len(launch.block_list)
    blocks = [*range(num_sliced), *launch.block_list.tolist()]
    rows = zip(
        launch.block_groups.tolist(),
        blocks,
        launch.block_age.tolist(),
        launch.block_usage.tolist(),
        strict=True,
    )
    return [entry for entry in rows if entry[0] >= 0]


def test_worked_example_of_a_plain_decode():
    launch = build_decode_metadata([[3, 1], [2, 0]], [6, 4], 2, 8, block_size=4)
    assert launch.block_list.tolist() == [3, 1, 2, 0, 0, 0, 0, 0]
    assert launch.block_groups.tolist() == [0, 0, 1, -1, -1, -1, -1, -1]
    assert launch.block_usage.tolist() == [4, 2, 4, 1, 1, 1, 1, 1]
    assert launch.slot_mapping.tolist() == [5, 11]


def test_worked_example_of_a_contiguous_decode():
    launch = build_decode_metadata([[3, 1], [2, 0]], [6, 4], 2, 8, 4, padded_shared=0)
    assert launch.block_list.tolist() == []
    assert launch.block_groups.tolist() == [-1, 0, 1, 0, -1, -1, -1, -1]
    assert launch.block_usage.tolist() == [1, 2, 4, 4, 1, 1, 1, 1]
    assert launch.slot_mapping.tolist() == [5, 11]


def test_second_reference_to_a_shared_block_is_gathered():
    launch = build_decode_metadata([[3, 1], [3, 2]], [6, 7], 2, 4, 4, padded_shared=2)
    assert launch.block_groups.tolist() == [-1, 0, 1, 0, 1, -1]
    assert launch.block_list.tolist() == [3, NULL_BLOCK_ID]


def test_contiguous_launch_without_room_for_shared_blocks_is_refused():
    tables, lengths = [[3, 1], [3, 2], [3, 4]], [6, 7, 8]
    counts = count_decode_blocks(tables, lengths, 4)
    assert (counts.references, counts.span, counts.shared) == (6, 5, 2)
    with pytest.raises(ValueError, match="2 extra references to shared blocks"):
        build_decode_metadata(tables, lengths, 4, 8, 4, padded_shared=1)
    with pytest.raises(ValueError, match="block ids up to 4"):
        build_decode_metadata(tables, lengths, 4, 4, 4, padded_shared=2)


def test_slots_of_padded_rows_differ():
    launch = build_decode_metadata([[7], [0], [9]], [3, 0, 1], 6, 8, 4)
    assert launch.slot_mapping.tolist() == [30, 1, 36, 3, 0, 1]


def test_launch_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="2 requests does not fit a bucket of 1"):
        build_decode_metadata([[1], [2]], [1, 1], 1, 8, 4)
    with pytest.raises(ValueError, match="3 block references do not fit a bucket of 2"):
        build_decode_metadata([[3, 1], [2, 0]], [6, 4], 2, 2, 4)
    with pytest.raises(ValueError, match="block_tables must be"):
        build_decode_metadata([[3, 1], [2, 0]], [9, 4], 2, 8, 4)
    with pytest.raises(ValueError, match="1 requests with up to 5 new tokens and 1 context blocks"):
        build_prefill_metadata([[1, 2]], [3], [5], 1, 5, 0, 4)
    with pytest.raises(ValueError, match="block_tables must be"):
        build_prefill_metadata([[1]], [3], [5], 1, 5, 1, 4)


@settings(max_examples=150, deadline=None)
@given(decodes(), st.none() | st.integers(0, 3), st.integers(0, 5))
def test_every_position_of_every_row_is_listed_once(decode, shared_room, spare):
    tables, lengths, block_size = decode
    counts = count_decode_blocks(tables, lengths, block_size)
    is_contiguous = shared_room is not None
    launch = build_decode_metadata(
        tables,
        lengths,
        len(lengths) + spare,
        (counts.span if is_contiguous else counts.references) + spare,
        block_size,
        padded_shared=counts.shared + shared_room if is_contiguous else None,
    )
    listed = []
    for row, block, age, usage in entries(launch):
        index, rest = divmod(lengths[row] - 1 - age, block_size)
        assert rest == 0
        assert block == tables[row, index]
        assert usage == min(block_size, age + 1)
        listed += [(row, index * block_size + t) for t in range(usage)]
    assert sorted(listed) == [
        (row, position) for row, length in enumerate(lengths) for position in range(length)
    ]
    for row, slot in enumerate(launch.slot_mapping.tolist()):
        block, offset = divmod(slot, block_size)
        if row < len(lengths) and lengths[row]:
            assert block == tables[row, (lengths[row] - 1) // block_size]
            assert offset == (lengths[row] - 1) % block_size
        else:
            assert block == NULL_BLOCK_ID


@settings(max_examples=100, deadline=None)
@given(decodes(), st.data(), st.integers(0, 3))
def test_prefill_has_all_context_and_a_slot_for_every_new_token(decode, data, spare):
    tables, lengths, block_size = decode
    contexts = np.array([data.draw(st.integers(0, length)) for length in lengths.tolist()])
    queries = lengths - contexts
    num_context = max(-(-contexts // block_size)) + spare
    launch = build_prefill_metadata(
        tables,
        contexts,
        queries,
        len(lengths) + spare,
        max(queries) + spare,
        num_context,
        block_size,
    )
    assert launch.query_lens.tolist() == [*queries, *[0] * spare]
    assert launch.context_lens.tolist() == [*contexts, *[0] * spare]
    for row in range(len(lengths) + spare):
        context, query = launch.context_lens[row], launch.query_lens[row]
        used = -(-context // block_size)
        assert launch.context_blocks[row, used:].tolist() == [NULL_BLOCK_ID] * (num_context - used)
        if row < len(lengths):
            assert launch.context_blocks[row, :used].tolist() == tables[row, :used].tolist()
        blocks, offsets = np.divmod(launch.slot_mapping[row], block_size)
        position = np.arange(context, context + query)
        assert (blocks[:query] == tables[min(row, len(lengths) - 1), position // block_size]).all()
        assert (offsets[:query] == position % block_size).all()
        assert (blocks[query:] == NULL_BLOCK_ID).all()
