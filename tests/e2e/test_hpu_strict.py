"""Test random requests on a strict simulated card: nothing compiles, and the host waits only for
tokens.

On a strict card, a compilation, a fallback or a host sync inside a warmed forward pass fails. The
counters show what happens between forward passes.
"""

import random
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.e2e.test_random_load import count_decodes
from tests.hpu import FEW_BUCKETS, MODES, captured_log, simulated_hpu
from tests.reach import core_of, recorded_launches, runner_of, stats_of
from vllm import LLM, SamplingParams
from vllm.assets import BUNDLED_MODEL
from vllm.worker.batch.launch_result import LaunchResult

NUM_REQUESTS = {"HPU graphs": 50, "torch.compile": 50, "eager": 50}
NUM_DECODES = {"HPU graphs": 4}
"""Most decodes of a step, if it is more than one."""
LOGPROB_COPIES = 3
"""Token ids, log-probabilities and ranks."""

BUCKETS = FEW_BUCKETS | {"VLLM_DECODE_BS_BUCKET_MIN": 8}

ENGINE = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 13,
    "block_size": 16,
    "sampling_warmup": "all",
}
"""Prompts in chunks, and a cache that eight requests overflow."""

PIECES = [
    "import os\n",
    "class Node:\n    ",
    "def read(path):\n",
    "# comment\n",
    "x = [1]\n",
    "\n\n",
]


def random_request(rng: random.Random, stems: list[str]) -> tuple[str, SamplingParams]:
    """Return a prompt that may begin like another one, and parameters with a random mix of
    features.
    """
    prompt = rng.choice(stems)[: rng.randint(1, 60)] + "".join(
        rng.choices(PIECES, k=rng.randint(0, 8))
    )
    asked = {"max_tokens": rng.randint(1, 14), "ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.3:
        asked["temperature"] = 0.0
    else:
        asked |= {"temperature": rng.choice([0.4, 1.0, 1.6]), "seed": rng.randrange(1000)}
        asked |= {} if rng.random() < 0.5 else {"top_k": rng.choice([1, 5, 300, 2000])}
        asked |= {} if rng.random() < 0.5 else {"top_p": rng.choice([0.3, 0.9])}
        asked |= {} if rng.random() < 0.7 else {"min_p": 0.05}
        asked |= {} if rng.random() < 0.8 else {"n": rng.randint(2, 3)}
    for likely, option in (
        (0.15, {"repetition_penalty": 1.3}),
        (0.15, {"presence_penalty": 0.7, "frequency_penalty": -0.3}),
        (0.15, {"logit_bias": {rng.randrange(16, 4000): 4.0, 300: -100.0}}),
        (0.15, {"bad_words": ["import", " self"]}),
        (0.15, {"min_tokens": 1}),
        (0.1, {"allowed_token_ids": sorted(rng.sample(range(16, 4000), 40))}),
        (0.2, {"logprobs": rng.choice([0, 1, 5, 20])}),
        (0.1, {"prompt_logprobs": rng.choice([0, 3, 20])}),
        (0.1, {"stop": ["\n\n", "("]}),
    ):
        asked |= option if rng.random() < likely else {}
    return prompt, SamplingParams(**asked)


@dataclass
class Load:
    """Prompts, their parameters, and the outputs of the CPU for them."""

    prompts: list[str]
    params: list[SamplingParams]
    want: list[list]


def seen_by_user(outputs) -> list[list]:
    return [
        [(tuple(o.token_ids), o.text, o.finish_reason, o.stop_reason) for o in output.outputs]
        for output in outputs
    ]


@pytest.fixture(scope="module")
def engine(models) -> dict[str, Any]:
    """Return arguments of `LLM`: a tiny model that reads texts."""
    return ENGINE | {"model": str(models("llama")), "tokenizer": str(BUNDLED_MODEL)}


@pytest.fixture(scope="module")
def load(engine) -> Load:
    rng = random.Random(11)
    stems = ["".join(rng.choices(PIECES, k=12)) for _ in range(3)]
    pairs = [random_request(rng, stems) for _ in range(max(NUM_REQUESTS.values()))]
    prompts, params = ([pair[i] for pair in pairs] for i in range(2))
    llm = LLM(**engine, device="cpu")
    return Load(prompts, params, seen_by_user(llm.generate(prompts, params, use_tqdm=False)))


def expected_syncs(launches: list[LaunchResult]) -> int:
    """Return the expected number of copies to the host: the tokens of each forward pass that
    samples, and log-probabilities."""
    syncs = 0
    for launch in launches:
        if launch.sampled is not None:
            syncs += 1 + LOGPROB_COPIES * (launch.sampled.logprobs is not None)
        syncs += sum(LOGPROB_COPIES * len(pending.parts) for _, pending in launch.prompt_logprobs)
    return syncs


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=() if mode == "HPU graphs" else pytest.mark.exhaustive)
        for mode in NUM_REQUESTS
    ],
)
def test_random_requests_compile_nothing_and_wait_only_for_tokens(mode, engine, load, monkeypatch):
    count = NUM_REQUESTS[mode]
    is_lazy, enforce_eager = MODES[mode]
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=is_lazy, **BUCKETS) as bridge:
        most = NUM_DECODES.get(mode, 1)
        llm = LLM(**engine, enforce_eager=enforce_eager, num_scheduler_steps=most)
        num_decodes = count_decodes(llm.llm_engine)
        core = core_of(llm)
        runner = runner_of(core)
        launches = recorded_launches(runner, monkeypatch)
        before = bridge.counters()
        outputs = llm.generate(load.prompts[:count], load.params[:count], use_tqdm=False)
        while core.has_unfinished_requests():  # a step that was started before the last one ended
            core.step()
        after = bridge.counters()
    assert core.scheduler.num_preemptions > 0
    assert max(num_decodes) == most
    assert after.compilations == before.compilations
    assert after.cpu_fallbacks == before.cpu_fallbacks
    assert after.graph_captures == before.graph_captures
    assert after.host_syncs - before.host_syncs == expected_syncs(
        [result for _, result in launches]
    )
    replays = after.graph_replays - before.graph_replays
    assert replays == (len(launches) if mode == "HPU graphs" else 0)
    assert seen_by_user(outputs) == load.want[:count]


