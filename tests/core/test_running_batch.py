import numpy as np

from tests.core.helpers import make_request
from vllm.core.running_batch import RunningBatch
from vllm.request import Request, RequestStatus


def make_entry(key: int, **kwargs) -> Request:
    return Request(make_request(str(key), 3, **kwargs), (key,))


def test_rows_are_given_and_order_follows_the_keys():
    batch = RunningBatch(3)
    for key in (5, 9, 7):
        batch.add(make_entry(key), 0, 4)
    assert batch.is_full
    assert [r.request_id for r in batch.requests] == ["5", "7", "9"]
    assert batch.last.request_id == "9"
    assert [r.request_id for r in batch.at(batch.order)] == ["5", "7", "9"]
    assert sorted(batch.order.tolist()) == [0, 1, 2]


def test_a_row_holds_nothing_of_its_last_request():
    batch = RunningBatch(1)
    first = make_entry(1, eos=7, stop=[8], prompt_logprobs=0)
    batch.add(first, 2, 16)
    batch.num_tokens[0] += 5
    batch.remove([first])
    assert (first.row, len(batch), batch.num_prompt_logprobs) == (-1, 0, 0)
    batch.add(make_entry(2, max_tokens=9), 1, 4)
    row = [a[0] for a in (batch.num_tokens, batch.num_computed, batch.capacity, batch.limit)]
    assert row == [3, 1, 4, 12]
    assert (batch.eos[0], batch.has_stop_tokens[0]) == (-1, False)


def test_the_order_is_one_array_until_somebody_comes_or_goes():
    batch = RunningBatch(4)
    first, second = make_entry(1), make_entry(2)
    batch.add(first, 0, 4)
    before = batch.order
    assert batch.order is before
    batch.add(second, 0, 4)
    both = batch.order
    assert both is not before and before.tolist() == [first.row], "it is read-only"
    gone = first.row
    batch.remove([first])
    assert batch.order.tolist() == [second.row] != [gone]
    assert batch.order.dtype == np.int32


def test_removing_does_not_touch_the_status():
    batch = RunningBatch(2)
    request = make_entry(1)
    batch.add(request, 0, 4)
    batch.remove([request])
    assert request.status is RequestStatus.RUNNING
