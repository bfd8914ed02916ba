"""A load for engines with several ranks, and comparisons of its results."""

import os
import random
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.reach import pids_of
from tests.shared_memory import assert_no_new_files
from vllm import LLM, RequestOutput, SamplingParams
from vllm.errors import EngineDeadError

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 12,
    "skip_tokenizer_init": True,
    "use_tqdm_on_load": False,
}
"""Prompts are cut into chunks, and requests are preempted."""

PROMPTS = [list(range(20, 20 + n)) for n in (1, 7, 18, 40, 41, 60)]
PARAMS = [
    SamplingParams(
        temperature=0.8 * (n % 2),
        seed=n,
        max_tokens=20,
        ignore_eos=True,
        detokenize=False,
        logprobs=3,
        prompt_logprobs=2 if n == 3 else None,
        presence_penalty=0.5 * (n % 3),
    )
    for n in range(len(PROMPTS))
]


def generate(llm: LLM) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": p} for p in PROMPTS], PARAMS, use_tqdm=False)


def logprobs_of(output: RequestOutput) -> list[dict[int, float]]:
    (sample,) = output.outputs
    positions = [p for p in (output.prompt_logprobs or []) if p is not None]
    positions += sample.logprobs or []
    return [{token: found.logprob for token, found in each.items()} for each in positions]


def assert_same(
    got: list[RequestOutput], want: list[RequestOutput], tolerance: float = 1e-4
) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        for mine, other in zip(logprobs_of(ours), logprobs_of(theirs), strict=True):
            assert mine == pytest.approx(other, rel=0, abs=tolerance)


def random_load(
    llm: LLM, rng: random.Random, before_step: Callable[[], None] = lambda: None
) -> dict[int, list[int]]:
    """Run 24 requests, some of which are cancelled. Return index of the request -> token ids."""
    engine, todo, got = llm.llm_engine, list(range(24)), {}
    while todo or engine.has_unfinished_requests():
        for _ in range(min(len(todo), rng.randint(0, 4))):
            index = todo.pop()
            place = index % len(PROMPTS)
            engine.add_request(str(index), {"prompt_token_ids": PROMPTS[place]}, PARAMS[place])
        if rng.random() < 0.1:
            engine.abort_request(str(rng.randrange(24)))
        before_step()
        for output in engine.step():
            if output.finished:
                got[int(output.request_id)] = list(output.outputs[0].token_ids)
    return got


def ranks_of(llm: LLM) -> list[int]:
    return pids_of(llm)


def assert_death_of_a_rank_ends_requests(llm: LLM) -> None:
    """Kill the second of two ranks while a request runs, and check the error."""
    engine = llm.llm_engine
    engine.add_request("a", {"prompt_token_ids": PROMPTS[0]}, PARAMS[0])
    engine.step()
    (pid,) = ranks_of(llm)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        EngineDeadError, match=rf"rank 1 \(process {pid}\) has ended: killed by signal 9"
    ):
        while engine.has_unfinished_requests():
            engine.step()


def assert_nothing_left(pids: list[int], files: set[str]) -> None:
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert_no_new_files(files)
