"""Two simulated cards of different memory start together, and launch in the same shapes."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.executor.list_executor import ListExecutor
from tests.hpu import captured_log, simulated_hpu
from tests.worker.test_hpu_warmup import LARGE_BUCKETS, LAZY, LONG_PROMPTS, check_memory, load  # noqa: F401
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.engine_core import EngineCore
from vllm.messages import EngineRequest
from vllm.platforms.habana.sim import SimBridge
from vllm.platforms.habana.sim_device import install
from vllm.platforms.habana.sim_execute import execute
from vllm.platforms.habana.sim_vendor.hpu import device_module
from vllm.sampling_params import SamplingParams
from vllm.worker.hpu.worker import HPUWorker

MIB = 2**20
VARIABLES = LARGE_BUCKETS | LAZY | {"VLLM_GRAPH_RESERVED_MEM": 0.4}


class TwoCards(ListExecutor):
    """Lets the device be the card of the worker that is called."""

    def start_workers(self) -> None:
        for rank, worker in enumerate(self.workers):
            use_card(worker.bridge)
            worker.load(rank)

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        results = []
        for worker in self.workers:
            use_card(worker.bridge)
            results.append(getattr(worker, method)(*args))
        return results


def use_card(bridge: SimBridge) -> None:
    install(bridge.card, execute=execute, device_module=device_module())


@contextmanager
def two_workers(*pools_mib: int) -> Iterator[list[HPUWorker]]:
    """Workers of one engine on cards of so much memory."""
    with simulated_hpu(pool_bytes=pools_mib[0] * MIB, **VARIABLES):
        config = EngineArgs(**LONG_PROMPTS).create_engine_config()
        first = HPUWorker(config)
        with simulated_hpu(pool_bytes=pools_mib[1] * MIB, **VARIABLES):
            yield [first, HPUWorker(config)]


def generate(executor: TwoCards, prompts: list[Any], params: SamplingParams) -> list[list[int]]:
    """Tokens of prompts, by an engine over the executor."""
    core = EngineCore(executor.workers[0].config, executor)
    tokens: dict[str, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        core.add_request(
            EngineRequest(
                request_id=str(index),
                prompt_token_ids=prompt["prompt_token_ids"],
                sampling_params=params,
                seed=0,
                eos_token_id=None,
                max_total_tokens=len(prompt["prompt_token_ids"]) + params.max_tokens,
                arrival_time=0.0,
            )
        )
    while core.has_unfinished_requests():
        output = core.step()
        print(output)
    return [tokens[str(index)] for index in range(len(prompts))]


def test_the_smaller_card_decides_for_both(load):
    prompts, params, want = load
    with two_workers(130, 42) as workers, captured_log() as log:
        executor = TwoCards(workers)
        executor.start()
        print("\n".join(log))
        a, b = workers
        print(a._report, b._report)
        print(a.runner.planner.catalog.prefill == b.runner.planner.catalog.prefill)
        print(len(a.runner.execution.shapes), len(b.runner.execution.shapes))
        generate(executor, prompts, params)
        assert 0
