"""Test whole bucketing strategies, and the lines that published logs show for them."""

import pytest

from tests.bucketing.helpers import GIB, SEED_DECODES, SEED_PROMPTS, make_limits, make_settings
from vllm.bucketing.bucket import Phase, prefill
from vllm.bucketing.log_lines import (
    bucket_config_line,
    captured_line,
    generated_line,
    warmup_line,
)
from vllm.bucketing.settings import BucketSettings
from vllm.bucketing.strategies.generate import generate_buckets
from vllm.errors import ConfigError

SEED_PROMPT_CONFIG = (
    "Prompt bucket config (min, step, max_warmup) bs:[1, 32, 4], seq:[128, 128, 1024]"
)
SEED_DECODE_CONFIG = (
    "Decode bucket config (min, step, max_warmup) bs:[1, 128, 4], seq:[128, 128, 2048]"
)
SEED_GENERATED_PROMPTS = (
    "Generated 24 prompt buckets: [(1, 128), (1, 256), (1, 384), (1, 512), (1, 640), (1, 768), "
    "(1, 896), (1, 1024), (2, 128), (2, 256), (2, 384), (2, 512), (2, 640), (2, 768), (2, 896), "
    "(2, 1024), (4, 128), (4, 256), (4, 384), (4, 512), (4, 640), (4, 768), (4, 896), (4, 1024)]"
)
SEED_GENERATED_DECODES = (
    "Generated 48 decode buckets: [(1, 128), (1, 256), (1, 384), (1, 512), (1, 640), (1, 768), "
    "(1, 896), (1, 1024), (1, 1152), (1, 1280), (1, 1408), (1, 1536), (1, 1664), (1, 1792), "
    "(1, 1920), (1, 2048), (2, 128), (2, 256), (2, 384), (2, 512), (2, 640), (2, 768), (2, 896), "
    "(2, 1024), (2, 1152), (2, 1280), (2, 1408), (2, 1536), (2, 1664), (2, 1792), (2, 1920), "
    "(2, 2048), (4, 128), (4, 256), (4, 384), (4, 512), (4, 640), (4, 768), (4, 896), (4, 1024), "
    "(4, 1152), (4, 1280), (4, 1408), (4, 1536), (4, 1664), (4, 1792), (4, 1920), (4, 2048)]"
)


def test_the_lines_of_the_seed_are_reproduced():
    found = generate_buckets("linear", make_limits(), make_settings())
    assert found.info == (SEED_PROMPT_CONFIG, SEED_DECODE_CONFIG)
    assert found.warnings == ()
    assert list(found.prefill) == SEED_PROMPTS
    assert list(found.decode) == SEED_DECODES
    assert generated_line(Phase.PREFILL, found.prefill) == SEED_GENERATED_PROMPTS
    assert generated_line(Phase.DECODE, found.decode) == SEED_GENERATED_DECODES


def test_buckets_with_context_are_listed_as_triples():
    line = generated_line(Phase.PREFILL, [prefill(1, 256), prefill(1, 128, 2)])
    assert line == (
        "Generated 2 prompt buckets [bs, query, num_blocks]: [(1, 128, 2), (1, 256, 0)]"
    )


def test_warmup_lines_are_those_of_the_seed():
    free = int(79.16 * GIB)
    assert warmup_line(Phase.PREFILL, 1, 24, SEED_PROMPTS[-1], free) == (
        "[Warmup][Prompt][1/24] batch_size:4 seq_len:1024 free_mem:79.16 GiB"
    )
    assert warmup_line(Phase.DECODE, 48, 48, SEED_DECODES[0], int(55.43 * GIB)) == (
        "[Warmup][Decode][48/48] batch_size:1 seq_len:128 free_mem:55.43 GiB"
    )
    assert warmup_line(Phase.PREFILL, 11, 24, prefill(1, 896), int(48.77 * GIB), graph=True) == (
        "[Warmup][Graph/Prompt][11/24] batch_size:1 seq_len:896 free_mem:48.77 GiB"
    )


def test_capture_summaries_are_those_of_the_seed():
    listed = SEED_GENERATED_PROMPTS.partition(": ")[2]
    assert captured_line(Phase.PREFILL, SEED_PROMPTS, 24, 71011123) == (
        f"Graph/Prompt captured:24 (100.0%) used_mem:67.72 MiB buckets:{listed}"
    )
    assert captured_line(Phase.DECODE, [SEED_DECODES[32]], 1, 65536) == (
        "Graph/Decode captured:1 (100.0%) used_mem:64 KiB buckets:[(4, 128)]"
    )


