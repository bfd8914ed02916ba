"""Test every draft method with every kind of sampling, on the CPU and on the simulated card:
outputs are the same as without drafts.
"""

import itertools
import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exhaustive import exhaustive
from tests.hpu import FEW_BUCKETS, simulated_hpu, steps_in_flight
from tests.reach import stats_of
from tests.speculators import (
    VOCAB_SIZE,
    cut_last_layer,
    load_target,
    make_mtp,
    make_speculator,
    make_target,
    write_tokenizer,
)
from tests.tiny_models import make_tiny_model
from vllm import LLM, SamplingParams
from vllm.sampling_params import GuidedDecodingParams

METHODS = (
    "ngram",
    "suffix",
    "draft_model",
    "eagle",
    "eagle3",
    "mtp",
    "mlp_speculator",
    "medusa",
)
WITH_STATES = {"ngram, recurrent states": "ngram", "draft_model, recurrent states": "draft_model"}
"""The methods with a model whose layers have recurrent states, or attention, or both."""
COMMON: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "num_gpu_blocks_override": 14,
}
"""Prompts in pieces, and too few blocks for four requests: some are preempted."""
FORMS = (
    GuidedDecodingParams(regex="(ab|cd){5,9}e"),
    GuidedDecodingParams(
        json={"type": "array", "items": {"enum": [1, 2, "ab"]}, "minItems": 3, "maxItems": 9}
    ),
)
GREEDY, SEEDED = {"temperature": 0.0}, {"temperature": 0.9, "seed": 5, "top_p": 0.9}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "few candidates": SEEDED | {"top_k": 3, "min_p": 0.05, "temperature": 1.4},
    "penalties": GREEDY | {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "penalties, seeded": SEEDED | {"presence_penalty": 0.7},
    "logit bias": GREEDY | {"logit_bias": {3: 1.5, 7: -100.0}},
    "minimum of tokens": {"temperature": 1.3, "seed": 2, "min_tokens": 12, "ignore_eos": False},
    "bad words": GREEDY | {"bad_words": ["a", "bc", "[["]},
    "allowed tokens": SEEDED | {"allowed_token_ids": [3, 4, 5, 9, 11]},
    "regular expression": GREEDY | {"guided_decoding": FORMS[0], "ignore_eos": False},
    "JSON": SEEDED | {"guided_decoding": FORMS[1], "ignore_eos": False, "min_tokens": 10},
    "log-probabilities": GREEDY | {"logprobs": 3},
    "of the prompt, too": SEEDED | {"logprobs": 1, "prompt_logprobs": 2},
    "stop strings": GREEDY | {"stop": ["ede", "1,", "ca"]},
    "a stop string that is seen": SEEDED | {"stop": ["a"], "include_stop_str_in_output": True},
    "several samples": SEEDED | {"n": 3},
    "all at once": {
        "temperature": 0.8,
        "seed": 9,
        "n": 2,
        "logprobs": 2,
        "repetition_penalty": 1.2,
        "logit_bias": {4: 1.0},
        "bad_words": ["cd"],
        "min_tokens": 5,
        "stop": ["d"],
    },
}
_rng = random.Random(4)
_SHARED = [_rng.randrange(3, VOCAB_SIZE) for _ in range(20)]
PROMPTS = {
    kind: [*_SHARED[: _rng.choice([0, 8, 17, 20])], *(_rng.randrange(3, VOCAB_SIZE) for _ in "ab")]
    for kind in KINDS
}
NUM_SAMPLED = 400
SAMPLED_PROMPT = [3, 4, 3, 4, 3]


def seen_by_user(output: Any) -> list[Any]:
    """Return everything that a user sees of an output, with the log-probabilities last."""
    entries = [output.prompt_logprobs, *(sample.logprobs for sample in output.outputs)]
    places = [place or {} for found in entries if found is not None for place in found]
    samples = [(list(s.token_ids), s.text, s.finish_reason, s.stop_reason) for s in output.outputs]
    ranks = [[(token, p.rank) for token, p in place.items()] for place in places]
    return [samples, ranks, [p.logprob for place in places for p in place.values()]]


def params_of(kind: str) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "ignore_eos": True} | KINDS[kind])


def run(llm: LLM, *, is_reversed: bool = False) -> dict[str, list[Any]]:
    """Run one batch with each kind of request; return what a user sees of each."""
    kinds = list(KINDS)[:: -1 if is_reversed else 1]
    params = [params_of(kind) for kind in kinds]
    prompts = [{"prompt_token_ids": PROMPTS[kind]} for kind in kinds]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {kind: seen_by_user(output) for kind, output in zip(kinds, outputs, strict=True)}


def sampled(llm: LLM) -> list[list[int]]:
    """Return three sampled tokens for each of many requests with the same prompt."""
    params = [
        SamplingParams(temperature=0.8, max_tokens=3, ignore_eos=True, seed=seed)
        for seed in range(NUM_SAMPLED)
    ]
    prompts = [{"prompt_token_ids": SAMPLED_PROMPT}] * NUM_SAMPLED
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]


@torch.no_grad()
def distribution(target: Path) -> torch.Tensor:
    """Return the probability of each sequence of three tokens, [V, V, V] float64, by
    transformers.
    """
    model, tokens = load_target(target), torch.arange(VOCAB_SIZE)
    pairs = torch.cartesian_prod(tokens, tokens)
    ids = torch.cat([torch.tensor(SAMPLED_PROMPT).expand(len(pairs), -1), pairs], 1)
    places = (model(ids).logits[:, -3:].double() / 0.8).softmax(-1)
    first, second, third = places.view(VOCAB_SIZE, VOCAB_SIZE, 3, VOCAB_SIZE).unbind(2)
    chosen = first[0, 0][:, None] * second[:, 0]
    return chosen[..., None] * third


