"""Same greedy tokens and log-probabilities as `transformers`, however requests are batched."""

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.e2e.reference import Reference, assert_same_tokens, generate, random_prompts
from tests.reach import scheduler_of
from tests.tiny_models import FAMILIES
from vllm import LLM, SamplingParams

MAX_MODEL_LEN = 160
MAX_TOKENS = 16
NUM_PROMPTS = 50
NUM_ALONE = 12
"""One by one they take most steps: the edges of a block, the longest, and some that begin alike."""

WHOLE_PROMPTS = {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024}
CHUNKS_OF_32 = {"enable_chunked_prefill": True, "max_num_batched_tokens": 32}
TINY_CACHE = {"num_gpu_blocks_override": 24}

SETTINGS = {
    "batch 32": {"max_num_seqs": 32, "block_size": 16, **WHOLE_PROMPTS},
    "batch 1": {"max_num_seqs": 1, "block_size": 16, **WHOLE_PROMPTS},
    "batch 1, chunks, block 128": {"max_num_seqs": 1, "block_size": 128, **CHUNKS_OF_32},
    "chunks": {"max_num_seqs": 32, "block_size": 16, **CHUNKS_OF_32},
    "chunks, no prefix cache": {
        "max_num_seqs": 32,
        "block_size": 16,
        "enable_prefix_caching": False,
        **CHUNKS_OF_32,
    },
    "block 128, no prefix cache": {
        "max_num_seqs": 32,
        "block_size": 128,
        "enable_prefix_caching": False,
        **WHOLE_PROMPTS,
    },
    "preemption": {"max_num_seqs": 32, "block_size": 16, **WHOLE_PROMPTS, **TINY_CACHE},
    "preemption, chunks, no prefix cache": {
        "max_num_seqs": 32,
        "block_size": 16,
        "enable_prefix_caching": False,
        **CHUNKS_OF_32,
        **TINY_CACHE,
    },
}


SAME_LAYERS = ("llama3", "llama_linear", "llama_yarn", "bundled")
"""Llamas with other tables of rotations or other sizes: how requests are batched is nothing to
these, so that they run in the setting that has most of it, and in the plainest."""

PLAINEST = "batch 32"
HARDEST = "preemption, chunks, no prefix cache"


def settings_of(family: str, *all_settings: str) -> list[str]:
    """Return the settings of a family: llama has all of them. The others have the plainest, the
    hardest, and one more, so that each setting meets several families."""
    if family in SAME_LAYERS:
        return [PLAINEST, HARDEST]
    if family == "llama":
        return list(all_settings)
    others = [name for name in all_settings if name not in (PLAINEST, HARDEST)]
    return [PLAINEST, HARDEST, others[list(FAMILIES).index(family) % len(others)]]


@pytest.fixture(scope="module")
def references(models):
    """What transformers makes of the prompts, computed once per family."""

    @cache
    def of(family: str) -> list[Reference]:
        prompts = random_prompts(NUM_PROMPTS, MAX_MODEL_LEN - MAX_TOKENS - 20, vocab_size=4096)
        return generate(models(family), prompts, MAX_TOKENS)

    return of


def make_llm(folder: Path, **settings) -> LLM:
    return LLM(
        model=str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=MAX_MODEL_LEN,
        num_gpu_blocks_override=settings.pop("num_gpu_blocks_override", 400),
        **settings,
    )


@pytest.mark.parametrize("family", [*FAMILIES, "bundled"])
def test_greedy_tokens_equal_transformers_however_they_are_batched(family, models, references):
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    for name in settings_of(family, *SETTINGS):
        want = references(family)
        if SETTINGS[name]["max_num_seqs"] == 1:
            want = want[:NUM_ALONE]
        llm = make_llm(models(family), **SETTINGS[name])
        outputs = llm.generate([r.prompt for r in want], params, use_tqdm=False)
        for output, reference in zip(outputs, want, strict=True):
            assert_same_tokens(output.outputs[0].token_ids, reference)
        scheduler = scheduler_of(llm)
        if not scheduler.cache.has_windows:  # with windows: see test_windows.py
            assert (scheduler.num_preemptions > 0) == ("preemption" in name), name
        pool = scheduler.cache.pool
        assert pool.num_free == pool.num_usable_blocks, name


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        (family, setting)
        for family in [*FAMILIES, "bundled"]
        for setting in settings_of(family, PLAINEST, "chunks", HARDEST)
    ],
)
def test_logprobs_equal_transformers(family, setting, models, references):
    want = references(family)[:20]
    llm = make_llm(models(family), **SETTINGS[setting])
    params = SamplingParams(
        temperature=0,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        detokenize=False,
        logprobs=3,
        prompt_logprobs=2,
    )
    outputs = llm.generate([r.prompt for r in want], params, use_tqdm=False)
    for output, reference in zip(outputs, want, strict=True):
        completion = output.outputs[0]
        assert output.prompt_logprobs is not None and completion.logprobs is not None
        assert output.prompt_logprobs[0] is None
        tokens = [*reference.prompt, *reference.token_ids]
        entries = [*output.prompt_logprobs[1:], *completion.logprobs]
        assert len(entries) == len(tokens) - 1
        num_prompt = len(reference.prompt)
        for position, (entry, token_id) in enumerate(zip(entries, tokens[1:], strict=True)):
            row = reference.logprobs[position]
            k = 2 if position < num_prompt - 1 else 3
            assert next(iter(entry)) == token_id and k <= len(entry) <= k + 1
            got = torch.tensor([e.logprob for e in entry.values()])
            torch.testing.assert_close(got, row[list(entry)], atol=1e-4, rtol=0)
            # Others may be as likely, but for rounding.
            first, last = (1 + int((row > row[token_id] + by).sum()) for by in (1e-4, -1e-4))
            assert first <= (entry[token_id].rank or 0) <= last


def test_up_to_its_window_a_model_computes_the_same_without_it(models):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    prompts = [list(range(5, 5 + length)) for length in (1, 7, 10)]
    found = []
    for without in (False, True):
        llm = LLM(
            model=str(models("mistral")),
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=16,
            num_gpu_blocks_override=40,
            disable_sliding_window=without,
        )
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
        found.append([(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in outputs])
    assert found[0] == found[1]
