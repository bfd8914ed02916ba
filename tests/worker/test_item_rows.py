"""Test slots of items, and which tokens of a batch see them."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from tests.whole_items import WholeItems
from tests.worker.test_input_batch import int_array, new_request
from vllm.attention import SeenRun
from vllm.distributed import TPGroup
from vllm.messages import END_OF_REQUEST, MediaItem, MediaTensor, RunnerStats, SchedulerOutput
from vllm.worker.batch.launch import Launch
from vllm.worker.parts.encoded_media import EncodedMedia, agreement
from vllm.worker.parts.item_rows import ItemPool, ItemRows

NUM_SLOTS = 10


class Layer:
    """Records what is stored in which slot."""

    num_kv_heads = head_size = 1

    def bind_pool(self, keys, values):
        self.keys = keys

    def store(self, states, slots):
        self.keys[slots, 0] = states


class Ones(WholeItems):
    """An encoder whose hidden states are 1, 2, ..."""

    def encode(self, items):
        return [torch.arange(1.0, len(item["x"]) + 1)[:, None] for item in items]


def item_of(key, count, start=0, end=END_OF_REQUEST):
    x = MediaTensor(name="x", dtype="|u1", shape=(count,), data=bytes(count))
    return MediaItem(
        modality="image", key=key, num_states=count, seen_by=(start, end), tensors=(x,)
    )


def new_with(row, *items):
    new = new_request(row, [0] * 12)
    return msgspec.structs.replace(new, request=msgspec.structs.replace(new.request, media=items))


def step_of(rows, encoded=(), dropped=(), computed=None):
    rows = int_array(*rows)
    return SchedulerOutput(
        step_id=0,
        freed_rows=[],
        new_requests=[],
        rows=rows,
        num_computed_tokens=np.zeros_like(rows) if computed is None else int_array(*computed),
        num_scheduled_tokens=np.ones_like(rows),
        block_rows=int_array(),
        block_ids=int_array(),
        encoded_media=[(row, index, 0, 1) for row, index in encoded],
        dropped_media=list(dropped),
    )


@pytest.fixture
def made():
    layer = Layer()
    pool = ItemPool([layer])
    allocate = SimpleNamespace(allocate_cache=lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    pool.allocate(NUM_SLOTS, allocate, torch.float32)
    return layer, pool, ItemRows(EncodedMedia(Ones(), 1, pool), pool, 4)


def seen(rows, *scheduled):
    """Return (begin, end, slots) of each series of tokens, for some (batch index, first index,
    number of tokens).
    """
    part = rows.part_of(Launch(*(int_array(*each) for each in zip(*scheduled, strict=True))))
    runs: tuple[SeenRun, ...] = part["items"].runs if part else ()
    return [(run.begin, run.end, run.slots.tolist()) for run in runs]


def test_slots_are_reused_wherever_they_are(made):
    layer, pool, rows = made
    rows.add(new_with(0, item_of("a", 3), item_of("b", 4), item_of("c", 2)))
    rows.begin(step_of([0], encoded=[(0, 0), (0, 1), (0, 2)]))
    assert pool.get("b").tolist() == [3, 4, 5, 6]
    rows.remove(0)
    rows.add(new_with(1, item_of("d", 5), item_of("b", 4)))
    rows.begin(step_of([1], encoded=[(1, 0)], dropped=["a", "c"]))
    assert pool.get("d").tolist() == [0, 1, 2, 7, 8]
    assert layer.keys[:, 0, 0].tolist() == [1, 2, 3, 1, 2, 3, 4, 4, 5, 0]
    assert seen(rows, (1, 0, 2)) == [(0, 2, [0, 1, 2, 7, 8, 3, 4, 5, 6])]
    with pytest.raises(
        ValueError, match="an item needs 2 cross-attention slots, but only 1 are free"
    ):
        pool["e"] = torch.zeros(2, 1)


def test_tokens_see_the_items_of_their_part_of_the_prompt(made):
    _, _, rows = made
    rows.add(new_with(2, item_of("a", 2, 3, 8), item_of("b", 1, 4, 8), item_of("c", 3, 8)))
    rows.add(new_with(1))
    rows.begin(step_of([2, 1], encoded=[(2, 0), (2, 1), (2, 2)]))
    whole = [(3, 4, [0, 1]), (4, 8, [0, 1, 2]), (8, 20, [3, 4, 5])]
    assert seen(rows, (2, 0, 20)) == whole
    for size in range(1, 9):
        found = []
        for first in range(0, 20, size):
            runs = seen(rows, (1, 0, 1), (2, first, min(size, 20 - first)), (0, 0, 1))
            for begin, end, slots in runs:
                found += [(first + token - 1, slots) for token in range(begin, end)]
        assert found == [(t, slots) for begin, end, slots in whole for t in range(begin, end)]
    assert rows.of_output.counts.tolist() == [0, 0, 3, 0]
    assert not seen(rows, (1, 0, 5), (2, 0, 3))
    rows.remove(2)
    assert rows.of_output.counts.tolist() == [0, 0, 0, 0]
    assert not seen(rows, (2, 0, 20))


def test_items_that_only_computed_tokens_see_are_not_looked_up(made):
    _, pool, rows = made
    rows.add(new_with(0, item_of("a", 2, 0, 4), item_of("b", 1, 4)))
    rows.begin(step_of([0], encoded=[(0, 1)], computed=[4]))
    assert "a" not in pool
    assert seen(rows, (0, 4, 2)) == [(0, 2, [0])]


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_an_item_that_cannot_be_encoded_is_an_error_of_its_rows(made, order):
    _, pool, rows = made
    rows.add(new_with(0, item_of("a", NUM_SLOTS + 1)))
    rows.add(new_with(1, item_of("b", 2)))
    rows.begin(step_of([0, 1], encoded=[(row, 0) for row in order]))
    assert "an item needs 11 cross-attention slots" in rows.errors_of(int_array(0, 1))[0]
    assert list(rows.errors_of(int_array(0, 1))) == [0]
    assert seen(rows, (0, 0, 2), (1, 0, 2)) == [(2, 4, [0, 1])]
    assert rows.count(RunnerStats()).num_encoded_items == 1
    pool["c"] = torch.zeros(NUM_SLOTS - 2, 1)  # only b has slots


def test_an_item_that_another_rank_cannot_encode_fails_on_all_ranks(made):
    _, pool, _ = made
    of_other = [[1.0], [1.0, 0.0]]
    two = SimpleNamespace(all_reduce=lambda x: x + torch.tensor(of_other.pop()))
    rows = ItemRows(EncodedMedia(Ones(), 1, pool, agreement(TPGroup(0, 2, two))), pool, 4)
    rows.add(new_with(0, item_of("a", 3)))
    rows.add(new_with(1, item_of("b", 2)))
    rows.begin(step_of([0, 1], encoded=[(0, 0), (1, 0)]))
    assert rows.errors_of(int_array(0, 1)) == {
        1: "an image cannot be encoded: another rank has failed"
    }
    assert "b" not in pool
    assert seen(rows, (0, 0, 1), (1, 0, 1)) == [(0, 1, [0, 1, 2])]
    rows.add(new_with(2, item_of("c", NUM_SLOTS)))
    rows.begin(step_of([2], encoded=[(2, 0)]))
    assert (
        "an item needs 10 cross-attention slots, but only 7 are free"
        in rows.errors_of(int_array(2))[2]
    )
    assert not of_other
    assert agreement(TPGroup()) is None
