"""Time the scheduler without a model: `schedule()` and `update()` of steady decode steps.

Requests start at different lengths, so that block boundaries are spread over the steps as in real
traffic. Also timed: a step in which every row crosses a boundary at once, `add_request`,
`abort_requests`, and the recording of traffic. Writes JSON to stdout, and a table to stderr.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from vllm.bucketing.bucket import decode
from vllm.config import SchedulerConfig
from vllm.core.kv.kv_cache_manager import KVCacheManager
from vllm.core.scheduler import Scheduler
from vllm.engine.metrics.registry import MetricSet
from vllm.engine.metrics.traffic_metrics import TrafficMetrics
from vllm.messages import EngineRequest, ModelRunnerOutput, RunnerStats, SchedulerOutput
from vllm.sampling_params import SamplingParams
from vllm.worker.hpu.launches.step_report import RecentLaunches

MAX_MODEL_LEN = 8192
WARMUP_STEPS = 20
VOCAB_SIZE = 32000


def make_request(request_id: str, prompt: list[int], max_tokens: int) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        seed=0,
        eos_token_id=VOCAB_SIZE + 1,
        max_total_tokens=len(prompt) + max_tokens,
        arrival_time=0.0,
    )


def make_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


def make_scheduler(num_running: int, block_size: int, enable_caching: bool) -> Scheduler:
    config = SchedulerConfig(
        max_model_len=MAX_MODEL_LEN, max_num_seqs=num_running, max_num_batched_tokens=65536
    )
    num_blocks = num_running * (2048 // block_size + 1) + 1
    return Scheduler(config, KVCacheManager(num_blocks, block_size, enable_caching))


class Steps:
    """Runs steps with invented tokens, and times both halves of each."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.schedule_us: list[float] = []
        self.update_us: list[float] = []

    def run(self, count: int) -> None:
        for _ in range(count):
            start = time.perf_counter_ns()
            step = self.scheduler.schedule()
            middle = time.perf_counter_ns()
            output = self._result(step)
            before_update = time.perf_counter_ns()
            self.scheduler.update(output)
            end = time.perf_counter_ns()
            self.schedule_us.append((middle - start) / 1e3)
            self.update_us.append((end - before_update) / 1e3)

    def forget(self) -> None:
        self.schedule_us.clear()
        self.update_us.clear()

    def _result(self, step: SchedulerOutput) -> ModelRunnerOutput:
        rows = self.scheduler._in_flight[-1].rows  # of requests that sample
        token_ids = (rows + step.step_id) % VOCAB_SIZE
        return ModelRunnerOutput(step_id=step.step_id, rows=rows, token_ids=token_ids)


def bench_decode(
    num_running: int,
    num_waiting: int,
    block_size: int,
    enable_caching: bool,
    num_steps: int,
    is_aligned: bool = False,
) -> dict[str, Any]:
    """Time decode steps of `num_running` requests, while `num_waiting` requests find no room."""
    rng = random.Random(0)
    scheduler = make_scheduler(num_running, block_size, enable_caching)
    for i in range(num_running + num_waiting):
        num_prompt = 128 if is_aligned else 128 + rng.randrange(block_size)
        prompt = make_prompt(rng, num_prompt)
        scheduler.add_request(make_request(f"request-{i}", prompt, num_steps + WARMUP_STEPS + 600))
    steps = Steps(scheduler)
    while len(scheduler.running) < num_running or steps_are_prefill(scheduler):
        steps.run(1)
    steps.run(WARMUP_STEPS)
    steps.forget()
    steps.run(num_steps)
    assert len(scheduler.running) == num_running and not scheduler.num_preemptions
    both = [a + b for a, b in zip(steps.schedule_us, steps.update_us, strict=True)]
    return {
        "running": num_running,
        "waiting": num_waiting,
        "block_size": block_size,
        "prefix_caching": enable_caching,
        "boundaries": "aligned" if is_aligned else "spread",
        "schedule_us": summary(steps.schedule_us),
        "update_us": summary(steps.update_us),
        "total_us": summary(both),
        "max_us": round(max(both), 1),
        "per_request_us": round(statistics.mean(both) / num_running, 3),
    }


def steps_are_prefill(scheduler: Scheduler) -> bool:
    running, rows = scheduler.running, scheduler.running.order
    return bool((running.num_tokens[rows] - running.num_computed[rows] > 1).any())


