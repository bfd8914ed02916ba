"""Test two simulated cards, one process for each, under a random load, and with failures of one
card.
"""

import asyncio
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil
import pytest

from tests.e2e.ranks import (
    PARAMS,
    PROMPTS,
    assert_nothing_left,
    generate,
    random_load,
    ranks_of,
)
from tests.e2e.server import start_server, wait_until
from tests.e2e.test_server_faults import answers_around
from tests.hpu import (
    FEW_BUCKETS,
    SMALL_ENGINE,
    needs_simulated_device,
    simulated_hpu,
    steps_in_flight,
)
from tests.reach import core_of, scheduler_of
from tests.shared_memory import named_files
from tests.tiny_models import make_tiny_model
from vllm import LLM
from vllm.env import ranks as env_ranks
from vllm.errors import ConfigError, EngineDeadError

pytestmark = pytest.mark.usefixtures("preloaded")

FAILING = "tests.executor.failing_workers"
ENGINE: dict[str, Any] = SMALL_ENGINE | {
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 12,  # few blocks, so that requests are preempted
    "tensor_parallel_size": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("llama", tmp_path_factory.mktemp("llama")))


@contextmanager
def several_cards(folder: str, **values: Any) -> Iterator[Callable[[], LLM]]:
    """Start an engine with two cards, or with as many as `values` say, and check afterwards that
    nothing of it is left.
    """
    files, before = named_files(), set(psutil.Process().children())
    started: list[LLM] = []

    def start() -> LLM:
        started.append(LLM(folder, device="hpu", **ENGINE | values))
        return started[0]

    with pytest.MonkeyPatch.context() as patch:
        for name, value in env_ranks.rank_variables(0, 1).items():
            # An engine changes these variables; the patch restores them afterwards.
            patch.setenv(name, value)
        with simulated_hpu(PT_HPU_LAZY_MODE=1, PT_HPU_ENABLE_LAZY_COLLECTIVES=True, **FEW_BUCKETS):
            yield start
            for llm in started:
                core_of(llm).shutdown()
    left = set(psutil.Process().children()) - before
    assert_nothing_left([process.pid for process in left], files)


def fill_in_the_middle(llm: LLM) -> None:
    """Send requests until the card of rank 1 has no free memory."""
    engine = llm.llm_engine
    for n, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(n), {"prompt_token_ids": prompt}, params)
    engine.step()
    llm.collective_rpc("fill")


def tokens_of_one(folder: str) -> list[list[int]]:
    """Return the tokens for each prompt, on the CPU in one process."""
    llm = LLM(folder, device="cpu", **ENGINE | {"tensor_parallel_size": 1})
    return [list(output.outputs[0].token_ids) for output in generate(llm)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama", {"pipeline_parallel_size": 2, "tensor_parallel_size": 1}),
        ("llama", {"pipeline_parallel_size": 2}),
        ("mixtral", {"enable_expert_parallel": True}),
        ("qwen3_moe", {"enable_expert_parallel": True, "pipeline_parallel_size": 2}),
        ("bamba", {"pipeline_parallel_size": 2}),
    ],
)
def test_a_random_load_on_several_cards_compiles_nothing_and_has_the_tokens_of_one(
    family, values, tmp_path
):
    folder = str(make_tiny_model(family, tmp_path))
    want = tokens_of_one(folder)
    extension = "tests.executor.late_compilations.LateCompilations"
    values = values | {"sampling_warmup": "all", "worker_extension_cls": extension}
    with several_cards(folder, **values) as start:
        llm = start()
        got = random_load(llm, random.Random(3))
        scheduler = scheduler_of(llm)
        assert len(got) > 12 and scheduler.num_preemptions
        for index, token_ids in got.items():
            assert token_ids == want[index % len(PROMPTS)]
        assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_usable_blocks
        assert set(llm.collective_rpc("late_compilations")) == {0}
        first, *others = llm.collective_rpc("warmed_buckets")
        assert first and others == [first] * len(others)


@pytest.mark.parametrize(
    "num_drafts",
    [0, pytest.param(3, marks=pytest.mark.exhaustive)],
    ids=["tokens in flight", "drafts in flight"],
)
def test_a_random_load_gives_what_each_request_gets_alone_until_a_card_is_killed(
    folder, num_drafts
):
    want = tokens_of_one(folder)
    drafts = {"model": folder, "num_speculative_tokens": num_drafts, "adaptive": False}
    values = {"speculative_config": drafts} if num_drafts else {}
    with several_cards(folder, **values) as start, steps_in_flight():
        llm = start()
        scheduler = scheduler_of(llm)
        got = random_load(llm, random.Random(3))
        assert len(got) > 12 and scheduler.num_preemptions
        for index, token_ids in got.items():
            assert token_ids == want[index % len(PROMPTS)]
        (pid,) = ranks_of(llm)
        signals = iter([None, None, None, signal.SIGKILL])
        with pytest.raises(EngineDeadError, match=rf"rank 1 \(process {pid}\) has ended: kill"):
            random_load(llm, random.Random(4), lambda: send(pid, next(signals, None)))


