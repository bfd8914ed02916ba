"""Test on the simulated card that a step starts before the tokens of the last one are read, and
that several decodes of a step start before the first token is read.
"""

from collections.abc import Iterator

import pytest

from tests.e2e.test_random_load import count_decodes
from tests.exhaustive import exhaustive
from tests.hpu import FEW_BUCKETS, simulated_hpu
from tests.reach import core_of, note_before_waiting, steps_in_flight_of
from vllm import LLM, SamplingParams
from vllm.engine import engine_core
from vllm.engine.async_scheduling import AsyncSchedulingPolicy
from vllm.guided_decoding_params import GrammarStart
from vllm.sampling_params import GuidedDecodingParams

PROMPTS = ["import os\n", "def read(path):\n", "class Node:\n"]
OPTIONS = {
    "tokens stay on the card": {"temperature": 0},
    "logits depend on the output": {"temperature": 0, "repetition_penalty": 1.3},
    "random": {"temperature": 1.0, "top_p": 0.9, "seed": 5},
    "a form": {"guided_decoding": GuidedDecodingParams(regex="(ab|ba|c){3,30}")},
    "a form behind a line": {
        "guided_decoding": GuidedDecodingParams(
            regex="(ab|ba|c){3,30}", start=GrammarStart(is_thinking=True, thought_ends=("\n",))
        )
    },
    "an end that is found a step late": {"temperature": 0, "stop": ["\n", "("], "logprobs": 1},
    "an end among several decodes": {"temperature": 0, "stop": ["\n", "("]},
    "a token that ends": {"temperature": 1.3, "seed": 3, "stop_token_ids": [10, 300]},
}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, LLM]]:
    """Make three engines on one card: one waits for each step, one schedules ahead, and one has
    several decodes in a step.
    """
    card = simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=True, **FEW_BUCKETS)
    with pytest.MonkeyPatch.context() as patch, card:
        # Run ahead however short a step is; other tests measure the time of a step.
        patch.setattr(
            engine_core, "AsyncSchedulingPolicy", lambda allowed: AsyncSchedulingPolicy(allowed, 0)
        )
        yield {
            name: LLM(
                dtype="float32",
                max_model_len=160,
                max_num_seqs=4,
                num_gpu_blocks_override=100,
                block_size=16,
                async_scheduling=name != "waits",
                num_scheduler_steps=5 if name == "several decodes" else 1,
            )
            for name in ("waits", "runs ahead", "several decodes")
        }


def generate(llm: LLM, params: SamplingParams) -> tuple[list[list[int]], int, int]:
    """Return output tokens, the largest number of steps in flight at once, and the largest number
    of decodes of one step.
    """
    core = core_of(llm)
    depths = []
    decodes = count_decodes(llm.llm_engine)
    with pytest.MonkeyPatch.context() as patch:
        note_before_waiting(patch, core, lambda: depths.append(len(steps_in_flight_of(core))))
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        # A step that was started before the last end was known.
        while core.has_unfinished_requests():
            core.step()
    return [output.outputs[0].token_ids for output in outputs], max(depths), max(decodes)


# Exhaustive: test_run_ahead_faults.py tests the other options with steps that run ahead on the CPU.
@pytest.mark.parametrize(
    "name",
    [n if n in ("tokens stay on the card", "random", "a form") else exhaustive(n) for n in OPTIONS],
)
def test_the_tokens_are_those_of_steps_that_wait(name, engines):
    params = SamplingParams(**{"max_tokens": 16, "ignore_eos": True} | OPTIONS[name])
    want, waiting_depth, _ = generate(engines["waits"], params)
    got, depth, _ = generate(engines["runs ahead"], params)
    assert (waiting_depth, depth) == (1, 2)
    assert got == want
    got, _, num_decodes = generate(engines["several decodes"], params)
    assert got == want
    needs_host = {"logits depend on the output", "an end that is found a step late"}
    follows_form = "guided_decoding" in OPTIONS[name]
    assert num_decodes == (1 if follows_form or name in needs_host else 5)
