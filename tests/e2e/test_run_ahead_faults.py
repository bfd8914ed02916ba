"""Test faults while a step is in flight that was scheduled before the last result.

Requests finish one step late, requests and steps fail, the user presses Ctrl-C, and programs exit.
"""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest
import torch

from tests.reach import core_of, leave_modules_alone, runner_of
from vllm import LLM, SamplingParams
from vllm.engine import engine_core
from vllm.engine.async_scheduling import AsyncSchedulingPolicy
from vllm.errors import EngineDeadError
from vllm.executor import uniproc
from vllm.sampling_params import GuidedDecodingParams, RequestOutputKind

SETTINGS = {"dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 60}
PROMPTS = ["import os\n", "def read(path):\n    ", "class Node:\n    "]


def greedy(**more) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **more})


def make_llm(**more) -> LLM:
    return LLM(**{**SETTINGS, **more})


@pytest.fixture
def runs_ahead(monkeypatch):
    """Return an engine that schedules every step before it knows the result of the last one."""
    monkeypatch.setattr(
        engine_core, "AsyncSchedulingPolicy", lambda allowed: AsyncSchedulingPolicy(allowed, 0)
    )
    monkeypatch.setattr(uniproc, "has_core_to_spare", lambda: True)


@pytest.fixture(scope="module")
def waits():
    """Return an engine in which each step waits for the last one."""
    return make_llm(async_scheduling=False)


def tokens_of(llm: LLM, prompts: list[str], params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def deltas(llm: LLM, params: SamplingParams) -> dict[str, list]:
    """Return everything that a user sees of each prompt's stream."""
    engine, seen = llm.llm_engine, {}
    params.output_kind = RequestOutputKind.DELTA
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            for part in output.outputs:
                found = part.logprobs and [list(position) for position in part.logprobs]
                news = (part.index, part.text, part.token_ids, found, part.finish_reason)
                seen.setdefault(output.request_id, []).append(news)
    return seen


ENDINGS = {
    "stop strings": {"stop": ["\n", "("], "logprobs": 2},
    "stop strings of samples": {"stop": ["e"], "n": 3, "temperature": 1.0, "seed": 3},
    "stop tokens": {"ignore_eos": False, "stop_token_ids": list(range(300, 400)), "logprobs": 0},
    "a form": {"guided_decoding": GuidedDecodingParams(regex="(ab|ba){2,9}"), "ignore_eos": False},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "stop": [" "]},
}


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("stop strings", "a form")
        else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in ENDINGS
    ],
)
def test_an_end_that_is_found_a_step_late_shows_nothing_more(runs_ahead, waits, name):
    seen = deltas(make_llm(), greedy(**ENDINGS[name]))
    assert seen == deltas(waits, greedy(**ENDINGS[name]))
    assert "stop" in {news[-1] for parts in seen.values() for news in parts}


def test_the_prefix_cache_may_be_reset_and_its_blocks_reused_while_a_step_is_in_flight(
    runs_ahead, waits
):
    llm = make_llm(num_gpu_blocks_override=20)
    core = core_of(llm)
    prompt = "import os\nimport sys\n" * 8
    for _ in range(3):
        llm.generate([prompt] * 2, greedy(stop=["\n"]), use_tqdm=False)
        # A step was started before the stop strings were found.
        assert core.has_unfinished_requests()
        assert llm.reset_prefix_cache()
        texts = [prompt, *PROMPTS]
        assert tokens_of(llm, texts, greedy()) == tokens_of(waits, texts, greedy())


def test_a_row_without_a_token_fails_alone_and_what_it_leaves_in_the_cache_spoils_nobody(
    runs_ahead, waits, monkeypatch
):
    llm = make_llm(max_model_len=128, num_gpu_blocks_override=10, max_num_seqs=3)
    runner = runner_of(llm)
    # `leave_modules_alone` keeps the logits in Python, where the test can change them.
    leave_modules_alone(runner)
    compute_logits, batch, steps = runner.model.compute_logits, runner.batch, 0

    def spoil_row_1(hidden_states: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        logits = compute_logits(hidden_states)
        if steps == 6:
            logits[1] = torch.nan
            block_id = batch.block_table[1, batch.num_blocks[1] - 1]
            for layer in runner.attention_layers:
                layer.key_cache[block_id] = layer.value_cache[block_id] = torch.nan
        return logits

    monkeypatch.setattr(runner.model, "compute_logits", spoil_row_1)
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, greedy(), use_tqdm=False)]
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert "NaN" in outputs[1].stop_reason
    expected = tokens_of(waits, PROMPTS, greedy())
    assert [output.token_ids for output in outputs] == [expected[0], expected[1][:5], expected[2]]
    assert tokens_of(llm, PROMPTS * 3, greedy()) == expected * 3


