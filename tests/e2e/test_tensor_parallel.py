"""Several ranks give the tokens and log-probabilities of one, and nothing is left of them."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.executor.thread_ranks import ThreadRanks
from tests.tiny_models import make_tiny_model
from vllm import LLM, RequestOutput, SamplingParams
from vllm.engine import engine_core
from vllm.errors import ConfigError, EngineDeadError, RequestError

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


def assert_same(got: list[RequestOutput], want: list[RequestOutput]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        for mine, other in zip(logprobs_of(ours), logprobs_of(theirs), strict=True):
            assert mine == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize(
    ("family", "size", "values"),
    [
        ("llama", 4, {"vocab_size": 4097}),  # shared KV heads, a padded vocabulary
        ("qwen2", 2, {}),  # biases; windows in some of the layers
        ("mixtral", 2, {}),
        ("gpt_bigcode", 2, {}),  # one KV head
        ("granite_code", 2, {}),  # tied embeddings
    ],
)
def test_ranks_give_the_tokens_of_one(family, size, values, tmp_path, monkeypatch):
    folder = str(make_tiny_model(family, tmp_path, **values))
    more_blocks = ENGINE | {"num_gpu_blocks_override": 25}  # for layers with windows of their own
    want = generate(LLM(folder, **more_blocks))
    monkeypatch.setattr(engine_core, "make_executor", ThreadRanks)
    llm = LLM(folder, tensor_parallel_size=size, **more_blocks)
    assert_same(generate(llm), want)
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("llama", tmp_path_factory.mktemp("llama")))


def ranks_of(llm: LLM) -> list[int]:
    return llm.llm_engine.engine_core.executor._ranks.pids


def assert_nothing_left(pids: list[int], files: set[str]) -> None:
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert set(os.listdir("/dev/shm")) <= files


@pytest.fixture(scope="module")
def two(folder: str) -> Iterator[LLM]:
    """An engine of two processes; the last of its tests kills one."""
    files = set(os.listdir("/dev/shm"))
    llm = LLM(folder, tensor_parallel_size=2, distributed_executor_backend="mp", **ENGINE)
    pids = ranks_of(llm)
    yield llm
    llm.llm_engine.engine_core.shutdown()
    assert_nothing_left(pids, files)


def test_processes_give_the_tokens_of_one(two, folder):
    want = generate(LLM(folder, **ENGINE))
    assert_same(generate(two), want)
    assert_same(generate(two), want)  # from the prefix cache


def test_a_random_load_with_cancellation_gives_what_each_request_gets_alone(two, folder):
    rng, one = random.Random(3), LLM(folder, **ENGINE)
    want = [output.outputs[0].token_ids for output in generate(one)]
    engine, todo, got = two.llm_engine, list(range(24)), {}
    before = engine.engine_core.scheduler.num_preemptions
    while todo or engine.has_unfinished_requests():
        for _ in range(min(len(todo), rng.randint(0, 4))):
            index = todo.pop()
            place = index % len(PROMPTS)
            engine.add_request(str(index), {"prompt_token_ids": PROMPTS[place]}, PARAMS[place])
        if rng.random() < 0.1:
            engine.abort_request(str(rng.randrange(24)))
        for output in engine.step():
            if output.finished:
                got[int(output.request_id)] = output.outputs[0].token_ids
    assert len(got) > 12 and engine.engine_core.scheduler.num_preemptions > before
    for index, token_ids in got.items():
        assert token_ids == want[index % len(PROMPTS)]


def test_a_call_reaches_every_rank_and_code_is_refused(two):
    assert two.collective_rpc("sleeping_tags") == [[], []]
    with pytest.raises(RequestError, match="cannot send a function"):
        two.collective_rpc(lambda worker: worker.rank)
    with pytest.raises(RequestError, match="have no method 'nothing'"):
        two.collective_rpc("nothing")
    params = SamplingParams(logits_processors=[lambda ids, logits: logits])
    with pytest.raises(RequestError, match="logits_processors cannot be used with several workers"):
        two.generate({"prompt_token_ids": [5]}, params, use_tqdm=False)
    assert_same(generate(two)[:1], generate(two)[:1])  # it goes on


def test_a_rank_that_is_killed_ends_all_requests_at_once(two):
    engine = two.llm_engine
    engine.add_request("a", {"prompt_token_ids": PROMPTS[0]}, PARAMS[0])
    engine.step()
    (pid,) = ranks_of(two)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=rf"rank 1 \(process {pid}\) was ended by signal 9"):
        while engine.has_unfinished_requests():
            engine.step()


def test_a_rank_that_cannot_load_is_one_error_that_names_it(folder):
    files, before = set(os.listdir("/dev/shm")), psutil.Process().children()
    with pytest.raises(ConfigError, match=r"^rank 1: no memory for the weights of this rank$"):
        LLM(
            folder,
            tensor_parallel_size=2,
            worker_cls="tests.executor.failing_workers.RaisesInLoad",
            **ENGINE,
        )
    left = {child.pid for child in psutil.Process().children()} - {c.pid for c in before}
    assert_nothing_left(sorted(left), files)


def test_a_rank_that_is_stopped_is_named_when_time_is_up(folder):
    files = set(os.listdir("/dev/shm"))
    llm = LLM(folder, tensor_parallel_size=2, distributed_timeout_s=1.0, **ENGINE)
    (pid,) = ranks_of(llm)
    os.kill(pid, signal.SIGSTOP)
    stopped = rf"rank 1 \(process {pid}\) is stopped.*rank 1 has not come within 1.0 s"
    with pytest.raises(EngineDeadError, match=stopped):
        llm.generate({"prompt_token_ids": PROMPTS[0]}, PARAMS[0], use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    assert_nothing_left([pid], files)


def test_ranks_end_with_their_engine(folder, tmp_path):
    """Killed, it can tell them nothing."""
    import subprocess
    import sys

    program = f"""
from pathlib import Path
from vllm import LLM
if __name__ == "__main__":
    llm = LLM({folder!r}, tensor_parallel_size=2, **{ENGINE!r})
    print(llm.llm_engine.engine_core.executor._ranks.pids[0], flush=True)
    input()
"""
    path = Path(tmp_path, "program.py")
    path.write_text(program)
    with subprocess.Popen(
        [sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        rank = psutil.Process(int(process.stdout.readline()))
        os.kill(rank.pid, signal.SIGSTOP)
        process.kill()
        psutil.wait_procs([rank], timeout=60)
        assert not rank.is_running()
