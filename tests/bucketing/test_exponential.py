import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bucketing.helpers import make_limits
from vllm.bucketing.strategies.exponential import (
    ExponentialRange,
    ExponentialSettings,
    exponential_context,
    exponential_decode_buckets,
    exponential_prefill_buckets,
    exponential_range,
    num_powers,
)
from vllm.errors import ConfigError

TO_1408 = list(range(128, 1409, 128))


@pytest.mark.parametrize(
    ("largest", "contiguous", "plain"),
    [
        (1, [1], [1]),
        (2, [1, 2], [1, 2]),
        (3, [1, 2, 3], [1, 2, 4]),
        (5, [1, 2, 4, 5], [1, 2, 4, 6]),
        (16, [1, 2, 4, 8, 16], [1, 2, 4, 8, 16]),
        (256, [1, 2, 4, 8, 16, 32, 64, 128, 256], [1, 2, 4, 8, 16, 32, 64, 128, 256]),
    ],
)
def test_batch_sizes_are_powers_of_two(largest, contiguous, plain):
    sizes = ExponentialRange.up_to(1, 2, largest)
    assert exponential_range(sizes, contiguous_pa=True) == contiguous
    assert exponential_range(sizes) == plain


@pytest.mark.parametrize(
    ("largest", "limit", "expected"),
    [
        (1024, 11, [128, 256, 384, 512, 640, 768, 896, 1024]),
        (2048, 10, [128, 256, 384, 512, 640, 768, 896, 1152, 1536, 2048]),
        (2048, 12, [128, 256, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1664, 2048]),
        (4096, 13, [128, 256, 384, 512, 640, 768, 896, 1024, 1408, 1792, 2304, 3072, 4096]),
    ],
)
def test_collisions_are_filled_with_the_nearest_free_size(largest, limit, expected):
    sizes = ExponentialRange(128, 128, largest, limit)
    assert exponential_range(sizes) == expected
    assert exponential_range(sizes, contiguous_pa=True) == expected


def test_without_filling_collisions_vanish():
    sizes = exponential_range(ExponentialRange(128, 128, 2048, 10), fill=False)
    assert sizes == [128, 256, 384, 512, 640, 896, 1152, 1536, 2048]


@pytest.mark.parametrize(
    ("largest", "limit", "lower", "last", "last_contiguous"),
    [
        (1519, 12, TO_1408, 1536, 1519),
        (
            4107,
            14,
            [128, 256, 384, 512, 640, 768, 896, 1024, 1152, 1536, 1920, 2432, 3200],
            4224,
            4107,
        ),
        (
            5746,
            14,
            [128, 256, 384, 512, 640, 768, 896, 1024, 1408, 1792, 2432, 3328, 4352],
            5760,
            5746,
        ),
    ],
)
def test_the_last_size_is_exact_with_contiguous_attention(
    largest, limit, lower, last, last_contiguous
):
    sizes = ExponentialRange.up_to(128, 128, largest)
    assert sizes.limit == limit
    assert exponential_range(sizes) == [*lower, last]
    assert exponential_range(sizes, contiguous_pa=True) == [*lower, last_contiguous]


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (8192, [128, 256, 384, 512, 640, 768, 896, 1792, 2816, 3968, 4992, 6144, 7168, 8192]),
        (
            32768,
            [
                *(128, 256, 384, 512, 640, 1024, 1408, 2048),
                *(5888, 9728, 13568, 17408, 21248, 25088, 28928, 32768),
            ],
        ),
        (
            131072,
            [
                *(128, 256, 384, 640, 1024, 1664, 2688, 4480, 7296),
                *(21120, 34816, 48640, 62336, 76160, 89856, 103680, 117376, 131072),
            ],
        ),
    ],
)
def test_long_contexts_grow_evenly_in_their_upper_half(largest, expected):
    sizes = ExponentialRange.up_to(128, 128, largest)
    assert exponential_range(sizes, long_context=True) == expected
    assert exponential_range(sizes, long_context=True, contiguous_pa=True) == expected


def test_limits_count_the_powers_of_two():
    largest = (1, 2, 1024, 1519, 4107, 8192, 131072)
    assert [num_powers(n) for n in largest] == [1, 2, 11, 12, 14, 14, 18]


@pytest.mark.parametrize(
    ("query_len", "expected"),
    [(128, [0, 2, 3, 5, 7]), (512, [0, 2, 3, 4]), (896, [0, 1]), (1024, [0])],
)
def test_context_grows_to_what_fits_beside_the_prompt(query_len, expected):
    limits = make_limits(max_model_len=1024, enable_prefix_caching=True)
    assert exponential_context(limits, query_len) == expected


def test_without_context_there_is_no_context_dimension():
    assert exponential_context(make_limits(), 128) == [0]


@pytest.mark.parametrize("limit", [0, -1])
def test_a_range_needs_a_size(limit):
    with pytest.raises(ConfigError, match="num_buckets must be a positive integer"):
        exponential_range(ExponentialRange(1, 2, 4, limit))


@given(
    low=st.integers(1, 300),
    step=st.integers(1, 200),
    high=st.integers(1, 20_000),
    limit=st.integers(1, 16),
    contiguous=st.booleans(),
    long_context=st.booleans(),
    fill=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_exponential_range_is_sorted_unique_and_within_bounds(
    low, step, high, limit, contiguous, long_context, fill
):
    sizes = exponential_range(
        ExponentialRange(min(low, high), step, high, limit),
        contiguous_pa=contiguous,
        long_context=long_context,
        fill=fill,
    )
    assert sizes == sorted(set(sizes))
    assert 1 <= len(sizes) <= limit
    assert min(low, high) <= sizes[0]
    assert high <= sizes[-1] < high + step


def test_buckets_are_products_of_the_derived_ranges():
    limits = make_limits(num_blocks=1025, max_num_seqs=16, enable_prefix_caching=True)
    ranges = ExponentialSettings.derive(limits, 1)
    assert str(ranges.prompt_seq) == "[128, 128, 2048, 12]"
    prefill = exponential_prefill_buckets(ranges, limits)
    assert {b.batch for b in prefill} == {1}
    assert max(prefill).query_len == 2048
    decode = exponential_decode_buckets(ranges, limits)
    assert len(decode) == 5 * len(exponential_range(ranges.decode_block))
