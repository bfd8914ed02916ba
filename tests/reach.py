"""Reach what other modules keep private; only this module of the tests knows their private names.

A test that sees a result from outside is better. Here is what shows only inside: counts of what is
kept, states that a test has to cause, and stand-ins where nothing is given from outside. An engine
is an `LLM`, an `LLMEngine` or an `EngineCore` whose worker is in this process.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from vllm.messages import NULL_BLOCK_ID

# Modules that need torch are imported in functions: test processes that need none import this.


# ---- the parts of an engine ---------------------------------------------------------------------


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


def runner_of(engine: Any) -> Any:
    """Return the runner of the engine's worker."""
    return worker_of(engine).runner


def report_of(worker: Any) -> Any:
    """Return the memory that a worker measured at its start."""
    return worker._report


def draft_model_of(worker: Any) -> Any:
    """Return the model that drafts for a worker."""
    return worker._draft_model


def connector_of(engine: Any) -> Any:
    """Return the connector that moves blocks between engines."""
    return core_of(engine)._transfer._connector


def stats_of(engine: Any) -> Any:
    """Return the counters of the core."""
    return core_of(engine).stats()


# ---- engine cores -------------------------------------------------------------------------------


def steps_in_flight_of(engine: Any) -> Any:
    """Return the steps that have started and whose results have not been taken yet."""
    return core_of(engine)._in_flight


def awaited_adapters_of(core: Any) -> dict[str, Any]:
    """Return the adapters that a core holds for requests, by the id of the request."""
    adapters: dict[str, Any] = core._resources._adapters
    return adapters


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


def host_seconds_of(policy: Any) -> float:
    """Return the time of the host in each step, as the policy of running ahead has measured it."""
    seconds: float = policy._host_s
    return seconds


# ---- schedulers, their drafts, and block pools --------------------------------------------------


def scheduled_steps_of(scheduler: Any) -> Any:
    """Return the steps that a scheduler has scheduled and whose results it has not got."""
    return scheduler._in_flight


def request_ids_of(scheduler: Any) -> Any:
    """Return the ids of all requests that a scheduler knows."""
    return scheduler._requests.keys()


def held_media_of(scheduler: Any) -> Any:
    """Return the items that running requests hold, or their number if only that is wrong."""
    return scheduler.media._held or scheduler.media._num_held


def num_stages_of(scheduler: Any) -> int:
    """Return the number of stages of the pipeline, whose steps overlap."""
    num_stages: int = scheduler._num_stages
    return num_stages


def preempt(scheduler: Any, request: Any) -> None:
    """Preempt a running request, as a lack of blocks does, at a time that the test chooses."""
    scheduler._preempt(request)


def num_remembered_tokens_of(drafts: Any) -> int:
    """Return the number of tokens that a source of drafts keeps of earlier outputs."""
    return sum(map(len, drafts._earlier))


def indexed_requests_of(drafts: Any) -> Any:
    """Return the ids of the requests whose own tokens a source of drafts keeps."""
    return drafts._indexes.keys()


def log_cache_events(engine: Any) -> Any:
    """Let a prefix cache log its events, and return the log."""
    from vllm.core.kv.cache_events import CacheEventLog

    cache = scheduler_of(engine).cache
    cache.events = CacheEventLog(core_of(engine).config.cache.block_size)
    return cache.events


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


# ---- blocks and events that leave an engine -----------------------------------------------------


def port_of(connector: Any) -> int | None:
    """Return the port on which a connector serves its blocks, or None if it serves none."""
    return None if connector._server is None else connector._server.port


def wait_for_writes(engine: Any) -> None:
    """Wait until a connector has written all blocks that were saved so far to its folder."""
    connector_of(engine)._thread.submit(int).result()


def forget_host_blocks(engine: Any) -> None:
    """Drop the blocks that a connector keeps in host memory."""
    connector_of(engine)._host.clear()


def next_event_number_of(engine: Any) -> int:
    """Return the number of the next message about the KV cache."""
    number: int = core_of(engine)._publisher._next_number
    return number


def send_no_batches(patch: pytest.MonkeyPatch) -> None:
    """Let publishers of events of the KV cache leave the batches in their queue."""
    from vllm.engine.kv_event_publisher import KVEventPublisher

    patch.setattr(KVEventPublisher, "_publish", lambda publisher, socket: socket.close())


def next_queued_number(publisher: Any) -> int:
    """Take the next batch from the queue of a publisher, and return its number."""
    number: int = publisher._queue.get_nowait()[0]
    return number


# ---- executors and ranks ------------------------------------------------------------------------


def replace_worker(executor: Any, worker: Any, thread: Any = None) -> None:
    """Give a worker of the test, and the thread of its steps, to an executor that has not
    started.
    """
    executor._worker, executor._thread = worker, thread


def record_tokens(executor: Any, tokens: Any) -> None:
    """Let the worker record tokens of another rank, as a stage of a pipeline does."""
    executor._record_tokens(tokens)


def set_has_media(executor: Any, has_media: bool) -> None:
    """Say whether the model of an executor for a launcher has images, whose errors are shared."""
    executor._has_media = has_media


