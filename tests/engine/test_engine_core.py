"""The loop, over an executor without a model."""

import numpy as np
import pytest

from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.engine.engine_core import EngineCore
from vllm.errors import EngineDeadError
from vllm.executor import Executor
from vllm.messages import EngineRequest, FinishReason, ModelRunnerOutput, SchedulerOutput
from vllm.sampling_params import SamplingParams


class FakeHandle:
    def __init__(self, output: ModelRunnerOutput) -> None:
        self.output = output

    def result(self) -> ModelRunnerOutput:
        return self.output


class FakeExecutor(Executor):
    """Every row that reaches its end samples token 7; raises in step `fails_at`."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.is_shut_down = False
        self.is_preloaded = False
        self.num_tokens: dict[int, int] = {}

    def initialize_cache(self) -> int:
        return 20

    def execute_model(self, step: SchedulerOutput) -> FakeHandle:
        if step.step_id == self.fails_at:
            raise RuntimeError("device lost")
        for new in step.new_requests:
            self.num_tokens[new.row] = len(new.request.prompt_token_ids)
        rows = []
        for row, start, count in zip(
            step.rows.tolist(),
            step.num_computed_tokens.tolist(),
            step.num_scheduled_tokens.tolist(),
            strict=True,
        ):
            if start + count == self.num_tokens[row]:
                rows.append(row)
                self.num_tokens[row] += 1
        return FakeHandle(
            ModelRunnerOutput(
                step_id=step.step_id,
                rows=np.array(rows, np.int32),
                token_ids=np.full(len(rows), 7, np.int32),
            )
        )

    def preload(self) -> None:
        self.is_preloaded = True

    def shutdown(self) -> None:
        self.is_shut_down = True


def make_core(fails_at: int | None = None) -> EngineCore:
    config = VllmConfig(
        model=ModelConfig(),
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(max_model_len=32, max_num_seqs=4, max_num_batched_tokens=32),
    )
    return EngineCore(config, FakeExecutor(fails_at))


def make_request(request_id: str, max_tokens: int = 3, eos: int | None = None) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        eos_token_id=eos,
        max_total_tokens=3 + max_tokens,
        arrival_time=0.0,
    )


def test_requests_run_until_each_has_its_reason_to_end():
    core = make_core()
    core.add_request(make_request("long"))
    core.add_request(make_request("stops", eos=7))
    tokens: dict[str, list[int]] = {"long": [], "stops": []}
    reasons = {}
    while core.has_unfinished_requests():
        output = core.step()
        for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            tokens[request_id].append(token_id)
        reasons.update({name: end.reason for name, end in output.finished.items()})
    assert tokens == {"long": [7, 7, 7], "stops": [7]}
    assert reasons == {"long": FinishReason.LENGTH, "stops": FinishReason.STOP}


def test_an_idle_engine_does_nothing():
    output = make_core(fails_at=0).step()
    assert output.request_ids == [] and output.finished == {}


def test_an_aborted_request_is_gone_at_once():
    core = make_core()
    core.add_request(make_request("a"))
    core.step()
    core.abort_requests(["a", "never seen"])
    assert not core.has_unfinished_requests()
    assert core.reset_prefix_cache()


def test_the_prefix_cache_is_not_reset_under_a_running_request():
    core = make_core()
    core.add_request(make_request("a"))
    core.step()
    assert not core.reset_prefix_cache()


def test_a_failed_step_stops_the_engine_with_the_cause():
    core = make_core(fails_at=1)
    core.add_request(make_request("a"))
    core.step()
    with pytest.raises(EngineDeadError, match="device lost"):
        core.step()
    with pytest.raises(EngineDeadError, match="device lost"):
        core.add_request(make_request("b"))
    with pytest.raises(EngineDeadError):
        core.step()


def test_shutdown_lets_the_workers_go():
    core = make_core()
    core.shutdown()
    assert core.executor.is_shut_down


def test_preloading_is_left_to_the_workers():
    core = make_core()
    assert core.preload()
    assert core.executor.is_preloaded
