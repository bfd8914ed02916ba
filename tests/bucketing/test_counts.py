"""Test the published bucket counts of one configuration, and the ranges that give them.

max_num_batched_tokens 8192, max_model_len 32768, max_num_seqs 256, 4127 blocks: exponential 120
prompt + 81 decode, linear 14,368 + 4,042
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bucketing.helpers import make_limits, make_settings
from vllm.bucketing.bucket import prefill
from vllm.bucketing.step_limits import split_by_token_budget, trim_decodes
from vllm.bucketing.strategies.exponential import ExponentialRange
from vllm.bucketing.strategies.linear import linear_decode_buckets, linear_range
from vllm.bucketing.strategies.sparse import (
    SparseSettings,
    sparse_decode_buckets,
    sparse_prefill_buckets,
    sparse_range,
)

PUBLISHED = make_limits(
    max_num_batched_tokens=8192,
    max_model_len=32768,
    max_num_seqs=256,
    num_blocks=4128,  # of which 4127 can be used: block 0 is the null block
    enable_chunked_prefill=True,
)


def test_sparse_gives_the_published_exponential_counts():
    ranges = SparseSettings.derive(PUBLISHED)
    assert len(sparse_prefill_buckets(ranges, PUBLISHED)) == 120
    assert len(sparse_decode_buckets(ranges, PUBLISHED)) == 81


def test_linear_gives_the_published_counts():
    """Prompts run one by one, with lengths up to the budget and every context that fits in
    addition. Decode batches grow in steps of two, and decode blocks up to the whole cache, trimmed
    to the blocks that the sequences can have.

    With the defaults of the twelve variables, batches grow in steps of 32.
    """
    settings = make_settings(
        prompt_bs=(1, 1, 1),
        prompt_seq=(128, 128, 8192),
        decode_bs=(1, 2, 256),
        decode_block=(128, 128, 4224),
    )
    every_context = [
        prefill(1, length, blocks)
        for length in linear_range(128, 128, 8192)
        for blocks in range((PUBLISHED.max_seq_len - length) // PUBLISHED.block_size + 1)
    ]
    kept, omitted, _ = split_by_token_budget(every_context, PUBLISHED, "")
    assert len(kept) == 14_368
    assert omitted == []
    decode = trim_decodes(linear_decode_buckets(settings), PUBLISHED)
    assert len(decode) == 4_042


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 2, 4, 3), [1, 2, 4]),
        ((1, 2, 8, 4), [1, 2, 4, 6, 8]),
        ((1, 2, 16, 5), [1, 2, 4, 6, 10, 16]),
        ((1, 2, 64, 7), [1, 2, 4, 8, 12, 22, 36, 64]),
        ((1, 2, 256, 9), [1, 2, 4, 8, 14, 24, 42, 78, 140, 256]),
        ((128, 128, 2048, 11), [128, 256, 384, 512, 768, 896, 1280, 1664, 2048]),
        (
            (128, 128, 8192, 13),
            [128, 256, 384, 512, 768, 1024, 1536, 2048, 2944, 4096, 5888, 8192],
        ),
        ((0, 1, 15, 5), [0, 1, 2, 4, 8, 15]),
        ((0, 1, 31, 6), [0, 1, 2, 4, 8, 16, 31]),
        ((0, 1, 1, 2), [0, 1]),
        ((1, 16, 512, 10), [1, 16, 32, 48, 64, 80, 112, 176, 240, 352, 512]),
    ],
)
def test_sparse_range_gives_the_documented_sizes(sizes, expected):
    assert sparse_range(ExponentialRange(*sizes)) == expected


@given(st.integers(1, 64), st.integers(1, 5000), st.integers(1, 14))
@settings(max_examples=60, deadline=None)
def test_sparse_range_is_sorted_unique_and_within_bounds(step, high, limit):
    sizes = sparse_range(ExponentialRange(1, min(step, high), high, limit))
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == high
