import random
import weakref

import pytest

from tests.core.helpers import make_request
from vllm.core.request_queue import RequestQueue
from vllm.request import Request, RequestStatus


def make_entries(*keys: float) -> list[Request]:
    return [Request(make_request(str(key)), (key,)) for key in keys]


def test_the_smallest_key_comes_first_whenever_it_was_pushed():
    queue = RequestQueue()
    for request in make_entries(3, 1, 2):
        queue.push(request)
    assert queue.peek().request_id == "1"
    assert [queue.pop().request_id for _ in range(3)] == ["1", "2", "3"]
    assert not queue


def test_a_discarded_request_never_comes_up():
    queue = RequestQueue()
    first, second = make_entries(1, 2)
    queue.push(first)
    queue.push(second)
    queue.discard(first)
    assert first.status is RequestStatus.FINISHED
    assert (len(queue), list(queue), queue.peek()) == (1, [second], second)
    queue.discard(second)
    assert not queue


def test_discarded_requests_do_not_pile_up():
    class Traced(Request):  # has no slots, so that a weak reference can be made
        pass

    queue = RequestQueue()
    first, *others = (Traced(make_request(str(key)), (key,)) for key in range(1000))
    for request in (first, *others):
        queue.push(request)
    alive = weakref.WeakSet(others)
    while others:
        queue.discard(others.pop())
    assert len(alive) < 100
    assert queue.pop() is first


@pytest.mark.parametrize("seed", range(10))
def test_any_use_gives_the_requests_that_are_left_in_order(seed):
    rng = random.Random(seed)
    queue = RequestQueue()
    inside: list[Request] = []
    for key in rng.sample(range(10_000), 400):
        draw = rng.random()
        if draw < 0.6 or not inside:
            (request,) = make_entries(key)
            inside.append(request)
            queue.push(request)
        elif draw < 0.8:
            queue.discard(inside.pop(rng.randrange(len(inside))))
        else:
            request = min(inside, key=lambda r: r.sort_key)
            assert queue.pop() is request
            inside.remove(request)
        assert len(queue) == len(inside)
        assert {r.request_id for r in queue} == {r.request_id for r in inside}
