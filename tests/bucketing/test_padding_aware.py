"""Test padding-aware ranges against documented examples and their own bound on padding."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bucketing.helpers import make_limits
from tests.worker.hpu_helpers import make_config
from vllm.bucketing.catalog.bucket_plan import plan_buckets
from vllm.bucketing.strategies.padding_aware import PaddedRange, PaddingAwareSettings, padded_range
from vllm.errors import ConfigError


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((0, 8, 64, 64, 0), [0, 1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
        ((0, 8, 64, 64, 50), [0, 1, 2, 4, 8, 16, 32, 64]),
        ((0, 8, 64, 16, 50), [0, 1, 2, 4, 8, 16, 32, 48, 64]),
        ((16, 16, 128, 32, 25), [16, 32, 48, 64, 80, 96, 128]),
        ((1, 2, 16, 4, 25), [1, 2, 4, 6, 8, 12, 16]),
        ((0, 2, 15, 16, 25), [0, 1, 2, 4, 6, 8, 12, 15]),
        (
            (128, 128, 2048, 512, 25),
            [128, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048],
        ),
        (
            (1, 2, 128, 32, 25),
            [1, 2, 4, 6, 8, 12, 16, 22, 30, 32, 44, 60, 64, 86, 96, 128],
        ),
    ],
)
def test_padded_range_gives_the_documented_sizes(sizes, expected):
    assert padded_range(PaddedRange(*sizes)) == expected


@given(
    low=st.integers(0, 200),
    step=st.integers(1, 130),
    more=st.integers(0, 5000),
    pad_max=st.integers(0, 600),
    percent=st.integers(0, 50),
)
@settings(max_examples=150, deadline=None)
def test_no_step_between_sizes_is_both_avoidable_and_beyond_the_bound(
    low, step, more, pad_max, percent
):
    """If a gap between two sizes is larger than one step, its padding is within both bounds."""
    sizes = PaddedRange(low, step, low + more, pad_max, percent)
    found = padded_range(sizes)
    assert found == sorted(set(found))
    assert found[0] == sizes.min
    assert found[-1] == sizes.max
    bound = pad_max or sizes.max
    for smaller, larger in pairwise(found):
        padding = larger - smaller - 1
        is_bounded = 100 * padding <= percent * larger and padding <= bound
        assert is_bounded or larger - smaller <= max(step, smaller)


def test_defaults_follow_the_limits_and_variables_replace_them():
    limits = make_limits(
        max_num_seqs=16, max_model_len=4096, enable_prefix_caching=True, num_blocks=1000
    )
    found = PaddingAwareSettings.resolve(limits, {})
    assert str(found.prompt_bs) == "[1, 1, 1, 1, 25]"
    assert str(found.prompt_seq) == "[128, 128, 4096, 1024, 25]"
    assert str(found.prompt_ctx) == "[0, 2, 31, 64, 25]"
    assert str(found.decode_bs) == "[1, 2, 16, 4, 25]"
    assert str(found.decode_block) == "[128, 128, 512, 128, 25]"
    given = {
        "VLLM_DECODE_BLOCK_BUCKET_PAD_MAX": 0,
        "VLLM_DECODE_BS_BUCKET_PAD_PERCENT": 50,
        "VLLM_PROMPT_CTX_BUCKET_MAX": 8,
    }
    found = PaddingAwareSettings.resolve(limits, given)
    assert str(found.decode_block) == "[128, 128, 512, 0, 25]"
    assert str(found.decode_bs) == "[1, 2, 16, 4, 50]"
    assert str(found.prompt_ctx) == "[0, 2, 8, 64, 25]"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("VLLM_PROMPT_SEQ_BUCKET_PAD_PERCENT", 51, "must be 0 to 50 percent"),
        ("VLLM_PROMPT_SEQ_BUCKET_PAD_PERCENT", -1, "at least 0"),
        ("VLLM_DECODE_BS_BUCKET_PAD_MAX", -1, "at least 0"),
        ("VLLM_PROMPT_CTX_BUCKET_STEP", 0, "at least 1"),
    ],
)
def test_a_bound_that_is_not_accepted_is_named(variable, value, message):
    config = make_config(bucketing_strategy="pad", bucket_variables=((variable, value),))
    with pytest.raises(ConfigError, match=rf"{variable}={value} .*{message}"):
        plan_buckets(config, 17)


def test_the_log_names_ranges_and_bounds():
    config = make_config(
        block_size=128,
        max_model_len=2048,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        bucketing_strategy="pad",
    )
    info = plan_buckets(config, 2000).info
    assert info[0] == (
        "Prompt bucket config (min, step, max_warmup, pad_max, pad_percent) bs:[1, 1, 1, 1, 25], "
        "query:[128, 128, 2048, 512, 25], blocks:[0, 2, 16, 16, 25]"
    )
    assert "block:[128, 128, 2048, 512, 25]" in info[2]


def test_linear_buckets_say_which_variables_they_do_not_read():
    variable = ("VLLM_PROMPT_CTX_BUCKET_MAX", 4)
    plan = plan_buckets(make_config(bucket_variables=(variable,)), 17)
    assert plan.warnings == (
        "VLLM_PROMPT_CTX_BUCKET_MAX=4 has no effect: only VLLM_BUCKETING_STRATEGY=pad reads it",
    )