def test_a_step_that_fails_ends_this_engine_and_no_other(runs_ahead, waits, monkeypatch):
    llm = make_llm()
    runner = runner_of(llm)
    steps: list[int] = []

    def fail(step, execute=runner.execute):
        steps.append(step.step_id)
        if len(steps) == 4:
            raise RuntimeError("device lost")
        return execute(step)

    monkeypatch.setattr(runner, "execute", fail)
    # Log no error: pytest would keep its traceback, and the traceback keeps the engine alive.
    monkeypatch.setattr(engine_core.logger, "error", lambda *args, **more: None)
    with pytest.raises(EngineDeadError, match="device lost"):
        llm.generate(PROMPTS, greedy(), use_tqdm=False)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="device lost"):
            llm.generate(PROMPTS, greedy(), use_tqdm=False)
    assert len(steps) == 4 and not llm.llm_engine.has_unfinished_requests()
    other = make_llm()
    assert tokens_of(other, PROMPTS, greedy()) == tokens_of(waits, PROMPTS, greedy())
    gc.collect()  # collect the engines of other tests
    threads, engine = count_step_threads(), weakref.ref(llm.llm_engine)
    monkeypatch.undo()
    del llm, runner, fail
    gc.collect()
    assert engine() is None and count_step_threads() == threads - 1


def count_step_threads() -> int:
    return sum(thread.name == "step" for thread in threading.enumerate())


def test_ctrl_c_leaves_an_engine_that_can_be_used_again(runs_ahead, waits, monkeypatch):
    llm = make_llm()
    engine = llm.llm_engine
    step, count = engine.step, 0

    def step_and_interrupt():
        nonlocal count
        count += 1
        if count == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(engine, "step", step_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, greedy(), use_tqdm=False)
    assert not engine.has_unfinished_requests() and engine.engine_core.has_unfinished_requests()
    assert tokens_of(llm, PROMPTS, greedy()) == tokens_of(waits, PROMPTS, greedy())


def test_two_engines_with_steps_in_flight_do_not_touch_each_other(runs_ahead, waits):
    engines = [make_llm().llm_engine for _ in range(2)]
    expected = tokens_of(waits, PROMPTS, greedy())
    got: list[dict[str, list[int]]] = [{}, {}]
    for engine in engines:
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(str(index), prompt, greedy())
    while any(engine.has_unfinished_requests() for engine in engines):
        for engine, tokens in zip(engines, got, strict=True):
            for output in engine.step():
                if output.finished:
                    tokens[output.request_id] = output.outputs[0].token_ids
    assert got == [{str(i): want for i, want in enumerate(expected)}] * 2


EXITS = {
    "the main thread ends first": "threading.Thread(target=generate_after_main).start()",
    "a thread is left in a step": """
        threading.Thread(target=lambda: [generate() for _ in range(1000)], daemon=True).start()
        while not llm.llm_engine.has_unfinished_requests():
            time.sleep(0.001)
    """,
    "a step is left in flight": """
        generate(stop=["\\n"])
        assert llm.llm_engine.engine_core.has_unfinished_requests()
    """,
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if name == "the main thread ends first" else pytest.mark.exhaustive
        )
        for name in EXITS
    ],
)
def test_a_program_ends_with_a_step_in_flight(name):
    program = """
        import threading, time
        from vllm import LLM, SamplingParams
        from vllm.engine import engine_core
        from vllm.engine.async_scheduling import AsyncSchedulingPolicy
        from vllm.executor import uniproc
        from vllm.sampling_params import GuidedDecodingParams

        engine_core.AsyncSchedulingPolicy = lambda allowed: AsyncSchedulingPolicy(allowed, 0)
        uniproc.has_core_to_spare = lambda: True
        llm = LLM(max_model_len=256, num_gpu_blocks_override=60, use_tqdm_on_load=False)

        def generate(**more):
            params = SamplingParams(temperature=0, max_tokens=40, **more)
            return llm.generate(["import os\\n"] * 2, params, use_tqdm=False)

        def generate_after_main():
            threading.main_thread().join()
            assert len(generate()) == 2
            outputs = generate(guided_decoding=GuidedDecodingParams(regex="(ab){3}"))
            assert [output.outputs[0].text for output in outputs] == ["ababab"] * 2
            print("generated")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program) + textwrap.dedent(EXITS[name])],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert done.returncode == 0, done.stderr
    assert "Fatal" not in done.stderr and (done.stderr == "" or "is left in a step" in name)
    assert done.stdout == ("generated\n" if "first" in name else "")
