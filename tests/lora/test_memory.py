"""Test adapters in host memory under random loads: holds, pins, drops and failures."""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from vllm.errors import RequestError
from vllm.lora.memory import AdapterMemory
from vllm.messages import AdapterRef

BROKEN = "broken"


class Background:
    """Runs the started work when the test says so, and counts the reads."""

    def __init__(self) -> None:
        self.work, self.reads, self.is_immediate = [], Counter(), False

    def read(self, adapter: AdapterRef) -> str:
        self.reads[adapter.key] += 1
        if adapter.key.startswith(BROKEN):
            raise RuntimeError(f"{adapter.key} is broken")
        return f"content of {adapter.key}"

    def begin(self, work: Callable[[], None]) -> None:
        if self.is_immediate:
            work()
        else:
            self.work.append(work)

    def run(self) -> None:
        while self.work:
            self.work.pop()()


def make_memory(most: int) -> tuple[AdapterMemory, Background]:
    background = Background()
    return AdapterMemory(background.read, most, background.begin), background


def ref(key: str, number: int) -> AdapterRef:
    return AdapterRef(key, "/" + key, key, number)


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_what_is_held_stays_and_everyone_gets_a_turn(most):
    rng = random.Random(most)
    memory, background = make_memory(most)
    keys = [f"a{n}" for n in range(2 * most)] + [BROKEN]
    waiting, granted, pinned = {}, {}, set()
    for step in range(3000):
        number = rng.randrange(len(keys) + 2)
        adapter = ref(keys[number % len(keys)], number + 1)
        kind = rng.random()
        if kind < 0.35:
            future = memory.hold(str(step), adapter)
            (granted if future is None else waiting)[str(step)] = adapter, future
        elif kind < 0.65 and (everyone := [*waiting, *granted]):
            request = rng.choice(everyone)
            memory.release(request)
            waiting.pop(request, None)
            granted.pop(request, None)
        elif kind < 0.72:
            memory.load(adapter)
        elif kind < 0.78:
            memory.unload(adapter.number)
            pinned.discard(adapter.number)
        elif kind < 0.82 and memory.pin(adapter.number):
            pinned.add(adapter.number)
        else:
            background.run()
        for request, (held, future) in list(waiting.items()):
            if not future.done():
                continue
            del waiting[request]
            if held.key == BROKEN:
                assert future.result() == f"{BROKEN} is broken"
                with pytest.raises(RequestError, match="is broken"):
                    memory.held(request)
                memory.release(request)
            else:
                assert future.result() is None
                granted[request] = held, None
        reads = background.reads.total()
        for request, (held, _) in granted.items():
            assert memory.held(request) == f"content of {held.key}"
        assert background.reads.total() == reads, "what is held was read again"
        loaded = memory.keys()
        assert pinned <= set(loaded), "what is pinned was dropped"
        kept = {loaded[number] for number in pinned}
        most_now = max(most, len(kept) + 1, len(kept | {held.key for held, _ in granted.values()}))
        assert len(set(loaded.values())) <= most_now
        assert len([key for key in keys if memory.has(key)]) <= most_now
    assert any(count > 1 for count in background.reads.values()), "nothing was dropped"
    while granted or waiting:
        background.run()
        for request, (held, future) in list(waiting.items()):
            if future.done():
                waiting.pop(request)
                granted[request] = held, None
        assert granted, "those that wait will never run"
        memory.release(granted.popitem()[0])


def test_who_waits_for_room_is_not_passed_by():
    memory, background = make_memory(1)
    assert memory.hold("first", ref("a", 1)) is not None
    background.run()
    blocked = memory.hold("blocked", ref("b", 2))
    late = memory.hold("late", ref("a", 1))
    background.run()
    assert not blocked.done() and not late.done(), "it would be passed by for ever"
    memory.release("first")
    background.run()
    assert blocked.done() and not late.done()
    memory.release("blocked")
    background.run()
    assert late.done() and memory.held("late") == "content of a"


def test_a_caller_that_does_not_wait_gets_what_it_holds():
    """An executor does not wait if its ranks cannot report when they have loaded."""
    memory, background = make_memory(1)
    for request, key in (("first", "a"), ("second", "b")):
        memory.hold(request, ref(key, 1))
    background.is_immediate = True
    background.run()
    assert memory.held("first") == "content of a"


def test_two_numbers_may_have_the_same_files():
    memory, background = make_memory(2)
    for number in (1, 50):
        memory.load(ref("a", number))
        background.run()
        assert memory.load(ref("a", number)) == ""
    assert memory.keys() == {1: "a", 50: "a"} and background.reads["a"] == 1
    assert memory.pin(1) and memory.unload(50)
    assert memory.keys() == {1: "a"} and memory.has("a")
    assert memory.unload(1) and not memory.has("a") and not memory.unload(1)


def test_a_number_may_get_other_files():
    """This happens if the adapter in a folder was trained again."""
    memory, background = make_memory(2)
    for key in ("old", "new"):
        memory.load(ref(key, 1))
        background.run()
        assert memory.load(ref(key, 1)) == ""
    assert memory.keys() == {1: "new"} and not memory.has("old")


def test_a_failure_is_told_once_and_the_files_are_read_again():
    memory, background = make_memory(2)
    for _ in range(2):
        assert memory.load(ref(BROKEN, 1)) is None
        background.run()
        assert memory.load(ref(BROKEN, 1)) == f"{BROKEN} is broken"
    assert background.reads[BROKEN] == 2 and not memory.keys()
