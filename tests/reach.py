"""Find the parts of an engine; only this module of the tests knows their private names.

An engine is an `LLM`, an `LLMEngine` or an `EngineCore` whose worker is in this process.
"""

from collections.abc import Callable
from typing import Any

import pytest

from vllm.messages import NULL_BLOCK_ID


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
    return pids_of_ranks(executor_of(engine))


def pids_of_ranks(executor: Any) -> list[int]:
    """Return the process ids of the ranks of an executor that has started."""
    found: list[int] = executor._ranks.pids
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


def forget_host_blocks(engine: Any) -> None:
    """Drop the blocks that a connector keeps in host memory."""
    connector_of(engine)._host.clear()


def next_event_number_of(engine: Any) -> int:
    """Return the number of the next message about the KV cache."""
    number: int = core_of(engine)._publisher._next_number
    return number


def replace_background_warm_up(core: Any, warm_up: Any) -> None:
    """Let a core warm up between its steps as the test says."""
    core._warm_up = warm_up


def has_warmed_up(core: Any) -> bool:
    """Return whether the warm-up between steps has ended."""
    is_done: bool = core._warm_up.is_done
    return is_done


def note_before_waiting(patch: pytest.MonkeyPatch, core: Any, note: Callable[[], object]) -> None:
    """Call a function each time that a core is about to wait for the result of a step."""
    wait = core._wait

    def note_and_wait() -> Any:
        note()
        return wait()

    patch.setattr(core, "_wait", note_and_wait)


def program_of(runner: Any) -> Any:
    """Return the fused program of a model on the CPU, or None."""
    return runner.launches.programs.without


def leave_modules_alone(runner: Any) -> None:
    """Let a runner on the CPU run the modules of its model, not their fused program."""
    from vllm.worker.cpu.launches import (
        ByItems,
    )  # not where this module is imported: it needs torch

    # Says that the first step was already fused, so the first step does not fuse anything.
    runner.launches.is_fused = True
    runner.launches.programs = runner.launches.decode_steps = ByItems(None, None)


def decode_step_of(runner: Any) -> Any:
    """Return the decode step in one call of a runner on the CPU, or None."""
    return runner.launches.decode_steps.without


def replace_ops(patch: pytest.MonkeyPatch, ops: Any) -> None:
    """Let layers call these operators while a patch lasts; None: the next platform sets some."""
    patch.setattr("vllm.ops._ops", ops)


def use_device_nodes(patch: pytest.MonkeyPatch, nodes: Any, accelerators: Any = None) -> None:
    """Look for cards in folders of the test instead of `/dev` and, if given, `/sys/class/accel`."""
    patch.setattr("vllm.platforms.habana.nodes._DEV", nodes)
    if accelerators is not None:
        patch.setattr("vllm.platforms.habana.nodes._ACCEL_CLASS", accelerators)


def use_machine(patch: pytest.MonkeyPatch, folder: Any) -> None:
    """Look for cards, their driver and other processes in a folder of the test, with the tree of
    the system below it.
    """
    use_device_nodes(patch, folder / "dev", folder / "sys" / "class" / "accel")
    patch.setattr("vllm.platforms.habana.nodes._PCI_DEVICES", folder / "sys" / "bus" / "pci")
    patch.setattr("vllm.platforms.habana.nodes._PROCESSES", folder / "proc")
    patch.setattr("vllm.platforms.habana.versions._DRIVER_VERSION", folder / "driver")
    for name, path in (
        ("_MEMINFO", "proc/meminfo"),
        ("_GOVERNOR", "sys/governor"),
        ("_NUMA_BALANCING", "proc/numa_balancing"),
        ("_SHARED_MEMORY", "dev/shm"),
    ):
        patch.setattr(f"vllm.platforms.habana.host.{name}", folder / path)


def report_of(worker: Any) -> Any:
    """Return the memory that a worker measured at its start."""
    return worker._report


def draft_model_of(worker: Any) -> Any:
    """Return the model that drafts for a worker."""
    return worker._draft_model


def recorded_launches(runner: Any, patch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Return a list to which a runner of a card adds each launch and its result."""
    run, launches = runner._run, []

    def run_and_note(launch: Any) -> Any:
        launches.append((launch, run(launch)))
        return launches[-1][1]

    patch.setattr(runner, "_run", run_and_note)
    return launches


def media_of(engine: Any, kind: type) -> Any:
    """Return the encoder's side of the part of a runner with this class."""
    return runner_of(engine).parts.find(kind)._media


def replace_encoder(patch: pytest.MonkeyPatch, media: Any, encoder: Any) -> None:
    """Let media be encoded by an encoder of the test."""
    patch.setattr(media, "_encoder", encoder)


def kept_encodings_of(media: Any) -> dict[Any, Any]:
    """Return the embeddings that the worker holds, by the item."""
    kept: dict[Any, Any] = media._kept
    return kept


def check_media_are_gone(part: Any) -> None:
    """Check that the encoder's side of a part of a runner keeps nothing of any item."""
    media, pool = part._media, getattr(part, "pool", None)
    assert not media._items and not media._request_ids and not media._errors
    assert not media._files
    if pool is not None:
        assert not pool._slots and pool._is_free.all()
    else:
        assert not media._kept


def held_media_of(scheduler: Any) -> Any:
    """Return the items that running requests hold, or their number if only that is wrong."""
    return scheduler.media._held or scheduler.media._num_held


def scheduled_steps_of(scheduler: Any) -> Any:
    """Return the steps that a scheduler has scheduled and whose results it has not got."""
    return scheduler._in_flight


def request_ids_of(scheduler: Any) -> Any:
    """Return the ids of all requests that a scheduler knows."""
    return scheduler._requests.keys()


def num_stages_of(scheduler: Any) -> int:
    """Return the number of stages of the pipeline, whose steps overlap."""
    num_stages: int = scheduler._num_stages
    return num_stages


def log_cache_events(engine: Any) -> Any:
    """Let a prefix cache log its events, and return the log."""
    from vllm.core.kv.cache_events import CacheEventLog

    cache = scheduler_of(engine).cache
    cache._events = CacheEventLog(core_of(engine).config.cache.block_size)
    return cache._events


def cached_blocks_of(pool: Any) -> dict[Any, int]:
    """Return the blocks that a prefix can find, by their hash."""
    blocks: dict[Any, int] = pool._block_of
    return blocks


def check_hash_maps(pool: Any) -> None:
    """Check that both maps between blocks and hashes agree."""
    known = {key: index for index, key in enumerate(pool._hash_of) if key is not None}
    assert known == pool._block_of


def free_queue_of(pool: Any) -> list[int]:
    """Return the free blocks in the order in which they are taken, and check both directions."""
    queue: list[int] = []
    block_id = NULL_BLOCK_ID
    while (following := pool._next[block_id]) != NULL_BLOCK_ID:
        assert pool._prev[following] == block_id
        queue.append(following)
        assert len(queue) <= pool.num_blocks
        block_id = following
    assert pool._prev[NULL_BLOCK_ID] == block_id
    return queue


def port_of(connector: Any) -> int:
    """Return the port on which a connector serves its blocks."""
    port: int = connector._server.port
    return port
