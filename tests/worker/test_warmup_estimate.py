"""Test the estimate of a whole warm-up: plans with a simulated clock, and one start of a simulated
card.
"""

import itertools
import logging
import random

import pytest

from tests.hpu import FEW_BUCKETS, SMALL_ENGINE, captured_log, simulated_hpu
from vllm.bucketing import Phase
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.process import startup_state
from vllm.engine.process.startup_state import StartupState
from vllm.executor import make_executor
from vllm.utils.process import startup_progress
from vllm.worker.hpu.warmup import warmup_estimate
from vllm.worker.hpu.warmup.warmup_estimate import Kind, WarmUpEstimate, Work

STAGES = ("compile", "run", "capture")
MAX_RISE = 4 / 3 + 1e-9


def plan_of(num_buckets: int, num_shapes: int, stages=STAGES) -> list[list[Work]]:
    """Return the steps of a warm-up: in each stage prompts, then decodes, the largest first. A
    capture is one step for all shapes of its bucket.
    """
    steps = []
    for stage in stages:
        for phase, shapes in ((Phase.PREFILL, 1), (Phase.DECODE, num_shapes)):
            for index in range(num_buckets, 0, -1):
                kind = Kind(stage, phase, samples=index % 8 == 0 and stage != "capture")
                works = [Work(kind, 100.0 * index)] * shapes
                steps += [works] if stage == "capture" else [[work] for work in works]
    return steps


def run_plan(steps, seconds_of, gives_up=lambda index: False):
    """Run a plan with a simulated clock.

    Args:
        steps: steps of the warm-up.
        seconds_of: returns the time of a forward pass.
        gives_up: returns whether a step is given up before it runs, with all remaining steps of its
            size.

    Returns:
        For each step the estimate and the time that was left; and when the warm-up was over.
    """
    now = [0.0]
    estimate = WarmUpEstimate(lambda: now[0])
    estimate.plan(work for step in steps for work in step)
    seen, left, index = [], list(steps), 0
    while left:
        step = left.pop(0)
        seen.append((now[0], estimate.begin(step)))
        is_lost = gives_up(index)
        if not is_lost:
            now[0] += sum(seconds_of(work) for work in step)
        estimate.end(has_run=not is_lost)
        if is_lost:
            (cost,) = {work.cost for work in step}
            phase = step[0].kind.phase
            left = [s for s in left if (s[0].cost, s[0].kind.phase) != (cost, phase)]
            estimate.plan(work for s in left for work in s)
        index += 1
    return [(eta, now[0] - when) for when, eta in seen]


def per_stage(compile_s, run_s, capture_s, share=0.0):
    """Return a function for the seconds of a forward pass. They depend on its stage, and a fraction
    `share` of them is proportional to its cost.
    """
    seconds = {"compile": compile_s, "run": run_s, "capture": capture_s}

    def seconds_of(work):
        size = work.cost / 2500.0
        return seconds[work.kind.stage] * (1 - share + share * size) * (1 + work.kind.samples)

    return seconds_of


def noisy(seconds_of, seed):
    rng = random.Random(seed)
    return lambda work: seconds_of(work) * rng.uniform(0.3, 3)


ETA_CASES = {
    "as assumed": (STAGES, per_stage(0.5, 0.25, 0.33), None),
    "compiling takes nearly all": (STAGES, per_stage(7.0, 0.01, 0.01), None),
    "capturing takes nearly all": (STAGES, per_stage(0.01, 0.01, 5.0), None),
    "large shapes take longest": (STAGES, per_stage(2.0, 0.1, 0.5, share=1.0), None),
    "half by size, noisy": (STAGES, noisy(per_stage(1.0, 0.3, 0.5, share=0.5), 1), None),
    "one stage": (("compile",), noisy(per_stage(0.5, 0, 0), 2), None),
    "without graphs": (("compile", "run"), per_stage(0.4, 0.4, 0), None),
    "the largest are given up": (STAGES, per_stage(1.0, 0.1, 0.5, share=0.5), range(12)),
    "every third is given up": (STAGES, noisy(per_stage(1, 1, 1), 3), range(0, 400, 3)),
    "nothing takes any time": (STAGES, per_stage(0.0, 0.0, 0.0), None),
}


