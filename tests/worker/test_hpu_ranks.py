"""Test two simulated cards with different memory: they start together, and run forward passes of
the same shapes.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gaudi_sim.bridge import SimBridge
from gaudi_sim.card.device import install
from gaudi_sim.execute import execute
from gaudi_sim.vendor.hpu import device_module
from tests.executor.list_executor import ListExecutor
from tests.hpu import captured_log, simulated_hpu
from tests.reach import report_of
from tests.worker.test_hpu_warmup import LARGE_BUCKETS, LAZY, LONG_PROMPTS, check_memory
from vllm.bucketing import MemoryClass, Phase
from vllm.cost_model import constants
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.engine_core import EngineCore
from vllm.executor import StepHandleLike, Worker
from vllm.messages import EngineRequest, SchedulerOutput
from vllm.sampling_params import SamplingParams
from vllm.worker.hpu.worker import HPUWorker

MIB = 2**20
VARIABLES = LARGE_BUCKETS | LAZY
VARIABLES |= {
    "VLLM_DECODE_BS_BUCKET_MIN": 8,
    "VLLM_GRAPH_RESERVED_MEM": 0.65,
    "VLLM_GRAPH_PROMPT_RATIO": 0.4,
}
LARGE_MIB, SMALL_MIB = 130, 72


def use_card(bridge: SimBridge) -> None:
    """Make this card the device of this process."""
    install(bridge.card, execute=execute, device_module=device_module())


class TwoCards(ListExecutor):
    """Calls each worker on its own card, and checks that both have the same result.

    Both run the whole model, because nothing is shared between them.
    """

    def start_workers(self) -> None:
        for rank, worker in enumerate(self.workers):
            use_card(worker.bridge)
            worker.load(rank)

    def call_workers(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        results = []
        for worker in self.workers:
            use_card(worker.bridge)
            results.append(getattr(worker, method.__name__)(*args))
        return results

    def execute_model(self, step: SchedulerOutput) -> StepHandleLike:
        first, second = handles = self.call_workers(Worker.execute_model, step)
        for worker, handle in zip(self.workers, handles, strict=True):
            use_card(worker.bridge)
            handle.result()
        assert first.result().token_ids.tolist() == second.result().token_ids.tolist()
        return first


@contextmanager
def two_workers(*pools_mib: int) -> Iterator[list[HPUWorker]]:
    """Start workers of one engine on cards with these sizes of memory."""
    with simulated_hpu(pool_bytes=pools_mib[0] * MIB, **VARIABLES):
        config = EngineArgs(**LONG_PROMPTS | {"max_num_seqs": 8}).create_engine_config()
        first = HPUWorker(config)
        with simulated_hpu(pool_bytes=pools_mib[1] * MIB, **VARIABLES):
            yield [first, HPUWorker(config)]


def num_blocks(worker: HPUWorker) -> int:
    """Return the largest number of blocks for which the worker has memory."""
    return report_of(worker).num_blocks


def generate(core: EngineCore, lengths: list[int], num_tokens: int) -> int:
    """Run random prompts of these lengths; return the number of output tokens of each."""
    rng = random.Random(1)
    for length in lengths:
        core.add_request(
            EngineRequest(
                request_id=f"prompt of {length}",
                prompt_token_ids=rng.choices(range(16, 4000), k=length),
                sampling_params=SamplingParams(max_tokens=num_tokens, temperature=0),
                seed=0,
                eos_token_id=None,
                max_total_tokens=length + num_tokens,
                arrival_time=0.0,
            )
        )
    count = 0
    while core.has_unfinished_requests():
        count += len(core.step().token_ids)
    return count


@pytest.mark.usefixtures("all_layers")
def test_the_smaller_card_decides_for_both_and_all_is_still_served(monkeypatch):
    monkeypatch.setattr(constants, "GRAPH_BYTES_PER_OP", 10_000)  # more than the small card has
    with two_workers(LARGE_MIB, SMALL_MIB) as workers, captured_log() as log:
        core = EngineCore(workers[0].config, TwoCards(workers))
        for worker in workers:
            use_card(worker.bridge)
            check_memory(worker)
        before = [worker.bridge.counters().compilations for worker in workers]
        assert generate(core, [100, 500], 4) == 8
        assert [worker.bridge.counters().compilations for worker in workers] == before
    large, small = workers
    with_null_block = core.stats().num_kv_blocks + 1
    assert with_null_block == num_blocks(small) < num_blocks(large)
    # Only the small card lacks memory for these graphs and for this bucket.
    lost = [line for line in log if line.startswith("The bucket prefill (2, 512, 0) is not used")]
    assert (
        len(lost) == 2
        and lost[0] == lost[1]
        and lost[0].endswith("reserved for forward passes (rank 1)")
    )
    catalogs = [worker.runner.launches.planner.catalog for worker in workers]
    assert catalogs[0].prefill == catalogs[1].prefill
    assert catalogs[0].decode == catalogs[1].decode
    omitted = [line for line in log if line.startswith("no graph for")]
    assert len(omitted) % 2 == 0 and omitted == omitted[: len(omitted) // 2] * 2
    shapes = [worker.runner.launches.execution.shapes for worker in workers]
    assert shapes[0] == shapes[1] and {s.bucket.phase for s in shapes[0]} == set(Phase)
    assert omitted and small.ledger.left(MemoryClass.PREFILL_GRAPHS) < 10 * MIB
    # The large card had memory for more graphs.
    assert large.ledger.left(MemoryClass.PREFILL_GRAPHS) > 10 * MIB
