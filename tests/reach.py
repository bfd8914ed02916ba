"""Find the parts of an engine; only this module of the tests knows where they are.

An engine is an `LLM`, an `LLMEngine` or an `EngineCore` whose worker is in this process.
"""

from typing import Any

from vllm.worker.cpu.launches import ByItems


def core_of(engine: Any) -> Any:
    """Return the engine core."""
    engine = getattr(engine, "llm_engine", engine)
    return getattr(engine, "engine_core", engine)


def scheduler_of(engine: Any) -> Any:
    """Return the scheduler of the core."""
    return core_of(engine).scheduler


def pool_of(engine: Any) -> Any:
    """Return the block pool of the scheduler."""
    return scheduler_of(engine).cache.pool


def executor_of(engine: Any) -> Any:
    """Return the executor of the core."""
    return core_of(engine).executor


def worker_of(engine: Any) -> Any:
    """Return the worker of an executor whose worker is in this process."""
    return executor_of(engine)._worker


def replace_worker(executor: Any, worker: Any) -> None:
    """Give a worker of the test to an executor that has not started."""
    executor._worker = worker


def runner_of(engine: Any) -> Any:
    """Return the runner of the engine's worker."""
    return worker_of(engine).runner


def pids_of(engine: Any) -> list[int]:
    """Return the process ids of the ranks that are processes."""
    found: list[int] = executor_of(engine)._ranks.pids
    return found


def stats_of(engine: Any) -> Any:
    """Return the counters of the core."""
    return core_of(engine).stats()


def steps_in_flight_of(engine: Any) -> Any:
    """Return the steps that have started and whose results have not been taken yet."""
    return core_of(engine)._in_flight


def connector_of(engine: Any) -> Any:
    """Return the connector that moves blocks between engines."""
    return core_of(engine)._transfer._connector


def program_of(runner: Any) -> Any:
    """Return the fused program of a model on the CPU, or None."""
    return runner.launches.programs.without


def leave_modules_alone(runner: Any) -> None:
    """Let a runner on the CPU run the modules of its model, not their fused program."""
    # Says that the first step was already fused, so the first step does not fuse anything.
    runner.launches.is_fused = True
    runner.launches.programs = runner.launches.decode_steps = ByItems(None, None)


def decode_step_of(runner: Any) -> Any:
    """Return the decode step in one call of a runner on the CPU, or None."""
    return runner.launches.decode_steps.without
