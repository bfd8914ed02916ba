"""Test when the rest of a warm-up runs in an engine that is never idle, with a simulated clock."""

import pytest

from vllm.engine.background_warm_up import BackgroundWarmUp
from vllm.worker.interface import WarmUpStep

STEP_S = 0.02


class FakeSteps:
    """Parts of a warm-up that take the given times.

    Attributes:
        left: seconds of each part.
        now: simulated time.
        ran: for each part, the time of its end and its duration.
    """

    def __init__(self, seconds, lateness: float = 1.0) -> None:
        self.left, self.total, self.lateness = list(seconds), len(seconds), lateness
        self.now = 0.0
        self.ran: list[tuple[float, float]] = []
        self.num_named = 0
        self._named: float | None = None

    def name(self, longest_s=None):
        self.num_named += 1
        if not self.left:
            return None
        short = [s for s in self.left if longest_s is None or s <= longest_s]
        self._named = (short or self.left)[0]
        return WarmUpStep(
            phase="warm-up",
            name="part",
            index=1,
            total=self.total,
            expected_s=self._named,
            eta_seconds=sum(self.left),
            must_wait=not short,
            num_warm=self.total - len(self.left),
            num_wanted=self.total,
            padded_share=0.25,
        )

    def run(self):
        self.left.remove(self._named)
        self.now += self._named * self.lateness
        self.ran.append((self.now, self._named * self.lateness))

    def time(self) -> float:
        return self.now


def run_loaded(warm_up: BackgroundWarmUp, steps: FakeSteps, seconds: float) -> None:
    """Run steps of an engine that always has requests."""
    end = steps.now + seconds
    while steps.now < end and not warm_up.is_done:
        if warm_up.is_due():
            warm_up.run_due()
        steps.now += STEP_S


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 1.0])
def test_constant_load_does_not_starve_it_and_it_takes_its_share_at_most(share):
    steps = FakeSteps([0.4, 0.9, 0.1, 0.3] * 5)
    warm_up = BackgroundWarmUp(steps, share, 1.0, steps.time)
    run_loaded(warm_up, steps, 2000.0)
    assert warm_up.is_done and len(steps.ran) == 20
    spent = 0.0
    for end, seconds in steps.ran:
        spent += seconds
        assert spent <= share * end + 1e-9
    # The warm-up also ends nearly as early as the share allows.
    assert steps.now == pytest.approx(spent / share, rel=0.1)
    assert warm_up.stats.longest_delay_s == pytest.approx(0.9)
    assert not warm_up.stats.is_warming and warm_up.stats.num_warm == 20


def test_what_takes_longer_than_expected_is_paid_back():
    steps = FakeSteps([0.5] * 10, lateness=4.0)
    warm_up = BackgroundWarmUp(steps, 0.1, 1.0, steps.time)
    run_loaded(warm_up, steps, 1000.0)
    spent = 0.0
    for end, seconds in steps.ran:
        assert spent <= 0.1 * (end - seconds) + 1e-9
        spent += seconds
    assert warm_up.is_done and warm_up.stats.longest_delay_s == pytest.approx(2.0)


def test_long_parts_wait_for_a_time_without_requests_and_a_line_says_so_once():
    steps = FakeSteps([0.2, 7.0, 0.3, 30.0])
    warm_up = BackgroundWarmUp(steps, 0.1, 1.0, steps.time)
    run_loaded(warm_up, steps, 590.0)
    assert [seconds for _, seconds in steps.ran] == [0.2, 0.3]
    assert steps.num_named < 70  # the warm-up does not ask for the next part before each step
    assert warm_up.cold_line() is None
    run_loaded(warm_up, steps, 30.0)
    line = warm_up.cold_line()
    assert line == (
        "warm-up: 2 buckets cannot be warmed up under this load: one part takes about 7.0 s, but "
        "it may delay requests by at most 1 s (--warm-up-max-delay). Padding is 25.0% of the "
        "device time of the traffic so far. Raise --warm-up-max-delay, leave the server without "
        "requests for a while, or start it with --ready-when all"
    )
    assert warm_up.cold_line() is None

    warm_up.run_idle()
    assert [seconds for _, seconds in steps.ran][2:] == [7.0]
    run_loaded(warm_up, steps, 100.0)  # the warm-up runs while requests arrive
    assert len(steps.left) == 1 and warm_up.stats.longest_delay_s == pytest.approx(0.3)
    while not warm_up.is_done:
        warm_up.run_idle()
    assert not steps.left


def test_time_without_requests_buys_no_time_under_load():
    steps = FakeSteps([0.5] * 40)
    warm_up = BackgroundWarmUp(steps, 0.1, 1.0, steps.time)
    run_loaded(warm_up, steps, 1.0)
    warm_up.note_idle()
    steps.now += 10_000.0
    began, num_before = steps.now, len(steps.ran)
    run_loaded(warm_up, steps, 20.0)
    spent = sum(seconds for _, seconds in steps.ran[num_before:])
    assert 0 < spent <= 0.1 * (steps.now - began + 1.0) + 1e-9


def test_a_short_load_after_idle_parts_gets_its_share():
    steps = FakeSteps([0.1] * 10)
    warm_up = BackgroundWarmUp(steps, 0.1, 1.0, steps.time)
    for _ in range(3):
        warm_up.run_idle()
    run_loaded(warm_up, steps, 4.5)
    assert len(steps.ran) == 3 + 4


def test_without_a_share_it_runs_only_without_requests():
    steps = FakeSteps([0.1, 0.1])
    warm_up = BackgroundWarmUp(steps, 0.0, 1.0, steps.time)
    # Without a share, the workers need not name a part before they are idle.
    assert steps.num_named == 0
    run_loaded(warm_up, steps, 100.0)
    assert not steps.ran
    warm_up.run_idle()
    assert len(steps.ran) == 1


def test_the_seconds_that_are_left_go_by_the_load():
    steps = FakeSteps([0.5] * 4)
    warm_up = BackgroundWarmUp(steps, 0.1, 1.0, steps.time)
    assert warm_up.stats.seconds_left == pytest.approx(2.0)
    run_loaded(warm_up, steps, 0.1)
    assert warm_up.stats.seconds_left == pytest.approx(20.0)


def test_time_in_which_all_parts_were_too_long_is_not_saved_up():
    steps = FakeSteps([7.0] * 30)
    warm_up = BackgroundWarmUp(steps, 0.1, 1.0, steps.time)
    run_loaded(warm_up, steps, 3600.0)
    # Parts take 0.3 s, as the warm-up learned from one that ran without requests.
    steps.left = [0.3] * 30
    began = steps.now
    run_loaded(warm_up, steps, 20.0)
    assert 1.0 < sum(seconds for _, seconds in steps.ran) <= 0.1 * (steps.now - began) + 1.0


def test_without_a_share_a_part_that_has_run_is_finished_before_the_next_request_runs():
    steps = FakeSteps([0.1, 0.1])
    warm_up = BackgroundWarmUp(steps, 0.0, 1.0, steps.time)
    warm_up.run_idle()
    assert warm_up.is_due()
    warm_up.run_due()
    assert not warm_up.is_due() and (steps.num_named, len(steps.ran)) == (2, 1)
    assert warm_up.stats.num_warm == 1
    warm_up.run_idle()
    assert len(steps.ran) == 2 and steps.num_named == 2
