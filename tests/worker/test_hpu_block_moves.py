"""Test moving blocks of running requests to lower ids on the simulated card: outputs equal the
outputs of the CPU, which moves none.
"""

import random

import numpy as np

from tests.hpu import FEW_BUCKETS, SMALL_ENGINE, captured_log, simulated_hpu
from tests.reach import core_of
from tests.tiny_models import make_tiny_model
from vllm import LLM, SamplingParams
from vllm.worker.hpu.launches.block_moves import BlockMover


def churn(llm: LLM) -> list[list[int]]:
    """Run rounds of requests with different lengths, some of which repeat an earlier prompt."""
    rng, tokens = random.Random(1), []
    stems = [[rng.randrange(20, 90) for _ in range(64)] for _ in range(6)]
    for _ in range(4):
        prompts, params = [], []
        for _ in range(5):
            own = [rng.randrange(20, 90) for _ in range(rng.randint(1, 6))]
            ids = rng.choice(stems)[: rng.choice([0, 16, 33, 64])] + own
            prompts.append({"prompt_token_ids": ids})
            params.append(
                SamplingParams(
                    max_tokens=rng.choice([2, 12, 18]),
                    temperature=0,
                    ignore_eos=True,
                    detokenize=False,
                )
            )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens += [output.outputs[0].token_ids for output in outputs]
    return tokens


def test_tokens_are_those_without_a_prefix_cache_and_nothing_compiles(monkeypatch, tmp_path):
    engine = SMALL_ENGINE | {"model": str(make_tiny_model("llama", tmp_path))}
    engine["skip_tokenizer_init"] = True
    variables = FEW_BUCKETS | {"PT_HPU_LAZY_MODE": 1, "VLLM_CONTIGUOUS_PA": 1}
    moved = []
    with simulated_hpu(has_profiling_run=False, **variables) as bridge, captured_log():
        llm = LLM(**engine, enforce_eager=True)
        core = core_of(llm)
        move = BlockMover.move
        monkeypatch.setattr(
            BlockMover, "move", lambda mover, moves: moved.append(moves) or move(mover, moves)
        )
        before = bridge.counters().compilations
        found = churn(llm)
        assert bridge.counters().compilations == before
        assert core.scheduler.stats().num_prefix_hits > 100
        assert len(np.concatenate([moves for moves in moved if len(moves)])) > 20
    assert found == churn(LLM(**engine, device="cpu", enable_prefix_caching=False))