def pids_of(engine: Any) -> list[int]:
    """Return the process ids of the ranks that are processes."""
    return pids_of_ranks(executor_of(engine))


def pids_of_ranks(executor: Any) -> list[int]:
    """Return the process ids of the ranks of an executor that has started."""
    found: list[int] = executor._ranks.pids
    return found


def nodes_of(engine: Any) -> list[str]:
    """Return the node of each rank, where Ray has placed the ranks."""
    nodes: list[str] = executor_of(engine)._placement.nodes
    return nodes


def replace_ray(executor: Any, ray: Any, actors: list[Any], unread: dict[Any, int]) -> None:
    """Give a stand-in for Ray, the actors of the ranks, and answers that nobody waits for, to an
    executor that has not started.
    """
    executor._ray, executor._actors, executor._unread = ray, actors, unread


def replace_rank_server(loop: Any, server: Any) -> None:
    """Let the loop of a rank's process give its messages to a server of the test."""
    loop._server = server


def looks_for_messages(patch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list to which loops of ranks add an entry when they look for a message instead of
    sleeping.
    """
    from vllm.executor.ranks.rank_process import RankLoop

    look = RankLoop._look_for_message
    looks: list[Any] = []
    patch.setattr(RankLoop, "_look_for_message", lambda loop: looks.append(look(loop)))
    return looks


# ---- servers ------------------------------------------------------------------------------------


def num_admitted_of(engine: Any) -> int:
    """Return the number of requests that count as waiting for a server's engine."""
    number: int = engine._requests._admission.num_waiting
    return number


def set_request_timeout(engine: Any, seconds: float) -> None:
    """Let requests that come later to a server's engine have this time."""
    engine._requests._timeout = seconds


def startups_of(replicas: Any) -> list[Any]:
    """Return the state of the start of each replica."""
    return [replica.startup for replica in replicas._all]


def core_pid_of(replica: Any) -> int:
    """Return the process id of the engine core of a replica that Ray Serve runs."""
    pid: int = replica._engine.core_pid
    return pid


def unfinished_reads_of(reader: Any) -> dict[str, Any]:
    """Return the items that a reader of media is reading, by their keys."""
    reads: dict[str, Any] = reader._reading
    return reads


def num_answers_of(template: Any) -> int:
    """Return how many results of probes a chat template keeps."""
    return len(template._answers)


# ---- processes that answer calls, and grammars --------------------------------------------------


def num_busy_of(owner: Any) -> int:
    """Return how many processes of media workers or of a grammar compiler have work."""
    return len(owner._workers) - owner._idle.qsize()


def num_starts_of(owner: Any) -> int:
    """Return how often the fork server of a grammar compiler or of a worker was started."""
    number: int = owner._server.num_starts
    return number


def note_ended_calls(patch: pytest.MonkeyPatch, worker: Any, note: Callable[[], object]) -> None:
    """Call a function each time that the closing of a worker has tried to end a running call."""
    end_call = worker._end_call
    patch.setattr(worker, "_end_call", lambda: (end_call(), note()))


def set_time_limit(workers: Any, seconds: float) -> None:
    """Let media workers have this time for each later item."""
    workers._timeout_s = seconds


def set_compile_timeout(compiler: Any, seconds: float) -> None:
    """Let a compiler have this time for each later grammar."""
    compiler._config = replace(compiler._config, grammar_compile_timeout=seconds)


def kept_bytes_of(compiler: Any) -> int:
    """Return the size of the results that a compiler keeps."""
    num_bytes: int = compiler._results_bytes
    return num_bytes


def replace_vocabulary(patch: pytest.MonkeyPatch, vocabulary: Any) -> None:
    """Let the matchers of workers have a vocabulary without a tokenizer."""
    from vllm.structured_output.matchers import GrammarMatchers

    def ready_vocabulary(matchers: Any) -> Any:
        matchers._vocabulary = vocabulary
        return vocabulary

    patch.setattr(GrammarMatchers, "_ready_vocabulary", ready_vocabulary)


def loaded_grammars_of(matchers: Any) -> dict[bytes, Any]:
    """Return the grammars that the matchers of a worker keep, by their keys."""
    loaded: dict[bytes, Any] = matchers._loaded
    return loaded


def forget_to_leave_torch_out(patch: pytest.MonkeyPatch) -> None:
    """Let this process be one that has not left torch out, until a test says so."""
    patch.setattr("vllm.utils.imports._leaves_torch_out", False)


# ---- media in a worker --------------------------------------------------------------------------


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


# ---- sampling -----------------------------------------------------------------------------------


def sample_in_one_pass(sampler: Any, logits: Any, metadata: Any) -> tuple[Any, Any]:
    """Return tokens and largest logits of a sampler, outside of the inference mode in which it
    normally samples: the operators of that mode cannot be recorded.
    """
    sampled: tuple[Any, Any] = sampler._sample(logits, metadata, {}, None)
    return sampled


def table_and_mask_of(state: Any, row: int) -> tuple[Any, Any]:
    """Return the table of biases and the mask of allowed tokens of a row of a sampling state."""
    return state._constraints[row]._table, state._masks[row]


# ---- the CPU ------------------------------------------------------------------------------------


def program_of(runner: Any) -> Any:
    """Return the fused program of a model on the CPU, or None."""
    return runner.launches.programs.without


def decode_step_of(runner: Any) -> Any:
    """Return the decode step in one call of a runner on the CPU, or None."""
    return runner.launches.decode_steps.without


def leave_modules_alone(runner: Any) -> None:
    """Let a runner on the CPU run the modules of its model, not their fused program."""
    from vllm.worker.cpu.launches import ByItems

    # Says that the first step was already fused, so the first step does not fuse anything.
    runner.launches.is_fused = True
    runner.launches.programs = runner.launches.decode_steps = ByItems(None, None)


def leave_weights_unpacked(patch: pytest.MonkeyPatch) -> None:
    """Let workers on the CPU keep dense weights as tensors of torch, so that nothing is fused."""
    from vllm.worker.cpu.worker import CPUWorker

    patch.setattr(CPUWorker, "_dense_format", lambda worker: None)


def host_adapters_of(runner: Any) -> list[Any]:
    """Return the adapter of each slot of a runner on the CPU; None: the slot is empty."""
    from vllm.worker.parts.adapters import RaggedRows

    adapters: list[Any] = runner.parts.find(RaggedRows)._host.adapters
    return adapters


def load_kernels_again() -> Any:
    """Load the kernels of the CPU as a process does that has not loaded them."""
    from vllm.ops.cpu import library

    return library._load.__wrapped__()


def forbid_read_buffers(patch: pytest.MonkeyPatch) -> None:
    """Let a read of a checkpoint fail if it needs memory other than the memory of its tensor."""
    patch.setattr("vllm.model_executor.loader.safetensors_file._buffers", None)


def replace_ops(patch: pytest.MonkeyPatch, ops: Any) -> None:
    """Let layers call these operators while a patch lasts; None: the next platform sets some."""
    patch.setattr("vllm.ops._ops", ops)


# ---- cards --------------------------------------------------------------------------------------


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


def skip_profiling_run(patch: pytest.MonkeyPatch, launch_bytes: int) -> None:
    """Let workers of a card start without a profiling run, as if it had measured these bytes."""
    from vllm.worker.hpu.worker import HPUWorker

    patch.setattr(HPUWorker, "_profile", lambda worker, free_bytes: launch_bytes)


def runners_of(worker: Any) -> list[Any]:
    """Return the runners of a card's worker: of its model, and of its draft model."""
    runners: list[Any] = worker._runners
    return runners


def recorded_launches(runner: Any, patch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Return a list to which a runner of a card adds each launch and its result."""
    from vllm.worker import model_runner

    run = model_runner.run_launch
    launches: list[tuple[Any, Any]] = []

    def run_and_note(launch: Any, of_device: Any, begin: Any) -> Any:
        result = run(launch, of_device, begin)
        if of_device is runner.launches:
            launches.append((launch, result))
        return result

    patch.setattr(model_runner, "run_launch", run_and_note)
    return launches


def replace_kernels(module: Any, kernels: Any) -> None:
    """Let a packed weight on a card call kernels of the test, if it calls any."""
    if "_kernels" in vars(module):
        module._kernels = kernels
    if "_card" in vars(module):
        module._card = replace(module._card, kernels=kernels)


def run_prepared(launch_model: Any, prepared: Any, inputs: Any) -> Any:
    """Run the model of a card's launches with a context that the test has prepared."""
    return launch_model._run(prepared, inputs)


def bind_caches(worker: Any, num_blocks: int) -> None:
    """Give a card's worker its KV cache, without the memory plan that `allocate` needs."""
    worker._bind_caches(num_blocks)


def planner_of(warm_up: Any) -> Any:
    """Return the planner of the launches that a warm-up runs."""
    return warm_up._launches.planner


def refuse_parts_of_warm_up(patch: pytest.MonkeyPatch, refuses: Callable[[Any, Any], bool]) -> None:
    """Let the warm-up while serving give up the parts for which a function says so, as if they
    needed too much memory. The function gets the launches of the runner, and the part.
    """
    from vllm.worker.hpu.warmup.later_warmup import LaterWarmUp

    run = LaterWarmUp._run

    def run_part(later: Any, part: Any) -> str | None:
        return "no memory" if refuses(later._launches, part) else run(later, part)

    patch.setattr(LaterWarmUp, "_run", run_part)


def failed_allocations(patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which simulated cards add the bytes of each allocation that fails."""
    from gaudi_sim.card.memory import MemoryPool

    check = MemoryPool._check
    failed: list[int] = []

    def check_and_note(pool: Any, wanted_bytes: int, num_bytes: int) -> None:
        if wanted_bytes > pool.limit_bytes:
            failed.append(num_bytes)
        check(pool, wanted_bytes, num_bytes)

    patch.setattr(MemoryPool, "_check", check_and_note)
    return failed
