"""Test each method with drafts that are always right and with drafts that are always wrong."""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.test_every_draft import COMMON, METHODS
from tests.exhaustive import exhaustive
from tests.hpu import FEW_BUCKETS, simulated_hpu
from tests.reach import stats_of
from tests.speculators import VOCAB_SIZE, Made, make_mtp, make_right, make_speculator, make_target
from vllm import LLM, SamplingParams
from vllm.core.drafting.lookup_drafts import NgramDrafts

ROOMY = COMMON | {"num_gpu_blocks_override": 33, "skip_tokenizer_init": True}
RIGHT, LIES = "is right", "lies"
PROMPTS = [[5, 8, 9, 4, 4], [3, 4, 3, 3, 3, 3, 3], [9] * 20]
"""The model repeats the last token of each for ever; lookups find that there as well. An
EAGLE-3 head has all of these tokens."""


def make(method: str, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    lies = kind == LIES
    if method == "mtp":
        made = make_mtp(folder)
        make_right(made, lies=lies)
        return made
    of_speculator = method if method in ("eagle", "eagle3", "mlp_speculator", "medusa") else "eagle"
    target = make_target(folder / "target")
    made = make_speculator(of_speculator, target, folder / "eagle-head")
    make_right(made, lies=lies)
    if method == of_speculator:
        return made
    config = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        config["model"] = str(shutil.copytree(target, folder / "draft"))
        if lies:
            weights = load_file(folder / "draft/model.safetensors")
            weights["lm_head.weight"] *= -1
            save_file(weights, folder / "draft/model.safetensors")
    else:
        config["prompt_lookup_min"] = 1
        if lies:
            monkeypatch.setattr(NgramDrafts, "propose_for", another_token)
            monkeypatch.setattr(
                "vllm.core.drafting.lookup_drafts.SuffixDrafts.propose_for", another_token
            )
    return replace(made, config=config)


def another_token(source: NgramDrafts, request: Any) -> list[int]:
    """Return wrong drafts, in which each token is one more than the last known token."""
    return [(request.token_ids[-1] + 1) % VOCAB_SIZE] * source.max_drafts


def run(made: Made, *, adaptive: bool, num_tokens: int, **more: Any) -> LLM:
    config = {"adaptive": adaptive, **made.config}
    llm = LLM(str(made.target), speculative_config=config, **ROOMY, **more)
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    for output in llm.generate(prompts, params, use_tqdm=False):
        assert output.outputs[0].token_ids == output.prompt_token_ids[-1:] * num_tokens
    return llm


def drafts_of(llm: LLM) -> tuple[int, int]:
    stats = stats_of(llm).drafts
    return stats.num_draft_tokens, sum(stats.accepted)


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        case if case[0] in ("ngram", "eagle3", "mtp", "draft_model") else exhaustive(*case)
        for case in itertools.product(METHODS, (RIGHT, LIES))
    ],
)
def test_steps_take_all_of_one_and_none_of_the_other(method, kind, tmp_path, monkeypatch):
    made = make(method, kind, tmp_path, monkeypatch)
    num_drafts, num_right = drafts_of(run(made, adaptive=False, num_tokens=40))
    assert num_right == (num_drafts if kind == RIGHT else 0)
    # Each step checks as many drafts as allowed; the last steps of a request may check fewer.
    most = made.config.get("num_speculative_tokens", 3)
    assert num_drafts > (80 if kind == RIGHT else 39 * most)
    if kind == LIES:
        llm = run(made, adaptive=True, num_tokens=40)
        num_adaptive, _ = drafts_of(llm)
        assert 0 < num_adaptive < 0.7 * num_drafts
        stats = stats_of(llm).drafts
        num_drafted = stats.num_drafts // len(PROMPTS)
        # The choice of steps with drafts depends on measured times. Each step is counted once.
        assert 30 < stats.num_declined_steps + num_drafted < 40


ON_CARD = [
    pytest.param(*case, marks=[] if case == ("medusa", LIES) else pytest.mark.exhaustive)
    for case in itertools.product(METHODS, (RIGHT, LIES))
]


@pytest.mark.parametrize(("method", "kind"), ON_CARD)
def test_so_it_is_on_the_simulated_card(method, kind, tmp_path, monkeypatch):
    made = make(method, kind, tmp_path, monkeypatch)
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS):
        num_drafts, num_right = drafts_of(run(made, adaptive=False, num_tokens=16))
    assert num_right == (num_drafts if kind == RIGHT else 0)
    assert num_drafts > 25
