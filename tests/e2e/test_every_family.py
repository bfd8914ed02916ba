"""Every family against `transformers` in float32: tokens, and log-probabilities of prompts and of
32 tokens each, in chunks, with preemption and a prefix hit; on the CPU by modules, and on the
simulated Gaudi with HPU graphs and with torch.compile.

The program of the CPU is compared so in model_executor/test_program_parity.py, and families with
states in test_state_families.py.
"""

from functools import cache
from pathlib import Path

import pytest
import torch

from gaudi_sim.bridge import SimBridge
from tests.e2e.logprob_checks import logprobs_of, wanted_logprobs
from tests.e2e.reference import Reference, generate, random_prompts
from tests.e2e.test_hpu_parity import BUCKETS, FEWER_TO_COMPILE
from tests.hpu import MODES, simulated_hpu
from tests.reach import scheduler_of
from tests.tiny_models import FAMILIES, MORE_FAMILIES
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.exhaustive

MAX_TOKENS = 32
PARAMS = SamplingParams(
    temperature=0,
    max_tokens=MAX_TOKENS,
    ignore_eos=True,
    detokenize=False,
    logprobs=0,
    prompt_logprobs=0,
)
SETTINGS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 160,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "enable_chunked_prefill": True,
    "block_size": 16,
    "num_gpu_blocks_override": 24,
}
"""So few blocks that requests are preempted."""
FOR_WINDOWS = {"num_gpu_blocks_override": 200}
"""On the CPU each group of layers with a window of its own has blocks."""
LARGE_BLOCKS = {"block_size": 64, "num_gpu_blocks_override": 8}
"""For torch.compile, which takes a second for each number of blocks that a context may have."""
LIMITS = {"gemma3": 2e-4}
"""Of a log-probability. Seven layers: one value is 1.07e-4 off."""


@pytest.fixture(scope="module")
def references(models):
    @cache
    def of(family: str) -> list[Reference]:
        prompts = random_prompts(24, 100, vocab_size=4096)
        found = generate(models(family), prompts, MAX_TOKENS)
        found = [reference for reference in found if min(reference.margins) > 1e-4]
        assert len(found) > 20
        return found

    return of


@cache
def has_windows(folder: Path) -> bool:
    llm = LLM(model=str(folder), **SETTINGS | FOR_WINDOWS)
    return scheduler_of(llm).cache.has_windows


def check(
    folder: Path,
    want: list[Reference],
    limit: float,
    card: SimBridge | None = None,
    **settings: object,
) -> None:
    """Run all prompts, twice the longest one, and compare.

    Args:
        folder: of the model.
        want: the prompts, and what transformers makes of them.
        limit: of what a log-probability may differ by.
        card: where it runs; None: the CPU.
        settings: arguments of `LLM`.
    """
    llm = LLM(model=str(folder), **SETTINGS | settings)
    before = card and card.counters()
    outputs = llm.generate([r.prompt for r in want], PARAMS, use_tqdm=False)
    for output, got, reference in zip(outputs, logprobs_of(outputs), want, strict=True):
        assert list(output.outputs[0].token_ids) == reference.token_ids
        torch.testing.assert_close(got, wanted_logprobs(reference), atol=limit, rtol=0)
    scheduler = scheduler_of(llm)
    assert scheduler.num_preemptions > 0 or scheduler.cache.has_windows  # test_windows.py
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    longest = max(want, key=lambda reference: len(reference.prompt))
    for _ in range(2):
        (output,) = llm.generate([longest.prompt], params, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == longest.token_ids[:6]
    assert output.num_cached_tokens >= 64
    if card and before:
        after = card.counters()
        assert after.compilations == before.compilations
        assert after.cpu_fallbacks == before.cpu_fallbacks


@pytest.mark.parametrize("mode", ["CPU", "HPU graphs", "torch.compile"])
@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_logprobs_are_those_of_transformers(family, mode, models, references):
    folder, want, limit = models(family), references(family), LIMITS.get(family, 1e-4)
    if mode == "CPU":
        check(folder, want, limit, **FOR_WINDOWS if has_windows(folder) else {})
        return
    fewer, blocks = (FEWER_TO_COMPILE, LARGE_BLOCKS) if mode == "torch.compile" else ({}, {})
    is_lazy, _ = MODES[mode]
    variables = BUCKETS | fewer | {"PT_HPU_LAZY_MODE": is_lazy}
    with simulated_hpu(has_profiling_run=False, **variables) as card:
        check(folder, want, limit, card, sampling_warmup="all", **blocks)
        assert is_lazy == (card.counters().graph_replays > 0)
