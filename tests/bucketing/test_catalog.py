import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bucketing.helpers import SEED_DECODES, SEED_PROMPTS
from vllm.bucketing.bucket import Bucket, Phase, decode, prefill
from vllm.bucketing.catalog.catalog import Catalog, padded_cost
from vllm.bucketing.catalog.cover_index import CoverSearch, CoverTable, make_index

sizes = st.integers(1, 12)
prefills = st.builds(prefill, sizes, sizes, st.integers(0, 6))
decodes = st.builds(decode, sizes, sizes)


def cheapest(buckets: list[Bucket], shape: Bucket) -> Bucket | None:
    """Return the bucket that `fit` must find, by trying all buckets."""
    covering = [bucket for bucket in buckets if bucket.covers(shape)]
    return min(covering, key=lambda b: (padded_cost(b), b), default=None)


@given(st.sets(prefills, max_size=12), st.sets(decodes, max_size=12), st.data())
@settings(max_examples=60, deadline=None)
def test_fit_is_the_cheapest_bucket_that_covers(prompts, others, data):
    catalog = Catalog(prompts, others)
    warmed = (
        data.draw(st.sets(st.sampled_from(sorted(prompts | others)))) if len(catalog) else set()
    )
    for bucket in warmed:
        catalog.mark_warmed([bucket])
    for phase, buckets in ((Phase.PREFILL, prompts), (Phase.DECODE, others)):
        for shape in data.draw(st.lists(prefills if phase is Phase.PREFILL else decodes)):
            asked = (phase, shape.batch, shape.query_len, shape.blocks)
            assert catalog.fit(*asked) == cheapest(list(buckets), shape)
            assert catalog.fit(*asked, warmed_only=True) == cheapest(list(warmed), shape)


@given(st.sets(prefills, min_size=1, max_size=10), st.data())
@settings(max_examples=40, deadline=None)
def test_search_and_table_agree(buckets, data):
    ranked = sorted(buckets)
    table, search = make_index(ranked), make_index(ranked, max_entries=0)
    assert isinstance(table, CoverTable)
    assert isinstance(search, CoverSearch)
    for ranks in data.draw(st.lists(st.sets(st.sampled_from(range(len(ranked)))), max_size=3)):
        table.add(ranks)
        search.add(ranks)
    for shape in data.draw(st.lists(prefills, min_size=1)):
        asked = (shape.batch, shape.query_len, shape.blocks)
        assert table.find(*asked) == search.find(*asked)


def test_the_cheapest_is_not_the_first_in_order():
    catalog = Catalog([prefill(1, 512), prefill(2, 128), prefill(2, 512)], [])
    assert catalog.fit(Phase.PREFILL, 1, 100, 0) == prefill(2, 128)
    assert catalog.fit(Phase.PREFILL, 1, 300, 0) == prefill(1, 512)
    assert catalog.fit(Phase.PREFILL, 3, 1, 0) is None


def test_the_seeds_batch_of_three_is_padded_as_the_seed_says():
    """As published: a prompt of (4, 512), a decode of (4, 512), (4, 640) beyond 512 tokens, and (2,
    ...) after one request has finished.
    """
    catalog = Catalog(SEED_PROMPTS, SEED_DECODES)
    assert catalog.fit(Phase.PREFILL, 3, 412, 0) == prefill(4, 512)
    assert catalog.fit(Phase.DECODE, 3, 1, 413) == decode(4, 512)
    assert catalog.fit(Phase.DECODE, 3, 1, 513) == decode(4, 640)
    assert catalog.fit(Phase.DECODE, 2, 1, 513) == decode(2, 640)


def test_a_launch_is_padded_up_to_what_is_warm():
    catalog = Catalog(SEED_PROMPTS, SEED_DECODES)
    assert catalog.fit(Phase.PREFILL, 1, 100, 0, warmed_only=True) is None
    catalog.mark_warmed([prefill(4, 1024), decode(4, 2048)])
    assert catalog.fit(Phase.PREFILL, 1, 100, 0, warmed_only=True) == prefill(4, 1024)
    catalog.mark_warmed([prefill(1, 256)])
    assert catalog.fit(Phase.PREFILL, 1, 100, 0, warmed_only=True) == prefill(1, 256)
    assert catalog.fit(Phase.PREFILL, 1, 300, 0, warmed_only=True) == prefill(4, 1024)
    assert catalog.fit(Phase.PREFILL, 1, 100, 0) == prefill(1, 128)
    assert catalog.is_warmed(prefill(1, 256))
    assert len(catalog.warmed) == 3


def test_buckets_are_dropped_by_value_and_the_rest_stays_warm():
    catalog = Catalog(SEED_PROMPTS, SEED_DECODES)
    catalog.mark_warmed([prefill(1, 128), prefill(1, 256)])
    smaller = catalog.without([prefill(1, 128), decode(4, 2048)])
    assert len(smaller) == 70
    assert prefill(1, 128) not in smaller
    assert smaller.fit(Phase.PREFILL, 1, 100, 0) == prefill(2, 128)
    assert smaller.fit(Phase.DECODE, 4, 1, 2048) is None
    assert smaller.warmed == {prefill(1, 256)}
    assert len(catalog) == 72
    larger = smaller.with_buckets([decode(4, 2048)])
    assert larger.fit(Phase.DECODE, 4, 1, 2048) == decode(4, 2048)
    assert larger.warmed == {prefill(1, 256)}


def test_buckets_that_do_not_belong_are_refused():
    with pytest.raises(ValueError, match="is not a prefill bucket"):
        Catalog([decode(1, 1)], [])
    catalog = Catalog([prefill(1, 128)], [])
    with pytest.raises(ValueError, match="is not in the catalog"):
        catalog.without([prefill(1, 256)])
    with pytest.raises(ValueError, match="is not in the catalog"):
        catalog.mark_warmed([prefill(1, 256)])


@pytest.mark.parametrize("shape", [(0, 1, 1), (1, 0, 1), (1, 1, -1)])
def test_impossible_buckets_are_refused(shape):
    with pytest.raises(ValueError, match="must be at least 1"):
        Bucket(Phase.DECODE, *shape)
