"""Test the engine core in a separate process with the bundled model: it must always exit."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tests.hpu import SMALL_ENGINE, needs_simulated_device
from tests.shared_memory import assert_no_new_files, named_files
from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.async_llm_engine import AsyncLLM
from vllm.errors import ConfigError, EngineDeadError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.worker.hpu.warmup.recipe_manifest import FILE_NAME

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("two_layers", "preloaded")]

SMALL = {"max_model_len": 256, "num_gpu_blocks_override": 200}


def wait_until(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


async def generate(engine, request_id, **fields) -> list[int]:
    params = SamplingParams(
        temperature=0, output_kind=RequestOutputKind.DELTA, ignore_eos=True, **fields
    )
    return [
        token_id
        async for out in engine.generate("import os\n", params, request_id)
        for token_id in out.outputs[0].token_ids
    ]


@pytest.mark.usefixtures("new_interpreters")
def test_it_computes_what_the_engine_in_process_does_and_leaves_nothing():
    from vllm import LLM

    async def main():
        engine = AsyncLLM(EngineArgs(**SMALL))
        await engine.start()
        process = psutil.Process(engine.core_pid)
        (address,) = (word for word in process.cmdline() if word.startswith("ipc://"))
        folder = Path(address.removeprefix("ipc://")).parent
        try:
            found = await asyncio.gather(
                *(generate(engine, f"r{n}", max_tokens=n) for n in range(1, 9))
            )
            params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1, temperature=0)
            outputs = [out async for out in engine.generate([5, 6, 7], params, "logprobs")]
            assert await engine.reset_prefix_cache()
            assert engine.stats.num_running == 0 and engine.stats.kv_cache_usage == 0
            return found, outputs[-1]
        finally:
            engine.shutdown()
            assert not process.is_running() and not folder.exists()

    found, with_logprobs = asyncio.run(main())
    llm = LLM(**SMALL)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (expected,) = llm.generate("import os\n", params, use_tqdm=False)
    assert found == [expected.outputs[0].token_ids[:n] for n in range(1, 9)]
    params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1, temperature=0)
    (expected,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert repr(with_logprobs.outputs) == repr(expected.outputs)
    assert repr(with_logprobs.prompt_logprobs) == repr(expected.prompt_logprobs)


@needs_simulated_device
def test_a_core_that_is_stopped_or_killed_in_its_warm_up_may_be_started_again(
    tmp_path, monkeypatch
):
    """A stopped engine leaves only its recipes, which the next one reuses. The death of a core is
    noticed at once.
    """
    variables = {
        "VLLM_HPU_SIM": "gaudi2",
        "VLLM_HPU_SIM_STRICT": 1,
        "PT_HPU_LAZY_MODE": 1,
        "PT_HPU_RECIPE_CACHE_CONFIG": f"{tmp_path},false,64",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    envs.get.cache_clear()
    settings = SMALL_ENGINE | SMALL | {"device": "hpu"}

    def recipes() -> dict[str, int]:
        """Return the files of recipes; a recipe that is compiled again would be a new file."""
        return {path.name: path.stat().st_ino for path in tmp_path.glob("*.recipe")}

    def listed() -> int:
        [entry] = json.loads((tmp_path / FILE_NAME).read_text())["configurations"]
        return len(entry["buckets"])

    async def some_are_warm(engine) -> None:
        """Return when buckets have been warmed up that the start has left out."""
        num_first = engine.stats.warm_up.num_warm
        while engine.stats.warm_up.num_warm <= num_first:
            await asyncio.sleep(0.01)

    async def main():
        args = EngineArgs(**settings, ready_when="first", first_buckets=1)
        shared = named_files()
        engine = AsyncLLM(args)
        await engine.start()
        try:
            expected = await generate(engine, "before", max_tokens=5)
            core = psutil.Process(engine.core_pid)
            await some_are_warm(engine)
            core.send_signal(signal.SIGTERM)  # a service manager sends it to all processes
            assert await generate(engine, "after the signal", max_tokens=5) == expected
            assert engine.stats.warm_up.is_warming
        finally:
            engine.shutdown()
        assert not core.is_running()
        assert_no_new_files(shared)
        stopped, num_stopped = recipes(), listed()
        assert num_stopped and {path.suffix for path in tmp_path.iterdir()} == {".recipe", ".json"}

        engine = AsyncLLM(args, num_restarts=1)
        await engine.start()
        try:
            assert await generate(engine, "second start", max_tokens=5) == expected
            core, first = psutil.Process(engine.core_pid), engine.stats.warm_up
            await some_are_warm(engine)
            core.suspend()  # the request cannot end before its core is killed
            compiled, num_listed = recipes(), listed()
            assert num_stopped <= num_listed < first.num_wanted, "the core is in its warm-up"
            assert compiled.items() >= stopped.items(), "recipes were reused"
            task = asyncio.create_task(generate(engine, "lost", max_tokens=200))
            while not engine.num_unfinished_requests:
                await asyncio.sleep(0.01)
            began = time.monotonic()
            core.kill()
            with pytest.raises(EngineDeadError, match="signal 9"):
                await task
            assert time.monotonic() - began < 60  # no time limit was needed to notice this
            assert await generate(engine, "after", max_tokens=5) == expected
            os.kill(engine.core_pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await generate(engine, "again", max_tokens=200)
            assert engine.errored and engine.num_restarts_done == 1
            assert recipes().items() >= compiled.items()
        finally:
            engine.shutdown()

    try:
        asyncio.run(main())
    finally:
        monkeypatch.undo()
        envs.get.cache_clear()


def test_an_engine_that_cannot_start_says_why_and_leaves_nothing():
    async def main():
        engine = AsyncLLM(EngineArgs(max_model_len=2048, num_gpu_blocks_override=3))
        with pytest.raises(ConfigError, match="num-gpu-blocks-override"):
            await engine.start()
        assert engine.core_pid is None
        engine.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)]
)
def test_a_core_ends_with_its_parent_however_that_ends(how):
    program = textwrap.dedent(
        """
        import asyncio
        from vllm.engine.arg_utils import EngineArgs
        from vllm.engine.async_llm_engine import AsyncLLM
        async def main():
            engine = AsyncLLM(EngineArgs(max_model_len=256, num_gpu_blocks_override=200))
            await engine.start()
            print(engine.core_pid, flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
        """
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    core = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(how)
    parent.wait(120)
    parent.stdout.close()
    wait_until(lambda: not core.is_running() or core.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("has_process", [False, True])
def test_a_process_that_was_only_prepared_is_ended(tmp_path, monkeypatch, has_process):
    """It ends even if nothing waits for it any more while it is made."""
    monkeypatch.setattr("vllm.engine.process.socket_folder.tempfile.tempdir", str(tmp_path))
    before = {child.pid for child in psutil.Process().children()}
    engine = AsyncLLM(EngineArgs(**SMALL))

    async def main():
        engine.prepare()
        await asyncio.sleep(0)
        while has_process and engine.core_pid is None:
            await asyncio.sleep(0.01)

    asyncio.run(main())
    engine.shutdown()
    assert {child.pid for child in psutil.Process().children()} <= before
    assert list(tmp_path.iterdir()) == []
