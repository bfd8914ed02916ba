"""Test which parts of a worker sleep, with parts that record their calls."""

import pytest

from vllm.errors import RequestError
from vllm.worker.sleep import Sleep


class Part:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.error: Exception | None = None

    def release(self, *, keep: bool) -> None:
        self.calls.append("keep" if keep else "drop")

    def restore(self) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append("restore")


@pytest.fixture
def parts() -> dict[str, Part]:
    return {"weights": Part(), "kv_cache": Part()}


@pytest.mark.parametrize(
    ("does", "weights", "cache", "sleeping"),
    [
        ([1], ["keep"], ["drop"], ["weights", "kv_cache"]),
        ([2], ["drop"], ["drop"], ["weights", "kv_cache"]),
        ([1, 1], ["keep"], ["drop"], ["weights", "kv_cache"]),
        ([1, 2], ["keep", "drop"], ["drop", "drop"], ["weights", "kv_cache"]),
        ([2, 1], ["drop"], ["drop"], ["weights", "kv_cache"]),
        ([1, None], ["keep", "restore"], ["drop", "restore"], []),
        ([1, ["weights"]], ["keep", "restore"], ["drop"], ["kv_cache"]),
        ([1, ["kv_cache"], "weights"], ["keep", "restore"], ["drop", "restore"], []),
        ([1, ["weights"], 2], ["keep", "restore", "drop"], ["drop"] * 2, ["weights", "kv_cache"]),
        ([1, []], ["keep"], ["drop"], ["weights", "kv_cache"]),
        ([None], [], [], []),
    ],
)
def test_parts_sleep_and_wake_up_as_they_are_told(parts, does, weights, cache, sleeping):
    sleep = Sleep(parts)
    for what in does:
        if isinstance(what, int):
            sleep.sleep(what)
        else:
            sleep.wake_up(what)
    assert parts["weights"].calls == weights and parts["kv_cache"].calls == cache
    assert sleep.tags == sleeping


@pytest.mark.parametrize("level", [0, 3, True, "1", None])
def test_there_are_two_levels(parts, level):
    with pytest.raises(RequestError, match=r"must be 1 .* or 2"):
        Sleep(parts).sleep(level)
    assert not parts["weights"].calls


def test_an_unknown_tag_wakes_nothing(parts):
    sleep = Sleep(parts)
    sleep.sleep(1)
    with pytest.raises(RequestError, match="'cache': it must be one of weights, kv_cache"):
        sleep.wake_up(["weights", "cache"])
    assert sleep.tags == ["weights", "kv_cache"]


def test_a_part_that_cannot_come_back_still_sleeps(parts):
    sleep = Sleep(parts)
    sleep.sleep(1)
    parts["weights"].error = OSError("the disk has gone")
    with pytest.raises(OSError, match="the disk"):
        sleep.wake_up(None)
    assert sleep.tags == ["weights", "kv_cache"]
