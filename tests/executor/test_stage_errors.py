"""Test that images which the first stage of a pipeline cannot encode fail their requests, although
tokens come from the last stage.
"""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from torch.distributed import HashStore

from tests.reach import replace_ray, replace_worker, set_has_media
from vllm.distributed import Rendezvous
from vllm.engine.arg_utils import EngineArgs
from vllm.executor.external import ExternalExecutor
from vllm.executor.ranks.rank_wire import StepResult
from vllm.executor.ray.executor import RayExecutor
from vllm.message_codec import encode
from vllm.messages import ModelRunnerOutput, RunnerStats

REASON = "an image cannot be encoded"


def output_of(rows=(), **fields):
    rows = np.array(rows, np.int32)
    return ModelRunnerOutput(step_id=7, rows=rows, token_ids=rows + 10, **fields)


FIRST, LAST = output_of(errors={2: REASON}), output_of([1, 2, 3], errors={3: "NaN"})


def config_of(backend):
    return EngineArgs(
        pipeline_parallel_size=2, distributed_executor_backend=backend
    ).create_engine_config()


def is_joined(output):
    assert output.rows.tolist() == [1, 2, 3]
    return output.errors == {2: REASON, 3: "NaN"}


class Answers:
    """A stand-in for Ray whose answers arrive in the given order."""

    def __init__(self, order):
        self.order, self.sent = order, []

    def wait(self, refs, num_returns, timeout):
        return [next(ref for ref in self.order if ref in refs)], []

    def get(self, refs):
        return [
            [encode(StepResult(output=given, stats=RunnerStats()))] if given else []
            for given in ({"first": FIRST, "last": LAST}.get(ref) for ref in refs)
        ]

    def remote(self, message):
        self.sent.append(message)
        return f"told {len(self.sent)}"


@pytest.mark.parametrize("order", [("first", "last", "told 1"), ("told 1", "last", "first")])
def test_ray_waits_for_the_result_of_both_stages(order):
    executor = RayExecutor(config_of("ray"))
    ray = Answers(order)
    replace_ray(executor, ray, [SimpleNamespace(handle=ray)] * 2, unread={"told 1": 0})
    assert is_joined(executor.finish_step(["first", "last"]))
    assert len(ray.sent) == 1, "the first stage is told the tokens"


@pytest.mark.parametrize("has_media", [True, False])
def test_every_process_of_a_launcher_gets_the_errors_of_the_first_stage(has_media, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    executors = []
    store = HashStore()
    monkeypatch.setattr(Rendezvous, "at", lambda *_, **__: SimpleNamespace(store=store))
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        executor = ExternalExecutor(config_of("external_launcher"))
        set_has_media(executor, has_media)
        step = SimpleNamespace(result=lambda rank=rank: (FIRST, LAST)[rank])
        replace_worker(
            executor,
            SimpleNamespace(execute_model=lambda _, step=step: step, record_tokens=lambda _: None),
        )
        executors.append(executor)
    with ThreadPoolExecutor(2) as threads:
        for _ in range(9):  # values that all ranks have read are removed from the store
            found = threads.map(lambda each: each.execute_model(None).result(), executors)
            assert [is_joined(output) for output in found] == [has_media] * 2
    assert store.num_keys() < 15
