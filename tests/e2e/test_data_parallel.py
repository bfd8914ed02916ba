"""Test `vllm serve --data-parallel-size 2` with the official client: it gives the tokens of one
replica, even after a replica was killed or restarted.
"""

import asyncio
import json
import time

import openai
import psutil
import pytest

from tests.e2e.ranks import ENGINE, PARAMS, assert_same, generate
from tests.e2e.ranks import PROMPTS as IDS
from tests.e2e.server import KEY, start_server
from tests.tiny_models import make_tiny_model
from vllm import LLM
from vllm.assets import BUNDLED_MODEL
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.async_llm_engine import AsyncLLM

pytestmark = pytest.mark.e2e

HEADER = {"Authorization": f"Bearer {KEY}"}
PREFIX = "import os\nimport sys\n\n" * 20
PROMPTS = [f"import os{n}\ndef f" for n in range(12)] + [f"{PREFIX}def g{n}" for n in range(4)]


def replicas(server, name: str) -> list:
    """Return the values of one field of /replicas, one for each replica."""
    status, _, body = server.request("GET", "/replicas", **HEADER)
    assert status == 200
    return [each[name] for each in json.loads(body)["replicas"]]


def cores(server) -> list[psutil.Process]:
    """Return the process of each replica."""
    return [psutil.Process(pid) for pid in replicas(server, "pid")]


async def complete(server, max_tokens=24) -> list[str]:
    """Return the text for each prompt, or the error message."""
    url = f"{server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=300) as client:

        async def one(prompt: str) -> str:
            try:
                answer = await client.completions.create(
                    model=BUNDLED_MODEL.name,
                    prompt=prompt,
                    max_tokens=max_tokens,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
            except openai.InternalServerError as error:
                return f"failed: {error}"
            return answer.choices[0].text

        return await asyncio.gather(*map(one, PROMPTS))


async def kill_during_load(server, core: psutil.Process) -> list[str]:
    load = asyncio.create_task(complete(server, max_tokens=300))
    while sum(replicas(server, "num_requests")) < len(PROMPTS):
        await asyncio.sleep(0.01)
    core.kill()
    return await load


# Exhaustive: test_far_replicas.py tests replicas that die, tests/engine tests the tokens.
@pytest.mark.exhaustive
def test_two_replicas_answer_as_one_and_survive_the_death_of_either(chat_server):
    expected = asyncio.run(complete(chat_server))
    dev = {"VLLM_SERVER_DEV_MODE": "1"}
    with start_server(
        "--api-key", KEY, "-dp", "2", "--restart-engine", "1", variables=dev
    ) as server:
        assert server.request("GET", "/replicas")[0] == 401
        assert asyncio.run(complete(server)) == expected
        page = server.request("GET", "/metrics", **HEADER)[2].decode()
        for index in range(2):
            (line,) = [
                line
                for line in page.splitlines()
                if line.startswith(f'vllm:request_success_total{{engine="{index}"')
                and 'finished_reason="length"' in line
            ]
            assert float(line.split()[-1]) >= 4

        first, second = cores(server)
        found = asyncio.run(kill_during_load(server, first))
        lost = [text for text in found if text.startswith("failed: ")]
        assert lost and all("signal 9" in text for text in lost)
        assert len(lost) < len(PROMPTS)
        assert server.request("GET", "/health", **HEADER)[0] == 200
        # The other replica answers until the killed one is back.
        assert asyncio.run(complete(server)) == expected
        end = time.monotonic() + 120
        while replicas(server, "state") != ["ready", "ready"]:
            assert time.monotonic() < end, server.log_text()
            time.sleep(0.05)

        assert server.request("POST", "/replicas/1/restart", **HEADER)[0] == 200
        assert not second.is_running()
        assert asyncio.run(complete(server)) == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("mixtral", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("llama", {"pipeline_parallel_size": 2}),
    ],
)
def test_replicas_of_several_ranks_give_what_one_process_does_also_when_others_are_aborted(
    family, values, tmp_path
):
    folder = str(make_tiny_model(family, tmp_path))

    async def one(engine: AsyncLLM, number: int):
        place = number % len(IDS)
        prompt = {"prompt_token_ids": IDS[place]}
        outputs = engine.generate(prompt, PARAMS[place], str(number))
        if number >= 2 * len(IDS):  # this request is aborted after its first token
            await anext(outputs)
            return await engine.abort(str(number))
        return [output async for output in outputs][-1]

    async def main():
        engine = AsyncLLM(EngineArgs(folder, data_parallel_size=2, **ENGINE | values))
        try:
            await engine.start()
            return await asyncio.gather(*(one(engine, n) for n in range(4 * len(IDS))))
        finally:
            engine.shutdown()

    found, want = asyncio.run(main()), generate(LLM(folder, **ENGINE))
    assert_same(found[: 2 * len(IDS)], want * 2)
