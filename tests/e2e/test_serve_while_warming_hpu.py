"""Test requests from the first second on a strict simulated card that still warms up.

A test advances the clock: a step of the engine takes 10 ms, and a part of the warm-up takes 30 ms.
"""

import random
from contextlib import contextmanager, nullcontext
from itertools import count

import pytest
import torch

from gaudi_sim.bridge import SimBridge
from tests.e2e.ranks import assert_same
from tests.hpu import MODES, captured_log, simulated_hpu
from tests.reach import (
    core_of,
    executor_of,
    has_warmed_up,
    refuse_parts_of_warm_up,
    runner_of,
    runners_of,
    worker_of,
)
from vllm import LLM, RequestOutput, SamplingParams
from vllm.bucketing import MemoryClass
from vllm.bucketing.catalog.closure import prove
from vllm.engine.background_warm_up import BackgroundWarmUp
from vllm.engine.process.core_process import CoreLoop
from vllm.engine.process.wire import CoreOutput
from vllm.env import ranks as env_ranks
from vllm.executor import WarmUpSteps
from vllm.worker.hpu.worker import HPUWorker

pytestmark = pytest.mark.usefixtures("two_layers")

ENGINE = {
    "dtype": "float32",
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 25,
    "block_size": 16,
}
BUCKETS = {
    "VLLM_PROMPT_BS_BUCKET_MAX": 1,
    "VLLM_PROMPT_SEQ_BUCKET_MIN": 32,
    "VLLM_PROMPT_SEQ_BUCKET_STEP": 32,
    "VLLM_DECODE_BS_BUCKET_MIN": 4,
    "VLLM_DECODE_BLOCK_BUCKET_MIN": 8,
    "VLLM_DECODE_BLOCK_BUCKET_STEP": 8,
    "VLLM_CONTIGUOUS_PA": 0,
}
WARMING = {"ready_when": "first", "first_buckets": 2, "warm_up_share": 0.5}
STEP_S, PART_S = 0.01, 0.03
NUM_REQUESTS = 16
CANCELLED = frozenset({"3", "11"})


def load() -> list[tuple[list[int], SamplingParams]]:
    """Return prompts and parameters; some requests sample at random."""
    rng, requests = random.Random(5), []
    for index in range(NUM_REQUESTS):
        prompt = rng.choices(range(16, 4000), k=rng.choice([1, 3, 17, 30, 33, 50, 60, 70]))
        params = SamplingParams(
            temperature=0.8 * (index % 3 == 1),
            seed=index,
            max_tokens=rng.randint(2, 20),
            ignore_eos=True,
            detokenize=False,
        )
        requests.append((prompt, params))
    return requests


def serve(llm: LLM, requests, rounds: int = 1, until=lambda: False) -> list[list[RequestOutput]]:
    """Run rounds of requests: one request is added in every second step, and two of each round are
    cancelled. Stop after `rounds` rounds, or when `until` is true.

    Returns:
        For each round the outputs of the requests that were not cancelled, in their order.
    """
    engine, found = llm.llm_engine, []
    for number in range(rounds):
        outputs, waiting = {}, list(enumerate(requests))
        for step in count():
            if waiting and step % 2 == 0:
                index, (prompt, params) = waiting.pop(0)
                engine.add_request(f"{number}-{index}", {"prompt_token_ids": prompt}, params)
            if step == 20:
                engine.abort_request([f"{number}-{index}" for index in CANCELLED])
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id.partition("-")[2]] = output
            if not waiting and not engine.has_unfinished_requests():
                break
        kept = [str(i) for i in range(len(requests)) if str(i) not in CANCELLED]
        found.append([outputs[index] for index in kept])
        if until():
            break
    return found


class Clock:
    """Simulated time, and what happened in it.

    Attributes:
        now: in seconds.
        spent: at each part of the warm-up under load, the seconds of all such parts so far, and the
            time.
        problems: forbidden changes that a part of the warm-up has made.
    """

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        self.began: float | None = None
        self.spent: list[tuple[float, float]] = []
        self.problems: list[str] = []
        for kind, settings in ((BackgroundWarmUp, ()), (WarmUpSteps, ())):
            monkeypatch.setattr(kind.__init__, "__defaults__", (*settings, self.time))
        clock, execute, warm_up = self, HPUWorker.execute_model, HPUWorker.warm_up

        def execute_model(worker, step):
            clock.began = clock.now if clock.began is None else clock.began
            clock.now += STEP_S
            return execute(worker, step)

        def run_part(worker):
            if clock.began is None:  # this part of the warm-up belongs to the start
                clock.now += PART_S
                return warm_up(worker)
            before = kept_blocks(worker)
            workspace = worker.ledger.booked(MemoryClass.WORKSPACE)
            given_up = warm_up(worker)
            clock.now += PART_S
            total = PART_S + (clock.spent[-1][0] if clock.spent else 0.0)
            clock.spent.append((total, clock.now - clock.began))
            if not all(map(torch.equal, before, kept_blocks(worker))):
                clock.problems.append("a block has changed")
            if given_up is not None or worker.ledger.booked(MemoryClass.WORKSPACE) != workspace:
                clock.problems.append(f"more memory is needed: {given_up}")
            planner = worker.runner.launches.planner
            if not prove(planner.catalog, planner.limits).is_covered:
                clock.problems.append("a launch has no bucket")
            if len(planner.catalog.warmed) < len(planner.catalog):
                clock.problems.append("a bucket is in use that is not warmed up")
            return given_up

        monkeypatch.setattr(HPUWorker, "execute_model", execute_model)
        monkeypatch.setattr(HPUWorker, "warm_up", run_part)

    def time(self) -> float:
        return self.now


