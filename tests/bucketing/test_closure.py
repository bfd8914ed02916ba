"""Test the bounds and the proof on small engines, by enumerating every step that can happen."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bucketing.helpers import SEED_DECODES, SEED_PROMPTS, close, make_limits
from vllm.bucketing.bucket import Bucket, Phase, decode, prefill
from vllm.bucketing.catalog.catalog import Catalog
from vllm.bucketing.catalog.closure import missing_buckets, prove, unused_buckets
from vllm.bucketing.settings import BucketSettings
from vllm.bucketing.step_limits import StepLimits
from vllm.bucketing.strategies.generate import generate_buckets
from vllm.errors import ConfigError

small_limits = st.builds(
    StepLimits,
    max_num_seqs=st.integers(1, 4),
    max_model_len=st.integers(1, 9),
    max_num_batched_tokens=st.integers(9, 12),
    block_size=st.integers(1, 3),
    num_blocks=st.none() | st.integers(2, 9),
    enable_chunked_prefill=st.booleans(),
    enable_prefix_caching=st.booleans(),
    contiguous_pa=st.booleans(),
    max_chunk_tokens=st.none() | st.integers(1, 6),
    max_prefill_batch=st.integers(1, 3),
    max_draft_tokens=st.sampled_from([0, 0, 2]),
    max_draft_batch=st.none() | st.integers(1, 4),
)


def tables(limits: StepLimits, count: int) -> set[tuple[int, int]]:
    """Return (references, distinct blocks) of every way in which `count` sequences can hold blocks.

    Each sequence has a table of up to C blocks, and may share its first blocks with an earlier
    sequence. The last block of a table, which is being written, is never shared.
    """
    found = set()
    for lengths in itertools.product(range(1, limits.max_blocks_per_seq + 1), repeat=count):
        most_shared = [
            max((min(n, m) - 1 for m in lengths[:i]), default=0) for i, n in enumerate(lengths)
        ]
        if not limits.enable_prefix_caching:
            most_shared = [0] * count
        for shared in itertools.product(*(range(n + 1) for n in most_shared)):
            found.add((sum(lengths), sum(lengths) - sum(shared)))
    return found


def decodes_of(limits: StepLimits) -> set[Bucket]:
    """Return every decode batch: without drafts, and with the largest number of drafts for some
    requests.
    """
    found = set()
    most = limits.max_draft_batch or limits.max_num_seqs
    for count in range(1, min(limits.max_num_seqs, limits.max_num_batched_tokens) + 1):
        lens = {1, 1 + limits.max_draft_tokens * (count <= most)}
        for refs, distinct in tables(limits, count):
            if distinct > limits.usable_blocks:
                continue
            found |= {decode(count, refs, query_len) for query_len in lens}
            if limits.contiguous_pa:  # the slice has blocks 1 to `distinct` and the null block
                found |= {decode(count, distinct + 1, query_len) for query_len in lens}
    return found


def prefills_of(limits: StepLimits) -> set[Bucket]:
    """Return every prefill of one prompt, and of several prompts that fit the budget with
    padding.
    """
    longest = min(limits.max_model_len, limits.usable_blocks * limits.block_size)
    chunk = limits.max_num_batched_tokens
    if limits.enable_chunked_prefill and limits.max_chunk_tokens is not None:
        chunk = min(chunk, limits.max_chunk_tokens)
    rows = set()
    for query_len in range(1, min(chunk, longest) + 1):
        for computed in range(longest - query_len + 1):
            is_whole_blocks = computed % limits.block_size == 0
            if limits.enable_chunked_prefill or (
                computed == 0 or (limits.enable_prefix_caching and is_whole_blocks)
            ):
                rows.add((query_len, -(-computed // limits.block_size)))
    found = {prefill(1, *row) for row in rows}
    for batch in range(2, limits.max_prefill_rows + 1):
        for one, other in itertools.product(rows, repeat=2):
            query_len = max(one[0], other[0])
            if batch * query_len <= limits.max_num_batched_tokens:
                found.add(prefill(batch, query_len, max(one[1], other[1])))
    return found


def smallest(shapes: set[Bucket]) -> list[Bucket]:
    return sorted(s for s in shapes if not any(s != t and s.covers(t) for t in shapes))


def build(limits: StepLimits) -> set[Bucket]:
    return decodes_of(limits) | prefills_of(limits)


catalogs = st.builds(
    Catalog,
    st.sets(
        st.builds(prefill, st.integers(1, 3), st.integers(1, 9), st.integers(0, 9)), max_size=6
    ),
    st.sets(
        st.builds(decode, st.integers(1, 4), st.integers(1, 12), st.sampled_from([1, 1, 3])),
        max_size=6,
    ),
)


@given(small_limits)
@settings(max_examples=100, deadline=None)
def test_bounds_are_what_enumeration_reaches(limits):
    reached = decodes_of(limits)
    for count in range(1, limits.max_decode_batch + 1):
        assert max(s.blocks for s in reached if s.batch == count) == limits.max_decode_blocks(count)
    assert max(s.batch for s in reached) == limits.max_decode_batch
    prompts = prefills_of(limits)
    alone = [s for s in prompts if s.batch == 1]
    assert max(s.query_len for s in alone) == limits.max_query_len
    for query_len in range(1, limits.max_query_len + 1):
        most = max(s.blocks for s in alone if s.query_len == query_len)
        assert most == limits.max_context_blocks(query_len)


@given(small_limits, catalogs)
@settings(max_examples=100, deadline=None)
def test_the_proof_agrees_with_enumeration(limits, catalog):
    shapes = build(limits)
    asked = [(s.phase, s.batch, s.query_len, s.blocks) for s in shapes]
    uncovered = {s for s, a in zip(shapes, asked, strict=True) if catalog.fit(*a) is None}
    report = prove(catalog, limits)
    if limits.max_prefill_batch == 1:
        assert list(report.uncovered) == smallest(uncovered)
        assert report.is_covered == (not uncovered)
    else:  # in a batch, the largest context is the same for all query lengths
        assert not uncovered or not report.is_covered
    assert all(any(s.covers(t) for t in report.uncovered) for s in uncovered)


@given(small_limits, catalogs)
@settings(max_examples=100, deadline=None)
def test_closing_covers_everything_with_no_bucket_too_many(limits, catalog):
    missing = missing_buckets(catalog, limits)
    closed = close(catalog, limits)
    assert prove(closed, limits).is_covered
    assert all(
        closed.fit(s.phase, s.batch, s.query_len, s.blocks) is not None for s in build(limits)
    )
    assert prove(catalog, limits).is_covered == (not missing)
    for bucket in missing:
        others, own_limits = closed.without([bucket]), limits
        if bucket.phase is Phase.DECODE and bucket.query_len == 1:
            # A batch without drafts would also fit into the buckets with drafts: remove them.
            others = others.without([b for b in others.decode if b.query_len > 1])
            own_limits = replace(limits, max_draft_tokens=0)
        assert not prove(others, own_limits).is_covered


@given(small_limits, catalogs)
@settings(max_examples=200, deadline=None)
def test_unused_buckets_are_those_that_no_launch_is_padded_to(limits, catalog):
    limits = replace(limits, max_prefill_batch=1)
    closed = close(catalog.without([b for b in catalog.prefill if b.batch > 1]), limits)
    asked = [(s.phase, s.batch, s.query_len, s.blocks) for s in build(limits)]
    used = {closed.fit(*shape) for shape in asked}
    unused = unused_buckets(closed, limits)
    assert unused == [b for b in (*closed.prefill, *closed.decode) if b not in used]
    assert prove(closed.without(unused), limits).is_covered


@pytest.mark.parametrize("strategy", ["linear", "exponential", "sparse", "pad"])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("chunked_prefill", [False, True])
def test_every_strategy_can_be_closed(strategy, prefix_caching, chunked_prefill):
    limits = make_limits(
        max_num_seqs=48,
        num_blocks=1024,
        max_model_len=8192,
        enable_prefix_caching=prefix_caching,
        enable_chunked_prefill=chunked_prefill,
        max_block_refs=1023,
    )
    found = generate_buckets(strategy, limits, BucketSettings.resolve(limits))
    catalog = Catalog(found.prefill, found.decode)
    closed = close(catalog, limits)
    assert prove(closed, limits).is_covered
    # The closed catalog has one more bucket for each query length whose longest context had none,
    # and one or two more at the largest sizes.
    assert len(closed) - len(catalog) <= 64


def test_the_seeds_catalog_lacks_long_prompts_and_many_blocks():
    catalog = Catalog(SEED_PROMPTS, [b for b in SEED_DECODES if b.blocks <= 128])
    report = prove(catalog, make_limits())
    assert report.uncovered == (prefill(1, 1025),)
    assert str(report) == (
        "some steps have no bucket; the smallest of these steps: prefill of 1 x 1025 tokens, 0 "
        "blocks"
    )
    assert missing_buckets(catalog, make_limits()) == [prefill(1, 2048)]
    assert prove(catalog, make_limits(max_model_len=1024)).is_covered


def test_a_chunk_limit_spares_the_long_buckets():
    catalog = Catalog([prefill(1, 1024, 64)], [decode(4, 256)])
    limits = make_limits(max_model_len=8192, enable_chunked_prefill=True)
    assert prove(catalog, limits).uncovered == (prefill(1, 1025),)
    report = prove(
        catalog,
        make_limits(max_model_len=8192, enable_chunked_prefill=True, max_chunk_tokens=1024),
    )
    assert report.is_covered
    assert str(report) == "every possible step has a bucket (5 classes of shapes compared)"


def test_shared_blocks_count_once_for_each_sequence():
    # 3 sequences of 4 blocks need 6 blocks in all: a shared prefix of 3 blocks, and one block each.
    limits = make_limits(
        max_num_seqs=3, max_model_len=512, num_blocks=7, enable_prefix_caching=True
    )
    assert limits.max_decode_blocks(3) == 12
    assert make_limits(max_num_seqs=3, max_model_len=512, num_blocks=7).max_decode_blocks(3) == 6
    catalog = Catalog([prefill(1, 512, 4)], [decode(3, 6)])
    assert prove(catalog, limits).uncovered == (decode(2, 7),)
    assert missing_buckets(catalog, limits) == [decode(3, 12)]


def test_launches_in_parts_bound_the_references():
    limits = make_limits(
        max_num_seqs=256,
        max_model_len=32768,
        max_num_batched_tokens=32768,
        num_blocks=4127,
        enable_prefix_caching=True,
    )
    assert limits.max_blocks == 65536
    bounded = make_limits(
        max_num_seqs=256,
        max_model_len=32768,
        max_num_batched_tokens=32768,
        num_blocks=4127,
        enable_prefix_caching=True,
        max_block_refs=4126,
    )
    assert bounded.max_blocks == 4126
    with pytest.raises(
        ConfigError, match=r"max_block_refs \(100\) must be at least 256, the blocks"
    ):
        make_limits(
            max_model_len=32768, max_num_batched_tokens=32768, num_blocks=4127, max_block_refs=100
        )


def test_limits_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="max_num_seqs must be at least 1, got 0"):
        make_limits(max_num_seqs=0)
    with pytest.raises(ConfigError, match="num_blocks must be at least 2, got 1"):
        make_limits(num_blocks=1)
    with pytest.raises(ConfigError, match="a long prompt could never run"):
        make_limits(max_num_batched_tokens=1024)