def assert_sampled_from(expected: torch.Tensor, tokens: list[list[int]]) -> None:
    """Assert by a chi-square test at a probability of 0.001 that pairs of neighboring tokens have
    the right distribution; rare pairs are one class."""
    for pairs, weights in (
        ([(a, b) for a, b, _ in tokens], expected.sum(2)),
        ([(b, c) for _, b, c in tokens], expected.sum(0)),
    ):
        counts = torch.zeros_like(weights)
        for pair, count in Counter(pairs).items():
            counts[pair] = count
        want = weights * len(tokens)
        is_common = want >= 5
        observed = torch.cat([counts[is_common], counts[~is_common].sum()[None]])
        wanted = torch.cat([want[is_common], want[~is_common].sum()[None]])
        assert len(wanted) > 7
        chi_square = ((observed - wanted) ** 2 / wanted).sum()
        half_degrees = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
        assert torch.special.gammaincc(half_degrees, chi_square / 2) > 0.001


@dataclass(frozen=True)
class Case:
    """A model, and the settings of its drafts."""

    target: Path
    config: dict[str, Any]


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("drafts")
    target = make_target(folder / "target")
    write_tokenizer(target)
    draft = cut_last_layer(target, folder / "draft")
    configs: dict[str, dict[str, Any]] = {
        "ngram": {"prompt_lookup_min": 1, "num_speculative_tokens": 3},
        "suffix": {"prompt_lookup_min": 1, "num_speculative_tokens": 3},
        "draft_model": {"model": str(draft), "num_speculative_tokens": 3},
    }
    found = {name: Case(target, {"method": name, **config}) for name, config in configs.items()}
    for name in ("eagle", "eagle3", "mlp_speculator", "medusa"):
        made = make_speculator(name, target, folder / f"head-{name}")
        found[name] = Case(target, {"method": name, **made.config})
    mtp = make_mtp(folder)
    write_tokenizer(mtp.target)
    hybrid = make_tiny_model("bamba", folder / "hybrid", vocab_size=VOCAB_SIZE)
    write_tokenizer(hybrid)
    for name, method in WITH_STATES.items():
        found[name] = replace(found[method], target=hybrid)
    return found | {"mtp": Case(mtp.target, mtp.config)}


def make_llm(case: Case, **more: Any) -> LLM:
    return LLM(
        str(case.target), speculative_config={"adaptive": False, **case.config}, **COMMON, **more
    )


@cache
def expected(target: Path) -> dict[str, list[Any]]:
    """Return what users of a model see of each kind of request without drafts."""
    return {
        kind: [*exact, pytest.approx(logprobs, abs=1e-3)]
        for kind, (*exact, logprobs) in run(LLM(str(target), **COMMON)).items()
    }


@cache
def chances(target: Path) -> tuple[list[list[int]], torch.Tensor]:
    """Return the tokens of a model that are sampled without drafts, and their distribution."""
    return sampled(LLM(str(target), **COMMON)), distribution(target)


def check_users(case: Case, want: dict[str, list[Any]]) -> LLM:
    """Check the outputs with these drafts, some of which are right."""
    llm = make_llm(case)
    assert run(llm) == want
    assert run(llm, is_reversed=True) == want, "in another batch, with a prefix cache"
    stats = stats_of(llm)
    assert stats.num_preemptions and stats.num_prefix_hits
    assert 20 < sum(stats.drafts.accepted) < stats.drafts.num_draft_tokens
    return llm


# Exhaustive: test_speculators.py tests the other methods too, and test_drafts_cancelled.py tests
# them together with aborts.
@pytest.mark.parametrize(
    "method", [m if m in ("ngram", "eagle") else exhaustive(m) for m in METHODS]
)
def test_users_get_the_same_with_drafts_as_without(method, cases):
    target = cases[method].target
    llm = check_users(cases[method], expected(target))
    want, weights = chances(target)
    found = sampled(llm)
    assert found == want
    assert_sampled_from(weights, found)


@pytest.mark.parametrize(
    "method", [name if m == "ngram" else exhaustive(name) for name, m in WITH_STATES.items()]
)
def test_drafts_of_a_model_with_recurrent_states_change_nothing(method, cases):
    check_users(cases[method], expected(cases[method].target))


AHEAD = "the next step is scheduled before the result of the one before"
WAITS = "each step waits for the result of the one before"
SHORT = {("draft_model", AHEAD)}
ON_CARD = [
    case if case in SHORT else exhaustive(*case)
    for case in itertools.product(METHODS, (AHEAD, WAITS))
]


@pytest.mark.parametrize(("method", "order"), ON_CARD)
def test_the_simulated_card_gives_what_the_cpu_gives(method, order, cases):
    """The card is strict and uses HPU graphs: nothing compiles after the warm-up."""
    wanted = expected(cases[method].target)  # an engine for the CPU must not run inside
    card = simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS)
    with card as bridge, steps_in_flight():
        llm = make_llm(cases[method], sampling_warmup="all", async_scheduling=order == AHEAD)
        before = bridge.counters().compilations
        assert run(llm) == wanted
        assert bridge.counters().compilations == before
        stats = stats_of(llm)
    assert stats.num_preemptions
    assert 15 < sum(stats.drafts.accepted) < stats.drafts.num_draft_tokens
