"""Test that several ranks give the tokens and log-probabilities of one rank, and leave nothing
behind.
"""

import os
import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.ranks import (
    ENGINE,
    PARAMS,
    PROMPTS,
    assert_death_of_a_rank_ends_requests,
    assert_nothing_left,
    assert_same,
    generate,
    random_load,
    ranks_of,
)
from tests.executor.thread_ranks import ThreadRanks
from tests.reach import core_of, scheduler_of
from tests.shared_memory import named_files
from tests.tiny_models import make_tiny_model
from vllm import LLM, SamplingParams
from vllm.engine import engine_core
from vllm.errors import ConfigError, EngineDeadError, RequestError


@pytest.mark.parametrize(
    ("family", "size", "values"),
    [
        ("llama", 4, {"vocab_size": 4097}),  # ranks share KV heads; the vocabulary is padded
        ("qwen2", 2, {}),  # this model has biases, and windows in some of the layers
        ("mixtral", 2, {}),
        ("gpt_bigcode", 2, {}),  # this family has one KV head
        ("granite_code", 2, {}),  # this family has tied embeddings
    ],
)
def test_ranks_give_the_tokens_of_one(family, size, values, tmp_path, monkeypatch):
    folder = str(make_tiny_model(family, tmp_path, **values))
    # Layers with windows have blocks of their own.
    more_blocks = ENGINE | {"num_gpu_blocks_override": 25}
    want = generate(LLM(folder, **more_blocks))
    monkeypatch.setattr(engine_core, "make_executor", ThreadRanks)
    llm = LLM(folder, tensor_parallel_size=size, **more_blocks)
    assert_same(generate(llm), want)
    core_of(llm).shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def two(folder: str) -> Iterator[LLM]:
    """Make an engine with two processes, in a program with its own socket time-out. The last test
    that uses it kills one of them.
    """
    files = named_files()
    socket.setdefaulttimeout(0.01)
    try:
        llm = LLM(folder, tensor_parallel_size=2, distributed_executor_backend="mp", **ENGINE)
    finally:
        socket.setdefaulttimeout(None)
    pids = ranks_of(llm)
    yield llm
    core_of(llm).shutdown()
    assert_nothing_left(pids, files)


def test_processes_give_the_tokens_of_one(two, folder):
    want = generate(LLM(folder, **ENGINE))
    assert_same(generate(two), want)
    assert_same(generate(two), want)  # the prompts are in the prefix cache now


def test_a_random_load_with_cancellation_gives_what_each_request_gets_alone(two, folder):
    rng, one = random.Random(3), LLM(folder, **ENGINE)
    want = [output.outputs[0].token_ids for output in generate(one)]
    scheduler = scheduler_of(two)
    before = scheduler.num_preemptions
    got = random_load(two, rng)
    assert len(got) > 12 and scheduler.num_preemptions > before
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
    # the engine continues after these errors
    assert_same(generate(two)[:1], generate(two)[:1])


def test_a_rank_that_is_killed_ends_all_requests_at_once(two):
    assert_death_of_a_rank_ends_requests(two)


def test_a_rank_that_cannot_load_is_one_error_that_names_it(folder):
    files, before = named_files(), psutil.Process().children()
    with pytest.raises(ConfigError, match=r"^rank 1: no memory for the weights of this rank$"):
        LLM(
            folder,
            tensor_parallel_size=2,
            worker_cls="tests.executor.failing_workers.RaisesInLoad",
            **ENGINE,
        )
    left = {child.pid for child in psutil.Process().children()} - {c.pid for c in before}
    assert_nothing_left(sorted(left), files)


@pytest.mark.usefixtures("new_interpreters")
def test_a_rank_that_is_stopped_is_named_when_time_is_up(folder):
    files = named_files()
    # With bfloat16 weights a forward pass is one call into C++, which has to return when a rank
    # stops.
    settings = ENGINE | {"dtype": "bfloat16", "distributed_timeout_s": 1.0}
    llm = LLM(folder, tensor_parallel_size=2, **settings)
    (pid,) = ranks_of(llm)
    os.kill(pid, signal.SIGSTOP)
    stopped = rf"rank 1 \(process {pid}\) is stopped.*all_reduce on rank 0.* within 1.0 s"
    with pytest.raises(EngineDeadError, match=stopped):
        llm.generate({"prompt_token_ids": PROMPTS[0]}, PARAMS[0], use_tqdm=False)
    core_of(llm).shutdown()
    assert_nothing_left([pid], files)


def test_ranks_end_with_their_engine(folder, tmp_path):
    """A killed engine cannot send its ranks a message."""
    import subprocess
    import sys

    program = f"""
from pathlib import Path
from tests.reach import pids_of
from vllm import LLM
if __name__ == "__main__":
    llm = LLM({folder!r}, tensor_parallel_size=2, **{ENGINE!r})
    print(pids_of(llm)[0], flush=True)
    input()
"""
    path = Path(tmp_path, "program.py")
    path.write_text(program)
    with subprocess.Popen(
        [sys.executable, str(path)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        rank = psutil.Process(int(process.stdout.readline()))
        os.kill(rank.pid, signal.SIGSTOP)
        process.kill()
        psutil.wait_procs([rank], timeout=60)
        assert not rank.is_running()