def test_the_label_of_decode_sizes_is_the_callers():
    line = bucket_config_line(Phase.DECODE, [1, 32, 4], [128, 128, 4107], size_label="block")
    assert line == (
        "Decode bucket config (min, step, max_warmup) bs:[1, 32, 4], block:[128, 128, 4107]"
    )


def test_exponential_names_its_ranges_and_the_variables_it_ignores():
    limits = make_limits(num_blocks=1520, enable_prefix_caching=True, max_num_seqs=64)
    settings = BucketSettings.resolve(limits, {"VLLM_PROMPT_BS_BUCKET_MAX": 2})
    found = generate_buckets("exponential", limits, settings, merged_prefill=True)
    assert found.warnings == (
        "Using Exponential Strategy - Your configuration VLLM_PROMPT_BS_BUCKET_MAX=2 will be "
        "overwritten!",
    )
    assert found.info[:3] == (
        "Merged prefill warmup is not implemented for exponential bucketing yet",
        "Prompt bucket config (min, step, max_warmup, limit) bs:[1, 2, 64, 7], "
        "seq:[128, 128, 2048, 12]",
        "Decode bucket config (min, step, max_warmup, limit) bs:[1, 2, 64, 7], "
        "block:[128, 128, 1024, 11]",
    )
    assert found.info[3] == (
        f"Omitted {len(found.omitted)} prompt buckets due to exceeded token budget "
        f"(max_num_batched_tokens=8192)"
    )


@pytest.mark.parametrize("strategy", ["linear", "exponential", "sparse"])
def test_every_strategy_gives_distinct_ascending_buckets(strategy):
    limits = make_limits(num_blocks=65, block_size=16, max_num_seqs=7, enable_prefix_caching=True)
    found = generate_buckets(strategy, limits, BucketSettings.resolve(limits))
    for buckets in (found.prefill, found.decode):
        assert list(buckets) == sorted(set(buckets))
        assert buckets


HUGE = [
    ("linear", {"PROMPT_SEQ_BUCKET_MAX": 10**9}, "PROMPT_SEQ_BUCKET_MAX=1000000000 with VLLM_P"),
    ("linear", {"DECODE_BS_BUCKET_MAX": 10**9}, "BS_BUCKET_STEP=4 gives 249999999 steps"),
    ("linear", {"DECODE_BS_BUCKET_STEP": 1, "DECODE_BS_BUCKET_MAX": 19999}, "DECODE_.* 19999 x"),
    ("pad", {"PROMPT_CTX_BUCKET_MAX": 10**9}, "and at most 5000000 are accepted"),
    ("pad", {"PROMPT_CTX_BUCKET_MAX": 10**5, "PROMPT_SEQ_BUCKET_PAD_PERCENT": 0}, None),
    ("linear", {"PROMPT_BS_BUCKET_MIN": 10**9, "PROMPT_BS_BUCKET_STEP": 1}, None),
]
"""Strategy, variables, and the message if they ask for more buckets than can be made."""


@pytest.mark.parametrize(("strategy", "variables", "message"), HUGE)
def test_a_huge_range_is_refused_before_its_sizes_are_made(strategy, variables, message):
    given = {f"VLLM_{name}": value for name, value in variables.items()}
    if "DECODE_BS_BUCKET_STEP" in variables:
        given |= {"VLLM_DECODE_BLOCK_BUCKET_STEP": 1, "VLLM_DECODE_BLOCK_BUCKET_MIN": 1}
    settings = BucketSettings.resolve(make_limits(), given)
    if message is None:
        assert generate_buckets(strategy, make_limits(), settings).decode
    else:
        with pytest.raises(ConfigError, match=message):
            generate_buckets(strategy, make_limits(), settings)


def test_merged_prefill_says_so_before_its_ranges():
    found = generate_buckets("linear", make_limits(), make_settings(), merged_prefill=True)
    assert found.info[0] == "Merged prefill is enabled!"
    assert found.info[4].endswith("bs:[1, 1, 1], seq:[128, 128, 4096]")
    assert {b.batch for b in found.prefill} == {1}