def bench_add(num_prompt: int, count: int) -> dict[str, Any]:
    """Time `add_request`, the first admission of each request, and aborts while waiting and
    running.
    """
    rng = random.Random(0)
    scheduler = make_scheduler(count, 16, enable_caching=True)
    prompts = [make_prompt(rng, num_prompt) for _ in range(count)]
    requests = [make_request(f"request-{i}", prompt, 8) for i, prompt in enumerate(prompts)]
    names = [request.request_id for request in requests]

    def add_all() -> None:
        for request in requests:
            scheduler.add_request(request)

    def abort_one_by_one() -> None:
        for name in names:
            scheduler.abort_requests([name])

    add_us = timed_us(add_all) / count
    abort_waiting_us = timed_us(abort_one_by_one) / count
    add_all()
    steps = Steps(scheduler)
    num_admitted, admit_us = 0, 0.0
    while scheduler.waiting and num_admitted == len(scheduler.running):
        steps.run(1)
        num_admitted, admit_us = len(scheduler.running), admit_us + steps.schedule_us[-1]
        if steps_are_prefill(scheduler):
            break
    abort_running_us = timed_us(abort_one_by_one) / count
    return {
        "num_prompt_tokens": num_prompt,
        "requests": count,
        "add_us": round(add_us, 2),
        "admit_us": round(admit_us / num_admitted, 2),
        "abort_waiting_us": round(abort_waiting_us, 2),
        "abort_running_us": round(abort_running_us, 2),
    }


def bench_recording(num_steps: int) -> dict[str, dict[str, float]]:
    """Time the recording of traffic, in microseconds per forward pass: a step with one decode.

    The worker notes its sizes, and the process that collects metrics counts them.
    """
    rng, block_size = random.Random(0), 128
    batches = [rng.randint(1, 256) for _ in range(num_steps)]
    sizes = [(batch, 1, batch * rng.randint(1, 32)) for batch in batches]
    buckets = [decode(256, 8192), decode(64, 2048)]
    recent = RecentLaunches(time.perf_counter, block_size)
    traffic = TrafficMetrics(MetricSet(), block_size)
    records, note_us, count_us = [], [], []
    for number, needed in enumerate(sizes):
        start = time.perf_counter_ns()
        recent.begin_step()
        recent.add(needed, buckets[number % 2], is_compiled=True)
        recent.end_step()
        note_us.append((time.perf_counter_ns() - start) / 1e3)
        records.append(RunnerStats(recent_launches=recent.record))
    for stats in records:
        start = time.perf_counter_ns()
        traffic.count(stats)
        count_us.append((time.perf_counter_ns() - start) / 1e3)
    return {"note_us": summary(note_us), "count_us": summary(count_us)}


def timed_us(work: Callable[[], None]) -> float:
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e3


def summary(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 2),
        "p90": round(float(np.percentile(values, 90)), 2),
        "mean": round(statistics.mean(values), 2),
    }


def print_tables(result: dict[str, Any]) -> None:
    def line(*cells: object) -> None:
        print(*(f"{cell!s:>13}" for cell in cells), file=sys.stderr)

    print("microseconds per step: median / p90 / mean", file=sys.stderr)
    names = ("running", "waiting", "block", "caching", "boundaries")
    line(*names, "schedule", "update", "per request")
    for row in result["decode"]:
        line(
            *(row[key] for key in ("running", "waiting", "block_size", "prefix_caching")),
            row["boundaries"],
            *("/".join(f"{value:.0f}" for value in row[key].values()) for key in HALVES),
            row["per_request_us"],
        )
    print("microseconds per request", file=sys.stderr)
    line("prompt", "add", "admit", "abort waiting", "abort running")
    for row in result["add"]:
        keys = ("num_prompt_tokens", "add_us", "admit_us", "abort_waiting_us", "abort_running_us")
        line(*(row[key] for key in keys))
    print("microseconds to record the traffic of a forward pass", file=sys.stderr)
    line("", "median", "p90", "mean")
    for name, found in result["recording"].items():
        line(name, *found.values())


HALVES = ("schedule_us", "update_us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="timed steps of each case")
    parser.add_argument("--running", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 1000])
    args = parser.parse_args()
    gc.disable()  # a step must not pay for the garbage of others
    decodes = []
    for num_running in args.running:
        for block_size in args.block_sizes:
            for caching in (False, True):
                for num_waiting in args.waiting:
                    case = num_running, num_waiting, block_size, caching, args.steps
                    decodes.append(bench_decode(*case))
                    gc.collect()
        decodes.append(bench_decode(num_running, 0, 16, True, args.steps, is_aligned=True))
    add = [bench_add(128, 1000), bench_add(4096, 200)]
    result = {"decode": decodes, "add": add, "recording": bench_recording(20_000)}
    print_tables(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
