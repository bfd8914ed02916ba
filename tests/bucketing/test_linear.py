import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bucketing.helpers import make_limits, make_settings, pairs, triples
from vllm.bucketing.linear import (
    linear_decode_buckets,
    linear_prefill_buckets,
    linear_range,
)
from vllm.bucketing.token_budget import split_by_token_budget
from vllm.errors import ConfigError


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((2, 32, 64), [2, 4, 8, 16, 32, 64]),
        ((2, 64, 128), [2, 4, 8, 16, 32, 64, 128]),
        ((1, 32, 4), [1, 2, 4]),
        ((1, 32, 1), [1]),
        ((1, 32, 16), [1, 2, 4, 8, 16]),
        ((1, 32, 50), [1, 2, 4, 8, 16, 32]),
        ((1, 32, 128), [1, 2, 4, 8, 16, 32, 64, 96, 128]),
        ((128, 128, 512), [128, 256, 384, 512]),
        ((128, 128, 1024), list(range(128, 1025, 128))),
        ((1, 128, 4), [1, 2, 4]),
        ((1, 4, 16), [1, 2, 4, 8, 12, 16]),
        ((0, 128, 0), [0]),
        ((0, 2, 6), [0, 2, 4, 6]),
        ((0, 1, 7), [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_linear_range_gives_the_documented_sizes(sizes, expected):
    assert linear_range(*sizes) == expected


def test_a_minimum_above_the_maximum_is_refused():
    with pytest.raises(ConfigError, match=r"Min\. batch size cannot be greater .* \(5 > 4\)"):
        linear_range(5, 1, 4)


@given(st.integers(1, 300), st.integers(1, 200), st.integers(1, 3000))
@settings(max_examples=100, deadline=None)
def test_linear_range_is_sorted_unique_and_within_bounds(low, step, high):
    low = min(low, high)
    sizes = linear_range(low, step, high)
    assert sizes == sorted(set(sizes))
    assert all(low <= size <= high for size in sizes)
    assert all(size % step == 0 for size in sizes if size >= step)


def test_the_seed_has_24_prompt_and_48_decode_buckets():
    settings, limits = make_settings(), make_limits()
    assert len(linear_prefill_buckets(settings, limits)) == 24
    decode = linear_decode_buckets(settings)
    assert len(decode) == 48
    assert pairs(decode)[:3] == [(1, 128), (1, 256), (1, 384)]
    assert pairs(decode)[-1] == (4, 2048)


def test_the_token_budget_keeps_five_of_twelve():
    settings = make_settings(prompt_bs=(1, 4, 16), prompt_seq=(512, 512, 1024))
    limits = make_limits(max_num_batched_tokens=2048, max_model_len=1024)
    buckets = linear_prefill_buckets(settings, limits)
    kept, omitted, warning = split_by_token_budget(buckets, limits, "")
    assert triples(kept) == [(1, 512, 0), (1, 1024, 0), (2, 512, 0), (2, 1024, 0), (4, 512, 0)]
    assert len(omitted) == 7
    assert warning is None


def test_a_budget_below_the_smallest_bucket_is_ignored_with_a_warning():
    settings = make_settings(prompt_bs=(2, 2, 4), prompt_seq=(128, 128, 256))
    limits = make_limits(max_num_batched_tokens=100, max_model_len=100)
    buckets = linear_prefill_buckets(settings, limits)
    kept, omitted, warning = split_by_token_budget(
        buckets, limits, f"bs:{settings.prompt_bs}, seq:{settings.prompt_seq}"
    )
    assert kept == buckets
    assert omitted == []
    assert warning == (
        "The current bucketing configuration (min, step, max_warmup): bs:[2, 2, 4], "
        "seq:[128, 128, 256] cannot be used with specified max_num_batched_tokens (100), as the "
        "smallest bucket (256) would exceed token budget. Please increase max_num_batched_tokens "
        "or decrease bucket minimum. Ignoring max_num_batched_tokens at risk of out-of-memory "
        "errors."
    )


def test_one_prompt_may_have_any_context_a_batch_counts_with_it():
    limits = make_limits(
        max_num_batched_tokens=1024, max_model_len=1024, enable_prefix_caching=True
    )
    settings = make_settings(prompt_bs=(1, 2, 2), prompt_seq=(128, 128, 512))
    kept, _, _ = split_by_token_budget(linear_prefill_buckets(settings, limits), limits, "")
    assert max(b.blocks for b in kept if b.batch == 1 and b.query_len == 128) == 7
    assert max(b.blocks for b in kept if b.batch == 2 and b.query_len == 128) == 3


def test_prefix_caching_adds_every_context_that_fits_beside_the_prompt():
    limits = make_limits(max_model_len=1024, enable_prefix_caching=True)
    settings = make_settings(prompt_bs=(1, 1, 1))
    buckets = linear_prefill_buckets(settings, limits)
    assert [b.blocks for b in buckets if b.query_len == 768] == [0, 1, 2]
    assert [b.blocks for b in buckets if b.query_len == 1024] == [0]
    assert len(buckets) == sum(range(1, 9))


def test_decode_blocks_end_at_what_a_batch_can_ask_for():
    settings = make_settings(decode_bs=(1, 32, 128))
    buckets = linear_decode_buckets(settings, max_blocks=1024)
    assert len(buckets) == 72
    assert pairs(buckets)[-1] == (128, 1024)


def test_the_whole_cache_is_a_decode_size_with_contiguous_attention():
    settings = make_settings(decode_bs=(1, 1, 1))
    buckets = linear_decode_buckets(settings, max_blocks=1519, append_max=True)
    assert [b.blocks for b in buckets] == [*range(128, 1409, 128), 1519]


def test_a_decode_has_a_block_for_each_sequence():
    settings = make_settings(decode_bs=(1, 1, 3), decode_block=(1, 1, 3))
    assert pairs(linear_decode_buckets(settings)) == [
        (1, 1),
        (1, 2),
        (1, 3),
        (2, 2),
        (2, 3),
        (3, 3),
    ]


def test_a_trimmed_decode_has_no_more_blocks_than_its_sequences():
    settings = make_settings(decode_bs=(1, 1, 2), decode_block=(1, 1, 5))
    buckets = linear_decode_buckets(settings, max_blocks_per_seq=2)
    assert pairs(buckets) == [(1, 1), (1, 2), (2, 2), (2, 3), (2, 4)]


def test_ranges_without_a_size_are_refused():
    with pytest.raises(ConfigError, match=r"bs:\[10, 8, 12\], seq:\[128, 128, 1024\]"):
        linear_prefill_buckets(make_settings(prompt_bs=(10, 8, 12)), make_limits())
    with pytest.raises(ConfigError, match="No buckets could be captured"):
        linear_decode_buckets(make_settings(decode_bs=(4, 4, 4), decode_block=(1, 1, 3)))
