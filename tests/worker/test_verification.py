"""Test which sampled tokens are accepted, and the batch arrays of requests with drafts."""

import numpy as np
import pytest

from tests.worker.test_input_batch import int_array, new_request, step
from vllm.messages import SchedulerOutput
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.batch.verification import count_accepted


@pytest.mark.parametrize(
    ("sampled", "drafts", "count"),
    [
        ([5], [], 1),
        ([5, 6, 7], [5, 6], 3),
        ([5, 6, 7], [5, 9], 2),
        ([5, 6, 7], [9, 6], 1),
        ([-1], [], 1),
        ([-1, 6, 7], [5, 6], 1),
        ([5, -1, 7], [5, 6], 1),  # the failed position runs again in the next step, and fails there
        ([5, 6, -1], [5, 6], 2),
        ([5, 6, -1], [5, 9], 2),
    ],
)
def test_tokens_count_up_to_the_first_that_is_not_its_draft(sampled, drafts, count):
    for before, behind in (([], []), ([([1, 2], [1])], [([3], [])])):
        rows = [*before, (sampled, drafts), *behind]
        host_ids = int_array(*(t for tokens, _ in rows for t in tokens))
        draft_ids = int_array(*(t for _, guess in rows for t in guess))
        num_drafts = int_array(*(len(guess) for _, guess in rows))
        assert count_accepted(host_ids, draft_ids, num_drafts)[len(before)] == count


def draft_step(rows: dict[int, list[int]], **changes) -> SchedulerOutput:
    """Return a step with one token and drafts for each row."""
    fields = {
        "rows": int_array(*rows),
        "num_draft_tokens": int_array(*map(len, rows.values())),
        "draft_token_ids": int_array(*(t for guess in rows.values() for t in guess)),
    }
    base = step()
    values = {name: getattr(base, name) for name in base.__struct_fields__}
    return SchedulerOutput(**{**values, **fields, **changes})


def test_drafts_stand_behind_the_known_tokens_until_the_result_is_there():
    batch = InputBatch(max_num_seqs=3, max_model_len=32, max_blocks=8)
    batch.update(step([new_request(r, [1, 2, 3], blocks=[r + 1]) for r in range(3)]))
    batch.update(draft_step({0: [], 2: [7, 8], 1: [9]}))
    assert batch.num_tokens.tolist() == [3, 3, 3]
    assert batch.token_ids[2, :5].tolist() == [1, 2, 3, 7, 8]
    rows, num_drafts = int_array(0, 2, 1), int_array(0, 2, 1)
    expected = batch.expect(rows, num_drafts)
    assert batch.num_tokens.tolist() == [4, 5, 6]
    assert expected.draft_ids.tolist() == [7, 8, 9]
    counts = int_array(1, 2, 0)
    known, tokens = batch.record(expected, int_array(4, 7, 6), counts)
    assert known.tolist() == [0, 2, 2] and tokens.tolist() == [4, 7, 6]
    assert batch.num_tokens.tolist() == [4, 3, 5]
    assert batch.token_ids[2, :5].tolist() == [1, 2, 3, 7, 6]


def test_the_result_of_drafts_does_not_reach_the_next_owner_of_a_row():
    batch = InputBatch(max_num_seqs=2, max_model_len=32, max_blocks=8)
    batch.update(step([new_request(r, [1, 2], blocks=[r + 1]) for r in range(2)]))
    batch.update(draft_step({0: [7], 1: [8]}))
    expected = batch.expect(int_array(0, 1), int_array(1, 1))
    batch.update(step([new_request(0, [5, 5, 5, 5], blocks=[3])], freed=[0]))
    batch.record(expected, int_array(7, 9, 6), int_array(2, 1))
    assert batch.num_tokens.tolist() == [4, 3]
    assert batch.token_ids[0, :4].tolist() == [5, 5, 5, 5]
    assert batch.token_ids[1, :3].tolist() == [1, 2, 6]


def test_a_shortened_table_grows_again_from_its_new_end():
    batch = InputBatch(max_num_seqs=1, max_model_len=32, max_blocks=8)
    batch.update(step([new_request(0, [1], blocks=[4, 5, 6])]))
    grown = draft_step(
        {0: []}, shortened_tables=[(0, 1)], block_rows=int_array(0), block_ids=int_array(9)
    )
    batch.update(grown)
    assert batch.block_table[0, : batch.num_blocks[0]].tolist() == [4, 9]
    assert np.array_equal(batch.num_blocks, [2])
