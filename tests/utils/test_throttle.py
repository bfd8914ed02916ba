"""Test that background work pauses in proportion to its work, and only while other work is
urgent.
"""

from types import SimpleNamespace

import pytest

from vllm.utils import background_work as pace


@pytest.mark.parametrize(("is_busy", "pauses"), [(True, [0.012, 0.02]), (False, [])])
def test_pauses_are_as_long_as_the_work_before_says(monkeypatch, is_busy, pauses):
    now, slept = [0.0], []
    clock = SimpleNamespace(thread_time=lambda: now[0], sleep=slept.append)
    monkeypatch.setattr(pace, "time", clock)
    own = pace.Throttle(lambda: is_busy)
    # No pause after the first and the third: too little work so far.
    for worked in (0.0003, 0.0007, 0.0001, 0.1):
        now[0] += worked
        own.pause()
    assert slept == pytest.approx(pauses)