def send(pid: int, signum: int | None) -> None:
    if signum is not None:
        os.kill(pid, signum)


@pytest.mark.exhaustive
def test_a_card_that_is_stopped_in_a_load_is_named_when_time_is_up(folder):
    with several_cards(folder, distributed_timeout_s=10.0) as start:
        llm = start()
        (pid,) = ranks_of(llm)
        signals = iter([None, None, None, signal.SIGSTOP])
        with pytest.raises(EngineDeadError, match=rf"rank 1 \(process {pid}\) is stopped"):
            random_load(llm, random.Random(4), lambda: send(pid, next(signals, None)))


@pytest.mark.exhaustive
def test_a_card_that_is_full_in_a_step_ends_the_others_at_once(folder):
    with several_cards(folder, worker_cls=f"{FAILING}.RunsOutOfMemory") as start:
        llm = start()
        fill_in_the_middle(llm)
        with pytest.raises(EngineDeadError, match=r"rank 1 .*failed: .*Allocation failed"):
            while llm.llm_engine.has_unfinished_requests():
                llm.llm_engine.step()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("worker", "rank"),
    [("RunsOutOfMemoryInWarmUp", "rank 1: "), ("FirstRunsOutOfMemoryInWarmUp", "")],
)
def test_a_card_that_is_full_in_a_launch_of_the_warm_up_ends_the_others_at_once(
    folder, worker, rank
):
    """The other card waits in an exchange of the same forward pass, for up to 300 s."""
    with several_cards(folder, worker_cls=f"{FAILING}.{worker}") as start:
        message = f"^{rank}no memory for a launch for which other cards of the engine have memory"
        with pytest.raises(ConfigError, match=message):
            start()


@pytest.mark.e2e
@pytest.mark.exhaustive
@needs_simulated_device
@pytest.mark.parametrize(
    ("num_ranks", "cards"),
    [
        (1, [["1", None], ["3", None]]),
        (2, [["1,3", "1"], ["1,3", "3"], ["5,7", "5"], ["5,7", "7"]]),
    ],
)
def test_a_replica_on_cards_that_is_killed_comes_back_to_them_while_the_other_serves(
    num_ranks, cards
):
    flags = ["--device", "hpu", "-dp", "2", "-tp", str(num_ranks), "--restart-engine", "1"]
    flags += ["--worker-extension-cls", "tests.e2e.worker_extension.WorkerExtension"]
    for name, value in (SMALL_ENGINE | {"num_gpu_blocks_override": 12}).items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    variables = {"VLLM_HPU_SIM": "gaudi2", "VLLM_HPU_SIM_STRICT": "1", "PT_HPU_LAZY_MODE": "1"}
    variables |= {"PT_HPU_ENABLE_LAZY_COLLECTIVES": "1", "HABANA_VISIBLE_MODULES": "1,3,5,7"}
    variables |= {name: str(value) for name, value in FEW_BUCKETS.items()}
    variables |= {"VLLM_SERVER_DEV_MODE": "1"}
    body = {"prompt": "import", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    with start_server(*flags, variables=variables) as server:

        def cards_of_workers() -> object:
            answer = server.request("POST", "/collective_rpc", {"method": "card"})[2]
            return json.loads(answer)["results"]

        assert cards_of_workers() == cards
        core = server.get_json("/replicas")["replicas"][0]["pid"]
        kill = partial(os.kill, core, signal.SIGKILL)
        answers = asyncio.run(answers_around(server, [body] * 16, kill))
        lost = [text for status, text in answers if status == 500]
        assert 0 < len(lost) <= 8 and all("signal 9" in text for text in lost)
        status, _, text = server.request("POST", "/v1/completions", body)
        assert status == 200
        wanted = json.loads(text)["choices"][0]["text"]
        bodies = [text.partition("\r\n\r\n")[2] for status, text in answers if status == 200]
        texts = [json.loads(body)["choices"][0]["text"] for body in bodies]
        assert texts == [wanted] * (16 - len(lost))
        wait_until(lambda: server.replica_states() == ["ready", "ready"])
        assert cards_of_workers() == cards
        answers = asyncio.run(answers_around(server, [body] * 8, lambda: None))
        bodies = [text.partition("\r\n\r\n")[2] for _, text in answers]
        assert [json.loads(body)["choices"][0]["text"] for body in bodies] == [wanted] * 8
        assert server.metric("vllm:compilations_after_warmup_total") == 0