@pytest.mark.parametrize("case", ETA_CASES)
def test_one_figure_runs_down_from_the_first_launch_to_the_end(case):
    stages, seconds_of, lost = ETA_CASES[case]
    steps = plan_of(50, 3, stages)
    seen = run_plan(steps, seconds_of, lambda index: lost is not None and index in lost)
    known = [(eta, left) for eta, left in seen if eta is not None]
    assert len(known) >= len(seen) - (2 if lost is None else len(lost) + 2)
    etas = [eta for eta, _ in known]
    assert all(b <= a * MAX_RISE + 1e-12 for a, b in itertools.pairwise(etas)), case
    assert all(eta >= 0 for eta in etas)
    last_eta, last_left = known[-1]
    slowest = max(b - a for (_, b), (_, a) in itertools.pairwise(seen))
    assert abs(last_eta - last_left) <= max(slowest, 1e-9), "it does not end when the start is over"


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_large_shapes_that_come_first_do_not_make_the_estimate_far_too_high(share):
    seen = run_plan(plan_of(50, 3), per_stage(0.5, 0.25, 0.33, share))
    for eta, left in seen[10:]:
        # The estimate does not know yet the shapes of other sizes.
        assert left / 2 - 1 <= eta <= left * 2 + 1
    for eta, left in seen[len(seen) // 4 :]:
        assert eta == pytest.approx(left, rel=0.4, abs=1.0)


def test_what_is_given_up_is_not_waited_for():
    steps = plan_of(50, 1, ("compile",))
    seconds_of = per_stage(1.0, 0, 0)
    seen = run_plan(steps, seconds_of)
    fewer = run_plan(steps, seconds_of, lambda index: index < 25)
    assert fewer[27][0] == pytest.approx(seen[27][0], rel=0.2)


def test_log_probes_and_pages_show_the_figure_of_the_warm_up(monkeypatch):
    clock = [0.0]

    def now():
        clock[0] += 0.5
        return clock[0]

    monkeypatch.setattr(warmup_estimate.WarmUpEstimate.__init__, "__defaults__", (now,))
    monkeypatch.setattr(startup_state, "LOG_INTERVAL_S", 0.0)
    monkeypatch.setattr(startup_state.logger, "propagate", True)
    startup, reports = StartupState(), []

    def listen(phase, done, total, eta_seconds):
        startup.report(phase, done, total, eta_seconds)
        reports.append((phase, eta_seconds, startup.eta_seconds))

    variables = FEW_BUCKETS | {"PT_HPU_LAZY_MODE": 1, "VLLM_PROMPT_SEQ_BUCKET_MAX": 64}
    monkeypatch.setattr(startup_progress, "current_listener", listen)
    with simulated_hpu(**variables, has_profiling_run=False), captured_log(logging.INFO) as log:
        executor = make_executor(EngineArgs(**SMALL_ENGINE).create_engine_config())
        try:
            executor.start_workers()
            executor.allocate()
            list(executor.warm_up())
        finally:
            executor.shutdown()
    warm_up = [report for report in reports if report[0].startswith("warm-up")]
    assert {phase for phase, *_ in warm_up} == {
        f"warm-up: {phase} {what}"
        for phase in ("prefill", "decode")
        for what in ("buckets", "launches", "graphs")
    }
    assert all(eta is None for phase, eta, _ in reports if (phase, eta, _) not in warm_up)
    etas = [eta for _, eta, _ in warm_up[2:]]
    assert all(b <= a * MAX_RISE for a, b in itertools.pairwise(etas))
    assert etas[-1] == 0 and etas[0] > 0
    shown = [state for _, eta, state in warm_up[2:]]
    assert shown == [round(eta, 1) for eta in etas]
    logged = [line for line in log if line.startswith("start: warm-up") and " left" in line]
    assert [line.rpartition("about ")[2] for line in logged] == [f"{s:.0f} s left" for s in shown]
