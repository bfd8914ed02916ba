"""On the simulated card a step is launched before the tokens of the last one are read."""

import pytest

from tests.hpu import FEW_BUCKETS, simulated_hpu
from vllm import LLM, SamplingParams
from vllm.engine import engine_core
from vllm.engine.run_ahead import RunAhead
from vllm.sampling_params import GuidedDecodingParams

PROMPTS = ["import os\n", "def read(path):\n", "class Node:\n"]
OPTIONS = {
    "tokens stay on the card": {"temperature": 0},
    "logits depend on the output": {"temperature": 0, "repetition_penalty": 1.3},
    "random": {"temperature": 1.0, "top_p": 0.9, "seed": 5},
    "a form": {"guided_decoding": GuidedDecodingParams(regex="(ab|ba|c){3,30}")},
    "an end that is found a step late": {"temperature": 0, "stop": ["\n", "("], "logprobs": 1},
}


def generate(params: SamplingParams, *, is_ahead: bool) -> tuple[list[list[int]], int]:
    """Output tokens, and the most steps that were in flight at once."""
    with simulated_hpu(PT_HPU_LAZY_MODE=True, **FEW_BUCKETS):
        llm = LLM(
            dtype="float32",
            max_model_len=160,
            max_num_seqs=4,
            num_gpu_blocks_override=100,
            block_size=16,
            async_scheduling=is_ahead,
        )
        core = llm.llm_engine.engine_core
        depths, wait = [], core._wait
        core._wait = lambda: depths.append(len(core._in_flight)) or wait()
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], max(depths)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_tokens_are_those_of_steps_that_wait(name, monkeypatch):
    # Whatever the time of a step, which is measured otherwise.
    monkeypatch.setattr(engine_core, "RunAhead", lambda allowed: RunAhead(allowed, 0))
    params = SamplingParams(max_tokens=16, ignore_eos=True, **OPTIONS[name])
    want, waiting_depth = generate(params, is_ahead=False)
    got, depth = generate(params, is_ahead=True)
    assert (waiting_depth, depth) == (1, 2)
    assert got == want
