"""Test the stages of the sampler as a card compiles them, captured with functionalisation."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from gaudi_sim.graphs.capture import capture
from gaudi_sim.graphs.rules import operator_violations, write_violations
from tests.conformance.hpu_program import SHAPES, resident_tokens
from tests.exhaustive import exhaustive
from tests.reach import sample_in_one_pass
from vllm.sample.restrictions.masks import TokenMasks, bit_values, num_words
from vllm.sample.restrictions.output_rules import NO_TIMES, LogitRules
from vllm.sample.sampler import Sampler, SamplerOutput
from vllm.sample.state import SamplingState
from vllm.sample.static_shapes import FILTERED, FILTERED_LARGE, GREEDY, RANDOM
from vllm.sample.warmup import warmup_launches
from vllm.worker.hpu.launches.input import fields_of, padded_sizes

NUM_ROWS = 4
VOCAB_SIZE = 600
KINDS = {"greedy": GREEDY, "random": RANDOM, "filtered": FILTERED, "large": FILTERED_LARGE}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def launches():
    """Return sampling metadata of every kind, with and without edits and penalties."""
    state = SamplingState(
        NUM_ROWS, VOCAB_SIZE, CPU, static_shapes=True, max_model_len=200, max_logprobs=20
    )
    return list(warmup_launches(state, NUM_ROWS))


def violations_of(function, *args) -> list[str]:
    graph = capture(function, *args)
    return operator_violations(graph) + write_violations(graph)


@pytest.mark.parametrize(
    ("kind", "has_all_stages"),
    [
        ("greedy", False),
        *((kind, True) for kind in KINDS),
        # Parts of the above: they guard against stages that run only together.
        *(exhaustive(kind, False) for kind in KINDS if kind != "greedy"),
    ],
)
def test_a_distribution_runs_on_the_device(launches, kind, has_all_stages):
    sampler, logits = Sampler(pass_elements=None), torch.zeros(NUM_ROWS, VOCAB_SIZE).bfloat16()
    launch = next(
        x
        for x in launches
        if x.active & FILTERED_LARGE == KINDS[kind]
        and (x.penalties is not None or not has_all_stages)
    )
    launch = replace(launch, features=None, masks=None, logprobs=None)
    if not has_all_stages:
        launch = replace(launch, edits=None, penalties=None)

    def sample(logits: Tensor) -> tuple[Tensor, Tensor]:
        return sample_in_one_pass(sampler, logits, launch)

    assert violations_of(sample, logits) == []


def test_masks_run_on_the_device():
    rows = torch.arange(2)
    words = torch.full((2, num_words(VOCAB_SIZE)), -1, dtype=torch.int32)
    masks = TokenMasks(np.arange(2), words, bit_values(CPU))

    def apply(logits: Tensor) -> Tensor:
        copy = logits.clone()
        masks.apply_on_card(copy, rows)
        return copy

    assert violations_of(apply, torch.zeros(NUM_ROWS, 640)) == []


def test_rules_of_a_model_run_on_the_device():
    rows = torch.arange(2)
    words = torch.full((2, num_words(VOCAB_SIZE)), -1, dtype=torch.int32)
    masks = TokenMasks(np.arange(2), words, bit_values(CPU), rows)
    rules = LogitRules(masks, torch.tensor([500, NO_TIMES], dtype=torch.int32))

    def apply(logits: Tensor) -> Tensor:
        copy = logits.clone()
        masks.apply_on_card(copy, rows)
        rules.apply_on_card(copy, rules.first_times)
        return copy

    assert violations_of(apply, torch.zeros(NUM_ROWS, VOCAB_SIZE).bfloat16()) == []


@pytest.mark.parametrize("width", [0, 8, 20])
def test_log_probabilities_run_on_the_device(width):
    sampler, token_ids = Sampler(pass_elements=None), torch.zeros(NUM_ROWS, dtype=torch.int32)

    def gather(logits: Tensor) -> tuple[Tensor, ...]:
        return tuple(sampler.gather_logprobs(logits, token_ids, width))

    assert violations_of(gather, torch.zeros(NUM_ROWS, VOCAB_SIZE).bfloat16()) == []


@pytest.mark.parametrize(
    "shape",
    [
        *("decode", "decode of drafts", "merged prefill"),
        *map(exhaustive, ("contiguous decode", "prefill", "prefill with context")),
    ],
)
def test_sampled_tokens_are_compared_with_drafts_and_kept_in_place(shape):
    shape, resident = SHAPES[shape], resident_tokens()
    names = ("newest", "ends", "drafts")

    def keep(packed: Tensor, token_ids: Tensor, *kept: Tensor) -> Tensor | None:
        for name, tensor in zip(names, kept, strict=True):
            setattr(resident, name, tensor)
        return resident.accept(packed, shape, SamplerOutput(token_ids, token_ids))

    packed = torch.zeros(sum(fields_of(shape).part_sizes(padded_sizes(shape))), dtype=torch.int32)
    token_ids = torch.zeros(shape.num_rows, dtype=torch.int32)
    kept = [getattr(resident, name) for name in names]
    assert violations_of(keep, packed, token_ids, *kept) == []
