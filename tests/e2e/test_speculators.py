"""Speculators that read hidden states of the model: the same outputs, and guesses as the papers
say."""

import random

import pytest
import torch

from tests.speculators import VOCAB_SIZE, Made, make_mtp, make_speculator, make_target
from vllm import LLM, SamplingParams
from vllm.worker.cpu import speculator_runner
from vllm.worker.cpu.speculator_runner import SpeculatorRunner

METHODS = ("eagle", "eagle3", "mtp", "mlp_speculator", "mlp_speculator_tied", "medusa")
COMMON = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 8, "skip_tokenizer_init": True}
COMMON |= {"block_size": 8}
FEW_BLOCKS = {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 24}

_rng = random.Random(3)


def _tokens(count: int) -> list[int]:
    return [_rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


_SHARED = _tokens(30)
PROMPTS = [
    [*_SHARED[:shared], *_tokens(own)]
    for shared, own in ((0, 1), (30, 7), (17, 20), (27, 8), (0, 40), (30, 1), (26, 0))
]
"""Some share blocks of 8 tokens, and the token behind them: see `vllm.worker.draft_progress`."""
PARAMS = [
    SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, detokenize=False),
    SamplingParams(
        max_tokens=25, temperature=0.9, seed=5, top_p=0.9, ignore_eos=True, detokenize=False
    ),
]


def prompts() -> list:
    return [{"prompt_token_ids": ids} for ids in PROMPTS]


def run(llm: LLM) -> list[list[int]]:
    params = [PARAMS[index % 4 == 3] for index in range(len(PROMPTS))]
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts(), params, use_tqdm=False)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speculators")
    target = make_target(folder / "target")
    known = {
        name: make_speculator(name, target, folder / f"head-{name}")
        for name in METHODS
        if name != "mtp"
    }
    return known | {"mtp": make_mtp(folder)}


@pytest.fixture(scope="module")
def expected(made):
    targets = {m.target: run(LLM(str(m.target), **COMMON)) for m in (made["eagle"], made["mtp"])}
    return {name: targets[m.target] for name, m in made.items()}


def with_speculator(made: Made, **more) -> LLM:
    config = {"adaptive": False, **made.config, **more.pop("config", {})}
    return LLM(str(made.target), speculative_config=config, **{**COMMON, **more})


@pytest.mark.parametrize("method", METHODS)
def test_outputs_are_the_same_and_guesses_those_of_the_paper(method, made, expected, monkeypatch):
    speculator, seen = made[method], []
    known: dict[int, int] = {}
    original, propose = speculator_runner.append_drafts, SpeculatorRunner.propose

    def start(runner, step):
        known.update(enumerate(runner.batch.num_tokens.tolist()))
        propose(runner, step)

    def note(runner, rows, logits):
        for row, found in zip(rows.tolist(), logits, strict=True):
            tokens = runner.batch.token_ids[row, : runner.batch.num_tokens[row]].tolist()
            seen.append((tokens[: known[row]], tokens[known[row] :], found.clone()))
        original(runner, rows, logits)

    llm = with_speculator(speculator, **FEW_BLOCKS)
    monkeypatch.setattr(SpeculatorRunner, "propose", start)
    monkeypatch.setattr(speculator_runner, "append_drafts", note)
    assert run(llm) == expected[method]
    num_cold = len(seen)
    assert run(llm) == expected[method], "with a prefix cache"
    stats = llm.llm_engine.engine_core.stats()
    assert stats.num_preemptions and stats.num_prefix_hits
    assert 0 < sum(stats.drafts.accepted) < stats.drafts.num_draft_tokens

    rng = random.Random(1)
    chosen = [*rng.sample(seen[:num_cold], 25), *rng.sample(seen[num_cold:], 25)]
    for tokens, drafts, found in chosen:
        want = speculator.reference.logits(tokens, drafts)
        is_token = want.isfinite()
        assert torch.equal(is_token, found.isfinite())
        scale = float(want[is_token].abs().max())
        torch.testing.assert_close(found / scale, want / scale, rtol=0, atol=2e-3)
    assert {len(drafts) for _, drafts, _ in chosen} >= {0, 1, 2}