def test_sampling_that_was_not_warmed_up_compiles_once_with_a_line_in_the_log(engine):
    lines, compiled = [], []
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=3, ignore_eos=True)
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **BUCKETS) as bridge:
        llm = LLM(**engine | {"sampling_warmup": "basic"})
        misses = stats_of(llm).runner.num_bucket_misses
        for asked in (SamplingParams(seed=1, max_tokens=3, ignore_eos=True), params, params):
            before = bridge.counters().compilations
            with captured_log() as log:
                llm.generate(["import os\n"], asked, use_tqdm=False)
            compiled.append(bridge.counters().compilations - before)
            lines.append([line for line in log if "warmed-up" in line])
        runner = stats_of(llm).runner
    assert compiled[0] == compiled[2] == 0 < compiled[1]
    assert lines[0] == lines[2] == []
    assert len(lines[1]) == compiled[1]  # one batch of prompts and one batch of decodes
    assert all(
        re.fullmatch(
            r"Configuration: \(sampling, [18], distribution, 31\) was not warmed-up!", line
        )
        for line in lines[1]
    )
    assert runner.num_bucket_misses - misses == len(lines[1])


def only_300(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Allow only token 300, as a logits processor."""
    return torch.full_like(logits, float("-inf")).index_fill(0, torch.tensor([300]), 0.0)


def test_code_of_a_user_may_read_logits(engine):
    params = SamplingParams(
        temperature=0, max_tokens=3, ignore_eos=True, logits_processors=[only_300]
    )
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **BUCKETS):
        llm = LLM(**engine)
        output = llm.generate(["import os\n"], params, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == [300, 300, 300]
