"""Test speculators that read hidden states on the simulated card: outputs are unchanged, and
nothing compiles after the warm-up.
"""

import random

import pytest

from tests.e2e.test_speculators import METHODS, PARAMS, PROMPTS, prompts
from tests.hpu import FEW_BUCKETS, MODES, simulated_hpu, steps_in_flight
from tests.reach import stats_of, worker_of
from tests.speculators import Made, make_mtp, make_right, make_speculator, make_target
from vllm import LLM, SamplingParams
from vllm.bucketing.ledger import MemoryClass

COMMON = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "skip_tokenizer_init": True,
    "sampling_warmup": "all",
}
FEW_BLOCKS = {"num_gpu_blocks_override": 17}


def make(method: str, folder) -> Made:
    if method == "mtp":
        return make_mtp(folder)
    if method in ("glm4_moe", "qwen3_next"):
        return make_mtp(folder, family=method)
    return make_speculator(method, make_target(folder / "target"), folder / "eagle-head")


def with_speculator(made: Made, mode: str, **more) -> LLM:
    config = {"adaptive": False, **made.config}
    settings = {**COMMON, **FEW_BLOCKS, "enforce_eager": MODES[mode][1], **more}
    return LLM(str(made.target), speculative_config=config, **settings)


def run(llm: LLM, count: int = len(PROMPTS)) -> list[list[int]]:
    """Return the tokens of the first prompts."""
    params = [PARAMS[index % 4 == 3] for index in range(count)]
    outputs = llm.generate(prompts()[:count], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_ledger(llm: LLM) -> None:
    worker = worker_of(llm)
    runners = worker.runner, worker.runner.drafter
    block_bytes = sum(runner.cache_layout.block_bytes for runner in runners)
    num_blocks = FEW_BLOCKS["num_gpu_blocks_override"]
    assert worker.ledger.booked(MemoryClass.KV_CACHE) == num_blocks * block_bytes
    kept = worker.runner.drafter.states.by_slot
    assert kept.nbytes == num_blocks * worker.runner.drafter.states.block_bytes


SHORT = {("HPU graphs", "eagle3")}
CASES = [
    pytest.param(mode, method, marks=[] if (mode, method) in SHORT else pytest.mark.exhaustive)
    for mode in MODES
    for method in (*METHODS, "glm4_moe", "qwen3_next")
]


@pytest.mark.parametrize(("mode", "method"), CASES)
def test_outputs_are_the_same_and_right_guesses_are_taken(mode, method, tmp_path):
    variables = FEW_BUCKETS | {"PT_HPU_LAZY_MODE": MODES[mode][0]}
    made = make(method, tmp_path)
    expected = run(LLM(str(made.target), device="cpu", **COMMON))
    card = simulated_hpu(has_profiling_run=False, **variables)
    with card as bridge, steps_in_flight():
        llm = with_speculator(made, mode)
        check_ledger(llm)
        before = bridge.counters().compilations
        copies = bridge.counters().cache_copies
        assert run(llm) == expected
        assert run(llm, 4) == expected[:4], "with a prefix cache"
        stats = stats_of(llm)
        assert stats.num_preemptions and stats.num_prefix_hits
        assert 0 < sum(stats.drafts.accepted) < stats.drafts.num_draft_tokens
        assert bridge.counters().compilations == before
        assert bridge.counters().cache_copies == copies, "states are written where they are"

        make_right(made)
        llm = with_speculator(made, mode, max_model_len=64)
        before = bridge.counters().compilations
        come_and_leave(llm)
        stats = stats_of(llm)
        assert sum(stats.drafts.accepted) == stats.drafts.num_draft_tokens > 60
        assert stats.num_prefix_hits
        assert bridge.counters().compilations == before


def come_and_leave(llm: LLM) -> None:
    """Run requests that share prefixes and may be aborted, with a speculator that is always
    right.
    """
    engine, rng = llm.llm_engine, random.Random(2)
    todo = list(range(12))
    shared = PROMPTS[1][:30]
    while todo or engine.has_unfinished_requests():
        if todo and rng.random() < 0.8:
            params = SamplingParams(
                max_tokens=rng.randint(1, 24), temperature=0, ignore_eos=True, detokenize=False
            )
            if rng.random() < 0.3:
                # Requests with a logits processor get no drafts.
                params.logits_processors = [lambda tokens, logits: logits]
            prompt = {"prompt_token_ids": shared[: rng.choice([8, 20, 24, 30])]}
            engine.add_request(str(todo.pop()), prompt, params)
        if rng.random() < 0.1:
            engine.abort_request(str(rng.choice(range(12))))
        engine.step()