def kept_blocks(worker: HPUWorker) -> list[torch.Tensor]:
    """Return the keys and values of all blocks except the null block."""
    size = worker.config.cache.block_size
    caches = [
        tensor
        for runner in runners_of(worker)
        for layer in runner.attention_layers
        for tensor in layer.kv_caches
    ]
    return [tensor.cpu()[size:].clone() for tensor in caches]


@contextmanager
def computing_all():
    """Let all parts of the warm-up compute and write in this context, as on a real card."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("dry_run", "compile_only"):
            patch.setattr(SimBridge, name, lambda self: nullcontext())
        yield


def all_are_warm(core) -> bool:
    stats = core.stats().warm_up
    return stats.num_warm == stats.num_wanted


@pytest.fixture(scope="module")
def want():
    return serve(LLM(device="cpu", **ENGINE), load())[0]


OTHERS = [
    *((0, 1, length, 0) for length in (16, 64)),
    *((1, batch, length, blocks) for batch in (1, 4) for length in (1, 3) for blocks in (6, 20)),
]
"""Buckets that an engine is to use instead, for phase, batch, query length and blocks."""


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("HPU graphs", {"tensor_parallel_size": 2}),
        pytest.param(
            "HPU graphs",
            {"tensor_parallel_size": 2, "speculative_config": NGRAM},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("torch.compile", {}, marks=pytest.mark.exhaustive),
        pytest.param("HPU graphs", {}, marks=pytest.mark.exhaustive),
        pytest.param("lazy", {}, marks=pytest.mark.exhaustive),
        pytest.param("eager", {}, marks=pytest.mark.exhaustive),
    ],
)
def test_requests_from_the_first_second_get_the_tokens_of_the_cpu(
    mode, settings, want, monkeypatch
):
    clock = Clock(monkeypatch)
    is_lazy, is_eager = MODES[mode]
    variables = {"PT_HPU_LAZY_MODE": is_lazy, "PT_HPU_ENABLE_LAZY_COLLECTIVES": True, **BUCKETS}
    for name, value in env_ranks.rank_variables(0, 1).items():
        # An engine changes these variables; monkeypatch restores them afterwards.
        monkeypatch.setenv(name, value)
    extension = "tests.executor.late_compilations.LateCompilations"
    with simulated_hpu(**variables), captured_log() as log:
        llm = LLM(
            enforce_eager=is_eager,
            worker_extension_cls=extension,
            **ENGINE | WARMING | settings,
        )
        core, executor = core_of(llm), executor_of(llm)
        first = core.stats().warm_up
        assert first.is_warming and first.num_warm < first.num_wanted
        # With several ranks, the other ranks would not compute.
        is_alone = "tensor_parallel_size" not in settings
        with computing_all() if is_alone else nullcontext():
            rounds = serve(llm, load(), 12, until=lambda: all_are_warm(core))
            before = {*executor.collective_rpc("warmed_buckets")[0]}
            assert core.replace_buckets(OTHERS) and not core.replace_buckets(OTHERS)
            rounds += serve(llm, load(), 12, until=lambda: has_warmed_up(core))
        stats = core.stats()
        assert set(executor.collective_rpc("late_compilations")) == {0}
        warmed, *others = executor.collective_rpc("warmed_buckets")
        executor.shutdown()
    assert not clock.problems
    for outputs in rounds:
        assert_same(outputs, want)
    assert stats.warm_up.num_warm == stats.warm_up.num_wanted
    assert stats.runner.num_bucket_misses == 0
    assert len(warmed) == stats.warm_up.num_wanted and others == [warmed] * len(others)
    assert all(line.endswith("True") for line in warmed)
    assert before.difference(warmed) and set(warmed).difference(before)
    [line] = {line for line in log if "are no longer used" in line}
    assert line.startswith(f"buckets: {len(warmed)} are in use now; ")
    # The first part of a new kind may take longer than expected; the next parts wait until the
    # share allows them.
    assert all(spent <= 0.5 * now + PART_S for spent, now in clock.spent)
    assert clock.spent[-1][0] <= 0.5 * clock.spent[-1][1] + 1e-9
    assert stats.warm_up.longest_delay_s == pytest.approx(PART_S)
    assert not [line for line in log if "was not warmed-up!" in line or "not used" in line]


def test_sleep_in_the_middle_keeps_what_is_warm(want, monkeypatch):
    clock = Clock(monkeypatch)
    with (
        simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **BUCKETS) as bridge,
        computing_all(),
    ):
        llm = LLM(enable_sleep_mode=True, **ENGINE | WARMING)
        core, graphs = core_of(llm), runner_of(llm).launches.execution
        sent: list[CoreOutput] = []
        CoreLoop(core, lambda wait: None, sent.append).turn()
        assert sent[0].stats.warm_up == core.stats().warm_up, "as soon as the engine is ready"
        while len(graphs.shapes) < 5:
            core.idle_step()
        core.idle_step()  # now one bucket is in use, and the warm-up of the next has begun
        shapes, stats = graphs.shapes, core.stats().warm_up
        assert 4 < stats.num_warm < stats.num_wanted
        ledger = worker_of(llm).ledger
        booked = [ledger.booked(cls) for cls in MemoryClass]
        llm.sleep(level=1)
        assert not core.has_idle_work() and not graphs.shapes
        llm.wake_up()
        assert graphs.shapes == shapes and [ledger.booked(cls) for cls in MemoryClass] == booked
        compilations = bridge.counters().compilations
        outputs = serve(llm, load()[:8])[0]
        assert_same(outputs, want[:7])
        while not all_are_warm(core):
            core.idle_step()
        assert bridge.counters().compilations > compilations
        assert core.stats().runner.num_late_compilations == 0
        assert_same(serve(llm, load()[:8])[0], want[:7])
    assert clock.spent and not clock.problems


def test_a_bucket_that_is_given_up_halfway_gives_back_the_memory_of_its_graphs(monkeypatch):
    variables = {**BUCKETS, "PT_HPU_LAZY_MODE": 1, "VLLM_CONTIGUOUS_PA": 1}
    refused = []

    def refuses(launches, part) -> bool:
        shapes = launches.launch_shapes(part.shape.bucket)
        if part.stage == "compile" and len(shapes) > 1 and part.shape == shapes[-1]:
            refused.append(part.shape.bucket)
            return True
        return False

    refuse_parts_of_warm_up(monkeypatch, refuses)
    with simulated_hpu(has_profiling_run=False, **variables):
        llm = LLM(**ENGINE | WARMING)
        core, launches, ledger = core_of(llm), runner_of(llm).launches, worker_of(llm).ledger
        before = ledger.booked(MemoryClass.DECODE_GRAPHS)
        while core.has_idle_work():
            core.idle_step()
        warmed = launches.planner.catalog.warmed
        in_use = [s for s in launches.execution.shapes if s.bucket in warmed]
    assert refused and not warmed.intersection(refused)
    assert launches.execution.shapes == in_use
    assert ledger.booked(MemoryClass.DECODE_GRAPHS) == before
    assert launches.traffic is None  # nobody needs the counts any more


def test_other_buckets_replace_those_in_use_within_the_memory_of_graphs(want, monkeypatch):
    clock = Clock(monkeypatch)
    with (
        simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **BUCKETS) as bridge,
        computing_all(),
    ):
        llm = LLM(enable_sleep_mode=True, **ENGINE | WARMING)
        core, launches, ledger = core_of(llm), runner_of(llm).launches, worker_of(llm).ledger
        assert not core.replace_buckets(OTHERS), "its first buckets are still being warmed up"
        while core.has_idle_work():
            core.idle_step()
        present = launches.planner.catalog
        graphs = MemoryClass.PREFILL_GRAPHS, MemoryClass.DECODE_GRAPHS
        for cls in graphs:  # the card has no memory for more graphs
            ledger.assign(cls, ledger.booked(cls))
        budgets = [ledger.budget(cls) for cls in graphs]
        num_graphs = len(launches.execution.shapes)
        assert core.replace_buckets(OTHERS)
        while core.stats().warm_up.num_warm < 6:
            core.idle_step()
        assert launches.planner.catalog.is_warmed(present.decode[0]), "until all others are"
        booked = [ledger.booked(cls) for cls in graphs]
        llm.sleep(level=1)
        llm.wake_up()
        assert [ledger.booked(cls) for cls in graphs] == booked
        assert_same(serve(llm, load()[:8])[0], want[:7])
        released = set()
        while core.has_idle_work():
            if core.stats().warm_up.num_warm < core.stats().warm_up.num_wanted:
                with_graphs = {shape.bucket for shape in launches.execution.shapes}
                released |= present.warmed - with_graphs
            core.idle_step()
            assert [ledger.budget(cls) for cls in graphs] == budgets
        assert released, "for the memory of others"
        catalog = launches.planner.catalog
        assert len(launches.execution.shapes) <= num_graphs
        assert {shape.bucket for shape in launches.execution.shapes} <= catalog.warmed
        assert catalog.warmed.difference(present.warmed)
        assert present.warmed.difference(catalog.warmed)
        assert core.stats().warm_up.num_wanted == len(catalog) == len(catalog.warmed)
        assert_same(serve(llm, load()[:8])[0], want[:7])
        assert core.stats().runner.num_late_compilations == 0
        assert not core.replace_buckets(OTHERS), "they are in use"
        assert not core.has_idle_work()
        in_use = sum(ledger.booked(cls) for cls in MemoryClass)
        assert bridge.memory_info().free_bytes >= ledger.total_bytes - in_use
    assert not clock.problems
