from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bucketing.helpers import make_limits, make_settings, pairs, triples
from vllm.bucketing.bucket import Bucket, Phase
from vllm.bucketing.catalog.catalog import Catalog
from vllm.bucketing.step_limits import split_by_token_budget, trim_decodes
from vllm.bucketing.strategies.linear import (
    linear_decode_buckets,
    linear_prefill_buckets,
    linear_range,
)
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


def counts_by_length(buckets: list[Bucket], batch: int) -> dict[int, list[int]]:
    """Return the numbers of context blocks that each query length has buckets for."""
    found: dict[int, list[int]] = {}
    for bucket in buckets:
        if bucket.batch == batch:
            found.setdefault(bucket.query_len, []).append(bucket.blocks)
    return found


@pytest.mark.parametrize(
    ("batch", "limits", "expected"),
    [
        (1, {"enable_prefix_caching": False}, {128: [0], 256: [0], 384: [0]}),
        # A cached prefix has whole blocks: prompts of 1 + 7 * 128, 129 + 6 * 128 and 257 + 5 * 128
        # tokens have the longest ones.
        (1, {}, {128: [0, 7], 256: [0, 6], 384: [0, 5]}),
        # A chunk may end anywhere, so up to 1023, 895 and 767 tokens may be computed before the
        # next chunk.
        (
            1,
            {"enable_chunked_prefill": True},
            {128: [0, 8], 256: [0, 7], 384: [0, 6]},
        ),
        # The budget of tokens is 2 * (128 + 3 * 128) or 2 * (384 + 128). In a batch of several
        # prompts, the query length of a prompt with context is one of the lengths that double.
        (2, {}, {128: [0, 3], 256: [0], 384: [0, 1]}),
        # The budget allows more context than one request can have.
        (
            2,
            {"max_num_batched_tokens": 8192},
            {128: [0, 7], 256: [0], 384: [0, 7]},
        ),
        # This bucket is above the budget even with the smallest context. A later filter removes and
        # reports it.
        (4, {}, {128: [0, 1], 256: [0], 384: [0]}),
    ],
)
def test_context_goes_up_to_the_most_that_can_be(batch, limits, expected):
    defaults = {
        "max_num_batched_tokens": 1024,
        "max_model_len": 1024,
        "enable_prefix_caching": True,
    }
    settings = make_settings(prompt_bs=(batch, 1, batch), prompt_seq=(128, 128, 384))
    buckets = linear_prefill_buckets(settings, make_limits(**{**defaults, **limits}))
    assert counts_by_length(buckets, batch) == expected


def test_context_has_few_sizes_and_doubles_where_it_is_long():
    limits = make_limits(
        max_num_batched_tokens=20000, max_model_len=20000, enable_prefix_caching=True
    )
    buckets = linear_prefill_buckets(make_settings(prompt_bs=(1, 1, 1)), limits)
    counts = counts_by_length(buckets, 1)
    # 128 is nearly 156, so 156 comes right after 64 and 128 is left out.
    assert counts[128] == [0, 8, 32, 64, 156]
    assert counts[1024] == [0, 8, 32, 64, 149]


@pytest.mark.parametrize("budget", [500, 1024, 1100, 8192])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_no_context_is_made_for_the_budget_to_drop(budget, is_chunked):
    limits = make_limits(
        max_num_batched_tokens=budget,
        max_model_len=min(1000, budget),
        enable_prefix_caching=True,
        enable_chunked_prefill=is_chunked,
    )
    buckets = linear_prefill_buckets(make_settings(), limits)
    _, omitted, _ = split_by_token_budget(buckets, limits, "")
    assert {bucket.blocks for bucket in omitted} <= {0}


@pytest.mark.parametrize("max_model_len", [100, 1000, 1025, 131072])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_no_prompt_within_the_lengths_lacks_a_bucket(max_model_len, is_chunked):
    limits = make_limits(
        max_num_batched_tokens=131072,
        max_model_len=max_model_len,
        enable_prefix_caching=True,
        enable_chunked_prefill=is_chunked,
    )
    catalog = Catalog(linear_prefill_buckets(make_settings(), limits), [])
    for query_len in range(1, min(1024, limits.max_query_len) + 1):
        blocks = limits.max_context_blocks(query_len)
        assert catalog.fit(Phase.PREFILL, 1, query_len, blocks) is not None


LONG = {"max_model_len": 262144, "max_num_batched_tokens": 262144}


def test_decode_blocks_end_at_what_a_batch_can_ask_for():
    settings = make_settings(decode_bs=(1, 32, 128))
    limits = make_limits(max_num_seqs=128, num_blocks=1025, **LONG)
    buckets = trim_decodes(linear_decode_buckets(settings), limits)
    assert len(buckets) == 72
    assert pairs(buckets)[-1] == (128, 1024)


def test_the_whole_cache_is_a_decode_size():
    settings = make_settings(decode_bs=(1, 1, 1))
    limits = make_limits(num_blocks=1519, **LONG)
    plain = trim_decodes(linear_decode_buckets(settings), limits)
    assert [b.blocks for b in plain] == [*range(128, 1409, 128), 1518]
    sliced = trim_decodes(linear_decode_buckets(settings), replace(limits, contiguous_pa=True))
    assert [b.blocks for b in sliced] == [*range(128, 1409, 128), 1519]


def test_a_slice_of_full_sequences_includes_the_null_block():
    """Four sequences of 2048 tokens fill 64 blocks, and a slice also contains block 0."""
    settings = make_settings(decode_block=(16, 16, 128))
    plain = trim_decodes(linear_decode_buckets(settings), make_limits())
    assert pairs(plain)[-4:] == [(4, 16), (4, 32), (4, 48), (4, 64)]
    sliced = trim_decodes(linear_decode_buckets(settings), make_limits(contiguous_pa=True))
    assert pairs(sliced)[-4:] == [(4, 16), (4, 32), (4, 48), (4, 65)]
    assert pairs(sliced)[0] == (1, 17)


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
    limits = make_limits(max_num_seqs=2, max_model_len=256)
    buckets = trim_decodes(linear_decode_buckets(settings), limits)
    assert pairs(buckets) == [(1, 1), (1, 2), (2, 2), (2, 3), (2, 4)]


def test_ranges_without_a_size_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"bs:\[10, 8, 12\], seq:\[128, 128, 1024\]\. Sizes from a step on are multiples of "
        r"it, and no multiple of 8 is from 10 to 12: raise VLLM_PROMPT_BS_BUCKET_MAX, or lower",
    ):
        linear_prefill_buckets(make_settings(prompt_bs=(10, 8, 12)), make_limits())
    with pytest.raises(ConfigError, match="128 is from 300 to 350: raise VLLM_PROMPT_SEQ_BUCKET_"):
        linear_prefill_buckets(make_settings(prompt_seq=(300, 128, 350)), make_limits())
    with pytest.raises(
        ConfigError, match=r"No buckets could be.*raise VLLM_DECODE_BLOCK_BUCKET_MAX"
    ):
        linear_decode_buckets(make_settings(decode_bs=(4, 4, 4), decode_block=(1, 1, 3)))
