"""An engine core without a model, and the config around it."""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tests.engine.tokenizers_for_tests import BUNDLED_MODEL
from vllm.config import CacheConfig, ModelArch, ModelConfig, SchedulerConfig, VllmConfig
from vllm.errors import CapacityError, EngineAsleepError
from vllm.executor.ranks.worker_call import call_worker
from vllm.messages import (
    EngineOutput,
    EngineRequest,
    Finished,
    FinishReason,
    LogprobRows,
    SchedulerStats,
)

TAGS = ("weights", "kv_cache")
Reply = Callable[[EngineRequest], list[int]]


def make_config(max_model_len: int = 64, **model: Any) -> VllmConfig:
    """The bundled model, with room for `max_model_len` tokens."""
    hf_config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    return VllmConfig(
        model=ModelConfig(
            model="stdlib",
            served_model_name=("stdlib",),
            arch=ModelArch.from_hf(hf_config),
            path=str(BUNDLED_MODEL),
            max_model_len=max_model_len,
            **model,
        ),
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(
            max_model_len=max_model_len, max_num_seqs=8, max_num_batched_tokens=64
        ),
    )


def logprob_rows(token_ids: Iterable[int], num_top: int = 0) -> LogprobRows:
    """One position per token, each the likeliest of its position, then 1, 2, 3, ..."""
    ids = [[token_id, token_id, *range(1, num_top)][: 1 + num_top] for token_id in token_ids]
    shape = (len(ids), 1 + num_top)
    return LogprobRows(
        token_ids=np.array(ids, np.int32).reshape(shape),
        logprobs=np.tile(-0.5 * np.arange(1, 2 + num_top, dtype=np.float32), (len(ids), 1)),
        ranks=np.ones(len(ids), np.int32),
    )


class FakeEngineCore:
    """Replies with a script, one token per request and step; ends requests as the real one does.

    Args:
        reply: the tokens of a request, cycled when they run out.
        capacity: prompt and output tokens a request may have at most.

    Attributes:
        added: every request taken, by id.
        aborted: ids of requests that were there when aborted.
        fail: raised by the next step, once.
        errors: request id -> message; the request fails instead of giving its next token.
        worker: whose methods can be called.
    """

    def __init__(self, reply: Reply = lambda request: [10], capacity: int = 10**6) -> None:
        self.reply = reply
        self.capacity = capacity
        self.added: dict[str, EngineRequest] = {}
        self.running: dict[str, EngineRequest] = {}
        self.aborted: list[str] = []
        self.fail: BaseException | None = None
        self.errors: dict[str, str] = {}
        self.calls: Counter[str] = Counter()
        self.worker: Any = object()
        self.sleeping_tags: list[str] = []
        self._num_output: Counter[str] = Counter()

    def add_request(self, request: EngineRequest) -> None:
        if self.sleeping_tags:
            raise EngineAsleepError(self.sleeping_tags)
        if request.max_total_tokens > self.capacity:
            raise CapacityError(f"needs {request.max_total_tokens} tokens of {self.capacity}")
        self.added[request.request_id] = self.running[request.request_id] = request

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self.running.pop(request_id, None) is not None:
                self.aborted.append(request_id)

    def check_health(self) -> None:
        """Its workers never fail by themselves."""

    def has_idle_work(self) -> bool:
        return False

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def reset_prefix_cache(self) -> bool:
        return not self.running

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None) -> list[Any]:
        return [call_worker(self.worker, method, args, kwargs or {})]

    def call_workers(self, method, args=(), kwargs=None) -> list[Any]:
        return self.collective_rpc(method, None, args, kwargs)

    def sleep(self, level: int = 1) -> None:
        if self.running:
            raise CapacityError(f"{len(self.running)} requests run", status=409)
        self.sleeping_tags = ["weights", "kv_cache"]

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.sleeping_tags = [tag for tag in self.sleeping_tags if tag not in (tags or TAGS)]

    def is_sleeping(self) -> bool:
        return bool(self.sleeping_tags)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(num_running=len(self.running), num_kv_blocks=100)

    def shutdown(self) -> None:
        self.calls["shutdown"] += 1

    def step(self) -> EngineOutput:
        self.calls["step"] += 1
        if self.fail is not None:
            failure, self.fail = self.fail, None
            raise failure
        ids: list[str] = []
        tokens: list[int] = []
        finished = {
            i: Finished(FinishReason.ERROR, error=self.errors[i])
            for i in self.running
            if i in self.errors
        }
        logprobs: dict[str, LogprobRows] = {}
        prompt_logprobs: dict[str, LogprobRows] = {}
        cached: dict[str, int] = {}
        for request_id, request in self.running.items():
            if request_id in finished:
                continue
            count = self._num_output[request_id]
            script = self.reply(request)
            token_id = script[count % len(script)]
            params = request.sampling_params
            if count == 0:
                cached[request_id] = 4
                if params.prompt_logprobs is not None:
                    prompt_logprobs[request_id] = logprob_rows(
                        request.prompt_token_ids[1:], params.prompt_logprobs
                    )
            if params.logprobs is not None:
                logprobs[request_id] = logprob_rows([token_id], params.logprobs)
            ids.append(request_id)
            tokens.append(token_id)
            self._num_output[request_id] = count + 1
            if (end := self._end(request, token_id, count + 1)) is not None:
                finished[request_id] = end
        for request_id in finished:
            del self.running[request_id]
        return EngineOutput(
            request_ids=ids,
            token_ids=tokens,
            finished=finished,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=cached,
        )

    def _end(self, request: EngineRequest, token_id: int, num_output: int) -> Finished | None:
        if token_id == request.eos_token_id:
            return Finished(FinishReason.STOP)
        if token_id in request.stop_token_ids:
            return Finished(FinishReason.STOP, token_id)
        if len(request.prompt_token_ids) + num_output >= request.max_total_tokens:
            return Finished(FinishReason.LENGTH)
        return None
