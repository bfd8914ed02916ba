"""Test how several workers start: the smallest memory decides, and all workers decide the same."""

import sys
from dataclasses import replace

import pytest

from tests.engine.fakes import make_config
from tests.executor.list_executor import ListExecutor
from tests.hpu import captured_log
from vllm.config import ParallelConfig
from vllm.errors import ConfigError
from vllm.executor import make_executor
from vllm.utils.clean_up import on_failure
from vllm.utils.process import startup_progress
from vllm.worker.interface import MemoryReport, WarmUpStep

LAUNCHES = ("large", "middle", "small")


class FakeWorker:
    """Warms up three forward passes.

    Args:
        num_blocks: number of blocks for which it has memory.
        refuses: forward passes for which it knows that it has no memory.
        fails: forward passes that run out of memory.
        order: order of its forward passes.
    """

    def __init__(self, num_blocks=10, refuses=(), fails=(), order=LAUNCHES) -> None:
        self.num_blocks = num_blocks
        self.refuses = refuses
        self.fails = fails
        self.calls: list[str] = []
        self.ran: list[str] = []
        self.kept: list[str] = []
        self.given_up: dict[str, str] = {}
        self.lateness_s = 0.0
        self._pending = list(order)
        self._current: str | None = None

    def load(self, rank: int) -> None:
        self.calls.append(f"load {rank}")

    def measure(self) -> MemoryReport:
        self.calls.append("measure")
        return MemoryReport(free_bytes=100, block_bytes=2, num_blocks=self.num_blocks)

    def allocate(self, num_blocks: int) -> None:
        self.calls.append(f"allocate {num_blocks}")

    def next_warm_up(self, update) -> WarmUpStep | None:
        if self._current is not None:
            if update.given_up is None:
                self.kept.append(self._current)
            else:
                self.given_up[self._current] = update.given_up
        if not self._pending:
            return None
        self._current = name = self._pending.pop(0)
        refusal = f"{name} takes 9" if name in self.refuses else None
        index = 1 + LAUNCHES.index(name)
        eta_s = 10.0 * len(self._pending) + self.lateness_s
        return WarmUpStep(
            phase="warm-up", name=name, index=index, total=3, given_up=refusal, eta_seconds=eta_s
        )

    def warm_up(self) -> str | None:
        assert self._current is not None
        self.ran.append(self._current)
        return f"{self._current} took 9" if self._current in self.fails else None


def test_workers_start_in_order_and_the_least_number_of_blocks_counts():
    workers = [FakeWorker(num_blocks=n) for n in (30, 7, 12)]
    assert ListExecutor(workers).start() == 7
    for rank, worker in enumerate(workers):
        assert worker.calls == [f"load {rank}", "measure", "allocate 7"]
        assert worker.ran == worker.kept == list(LAUNCHES)


def test_what_one_rank_gives_up_is_given_up_on_all():
    large, small = FakeWorker(), FakeWorker(refuses={"large"}, fails={"middle"})
    ListExecutor([large, small]).start()
    # A shape that one rank refuses before runs on no rank.
    assert large.ran == small.ran == ["middle", "small"]
    assert large.kept == small.kept == ["small"]
    reasons = {"large": "large takes 9 (rank 1)", "middle": "middle took 9 (rank 1)"}
    assert large.given_up == small.given_up == reasons


def test_a_single_rank_is_not_named():
    worker = FakeWorker(fails={"small"})
    ListExecutor([worker]).start()
    assert worker.given_up == {"small": "small took 9"}


def test_whoever_advances_the_warm_up_runs_one_launch_at_a_time(monkeypatch):
    workers = [FakeWorker(), FakeWorker(refuses={"middle"})]
    workers[1].lateness_s = 0.5  # each rank measures its own time; the first report counts
    reports: list[tuple[str, int, int, float]] = []
    monkeypatch.setattr(
        startup_progress, "current_listener", lambda *report: reports.append(report)
    )
    executor = ListExecutor(workers)
    executor.start_workers()
    executor.allocate()
    steps = executor.warm_up()
    seen = []
    for _ in LAUNCHES:
        step = next(steps)
        seen.append((step.name, step.given_up, [len(worker.ran) for worker in workers]))
    assert next(steps, None) is None
    assert seen == [
        ("large", None, [1, 1]),
        ("middle", "middle takes 9 (rank 1)", [1, 1]),
        ("small", None, [2, 2]),
    ]
    assert reports == [("warm-up", 0, 3, 20.0), ("warm-up", 2, 3, 0.0), ("warm-up", 3, 3, 0.0)]


@pytest.mark.parametrize("order", [("small",), ()])
def test_ranks_that_would_run_other_launches_are_our_mistake(order):
    workers = [FakeWorker(), FakeWorker(order=order)]
    with pytest.raises(AssertionError, match="ranks differ"):
        ListExecutor(workers).start()
    assert not workers[0].ran and not workers[1].ran


BACKENDS = {
    "uni": {},
    "mp": {"tensor_parallel_size": 2},
    "external_launcher": {"distributed_executor_backend": "external_launcher"},
    "ray": {"distributed_executor_backend": "ray"},
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_executor_that_has_not_started_can_be_shut_down(backend, monkeypatch):
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    executor = make_executor(replace(make_config(), parallel=ParallelConfig(**BACKENDS[backend])))
    executor.shutdown()
    executor.shutdown()


def test_an_engine_without_ray_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    parallel = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="ray")
    executor = make_executor(replace(make_config(), parallel=parallel))
    with pytest.raises(ConfigError, match=r"needs Ray.* pip install 'vllm\[ray\]'"):
        executor.start()


@pytest.mark.parametrize("backend", [None, "ray"])
def test_a_model_that_cannot_be_divided_is_refused_before_any_process_starts(backend):
    parallel = ParallelConfig(tensor_parallel_size=7, distributed_executor_backend=backend)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size \(7\) must divide"):
        make_executor(replace(make_config(), parallel=parallel))


class BrokenExecutor(ListExecutor):
    def start_workers(self):
        raise ConfigError("the first error")

    def shutdown(self):
        raise AttributeError("of what had not started")


def test_a_failed_start_reports_its_first_error_and_calls_every_clean_up():
    ended = []
    with captured_log() as log, pytest.raises(ConfigError, match="the first error"):
        BrokenExecutor([]).start()
    assert log == ["another error while cleaning up after a failed start:"]
    clean_ups = BrokenExecutor([]).shutdown, lambda: ended.append("second")
    with captured_log(), pytest.raises(KeyboardInterrupt), on_failure(*clean_ups):
        raise KeyboardInterrupt
    assert ended == ["second"]
    with on_failure(lambda: ended.append("not without an error")):
        pass
    assert ended == ["second"]
