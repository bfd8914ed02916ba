"""Test the chosen buckets against every possible set, on small examples."""

import itertools
import random

import numpy as np
import pytest

from tests.bucketing.helpers import make_limits
from vllm.bucketing.bucket import Bucket, Phase, decode, prefill
from vllm.bucketing.optimal import Budget, Ints, choose_buckets, cost_of
from vllm.bucketing.traffic import Weights, even_traffic

_NUM_INSTANCES = 300


def seconds(phase: Ints, batch: Ints, query_len: Ints, blocks: Ints) -> Weights:
    """Return a cost that grows in each dimension."""
    return 3.0 + 0.7 * batch * query_len + 0.9 * blocks + np.where(phase == 0, 0.5, 0.0)


def random_shapes(rng: random.Random, num_dimensions: int) -> tuple[Ints, Weights]:
    found = {
        (
            int(Phase.DECODE),
            rng.randint(1, 5) if num_dimensions > 1 else 4,
            rng.randint(1, 3) if num_dimensions > 2 else 1,
            rng.randint(1, 40),
        )
        for _ in range(rng.randint(3, (12, 8, 6)[num_dimensions - 1]))
    }
    shapes = np.array(sorted(found), np.int64)
    weights = [rng.choice([1.0, 2.0, 10 * rng.random() + 0.1]) for _ in found]
    return shapes, np.array(weights)


def product_of(shapes: Ints) -> list[Bucket]:
    """Return every combination of the sizes that occur in the shapes."""
    batches, lengths, blocks = (np.unique(shapes[:, c]).tolist() for c in (1, 2, 3))
    return [decode(b, k, q) for b, q, k in itertools.product(batches, lengths, blocks)]


def least_cost(
    shapes: Ints, weights: Weights, candidates: list[Bucket], mandatory: list[Bucket], count: int
) -> float:
    """Return the least possible cost, by trying all sets of buckets."""
    buckets = [*mandatory, *(b for b in candidates if b not in mandatory)]
    sizes = np.array([(b.phase, b.batch, b.query_len, b.blocks) for b in buckets])
    covers = (shapes[:, None] <= sizes[None]).all(2)
    costs = np.where(covers, seconds(*sizes.T)[None] * weights[:, None], np.inf)
    best = np.inf
    for size in range(count - len(mandatory) + 1):
        others = list(itertools.combinations(range(len(mandatory), len(buckets)), size))
        index = np.array(others, np.int64).reshape(len(others), size)
        index = np.concatenate([np.tile(np.arange(len(mandatory)), (len(index), 1)), index], 1)
        for part in np.array_split(index, 1 + len(index) // 4096):
            if part.size:
                best = min(best, costs[:, part.astype(np.int64)].min(2).sum(0).min())
    return float(best)


@pytest.mark.parametrize("num_dimensions", [1, 2, 3])
def test_chosen_sets_are_the_best_ones_and_the_bound_is_never_above(num_dimensions: int) -> None:
    rng = random.Random(f"{num_dimensions} dimensions")
    for number in range(_NUM_INSTANCES // 3):
        shapes, weights = random_shapes(rng, num_dimensions)
        candidates = product_of(shapes)
        mandatory = []
        if rng.random() < 0.6:
            most = shapes.max(0)
            mandatory = [decode(int(most[1]), int(most[3]) + rng.choice([0, 3]), int(most[2]))]
        count = rng.randint(1, 3 if len(candidates) < 40 else 2) + len(mandatory)
        chosen = choose_buckets(
            shapes,
            weights,
            rng.choice([None, candidates]),
            mandatory,
            count=count,
            cost=seconds,
        )
        optimum = least_cost(shapes, weights, candidates, mandatory, count)
        assert chosen.cost == pytest.approx(optimum, rel=1e-9), number
        assert chosen.lower_bound <= optimum * (1 + 1e-9), number
        assert chosen.certificate < 0.02, number
        assert len(chosen.buckets) <= count
        assert set(mandatory) <= set(chosen.buckets)
        assert cost_of(chosen.buckets, shapes, weights, seconds) == chosen.cost


def test_a_budget_of_seconds_is_kept_and_is_no_worse_than_any_set_within_it() -> None:
    rng = random.Random("budget")
    for _ in range(30):
        shapes, weights = random_shapes(rng, 2)
        candidates = product_of(shapes)[:14]
        largest = decode(5, 40)
        sizes = np.array([(b.phase, b.batch, b.query_len, b.blocks) for b in candidates])
        price = seconds(*sizes.T)
        limit = float(seconds(*np.array([[1, 5, 1, 40]]).T)[0] + price.mean() * 2.5)
        chosen = choose_buckets(
            shapes,
            weights,
            candidates,
            [largest],
            budget=Budget(limit, seconds, "seconds"),
            cost=seconds,
        )
        chosen_sizes = np.array([(b.phase, b.batch, b.query_len, b.blocks) for b in chosen.buckets])
        assert seconds(*chosen_sizes.T).sum() <= limit * (1 + 1e-9)
        room = limit - float(seconds(*np.array([[1, 5, 1, 40]]).T)[0])
        best = min(
            cost_of([largest, *(candidates[i] for i in subset)], shapes, weights, seconds)
            for size in range(5)
            for subset in itertools.combinations(range(len(candidates)), size)
            if price[list(subset)].sum() <= room
        )
        assert chosen.lower_bound <= best * (1 + 1e-9)
        assert chosen.cost <= best * 1.02


def test_merged_sizes_keep_the_bound_below_the_cost() -> None:
    """There are too many shapes to consider each of them separately."""
    rng = np.random.default_rng(0)
    batch = rng.integers(1, 129, 3000)
    shapes = np.stack([np.ones(3000), batch, np.ones(3000), batch * rng.integers(1, 30, 3000)], 1)
    chosen = choose_buckets(
        shapes.astype(np.int64), np.ones(3000), count=12, cost=seconds, max_seconds=0.5
    )
    assert chosen.unpadded < chosen.lower_bound <= chosen.cost
    assert len(chosen.buckets) <= 12


def test_a_set_says_its_padding_and_what_no_set_is_below() -> None:
    shapes = np.array([[1, 4, 1, 10], [1, 4, 1, 20]], np.int64)
    chosen = choose_buckets(shapes, np.ones(2), count=1, cost=seconds)
    assert chosen.buckets == (decode(4, 20),)
    assert chosen.describe() == (
        "1 decode bucket: 23.3 % padding; no 1 bucket can have less than 23.3 %"
    )


def test_time_that_is_up_gives_a_set_with_a_bound_that_holds() -> None:
    shapes, weights = even_traffic(make_limits(num_blocks=65)).shapes()
    hasty = choose_buckets(shapes, weights, count=6, cost=seconds, max_seconds=0.0)
    patient = choose_buckets(shapes, weights, count=6, cost=seconds)
    assert hasty.lower_bound <= patient.cost <= hasty.cost


@pytest.mark.parametrize(
    ("mandatory", "count", "words"),
    [
        ([decode(4, 20), decode(4, 30)], 1, "the 2 mandatory buckets take 2 buckets"),
        ([], 0, "no set"),
    ],
)
def test_a_budget_below_the_mandatory_buckets_names_the_least(
    mandatory: list[Bucket], count: int, words: str
) -> None:
    shapes = np.array([[1, 4, 1, 10], [1, 4, 1, 20]], np.int64)
    with pytest.raises(ValueError, match=words):
        choose_buckets(shapes, np.ones(2), None, mandatory, count=count, cost=seconds)


def test_prefills_of_several_requests_may_run_one_by_one() -> None:
    rng = random.Random("split")
    largest = prefill(1, 8, 4)
    for _ in range(40):
        rows = {(0, rng.randint(1, 4), rng.randint(1, 8), rng.choice([0, 4])) for _ in range(6)}
        shapes = np.array(sorted(rows), np.int64)
        weights = np.array([1 + rng.random() for _ in rows])
        candidates = [prefill(b, q, k) for b in (1, 2, 4) for q in (2, 4, 8) for k in (0, 4)]
        count = rng.randint(1, 3)
        costs = [
            cost_of([largest, *others], shapes, weights, seconds, may_split=True)
            for size in range(count)
            for others in itertools.combinations(candidates, size)
        ]
        chosen = choose_buckets(
            *(shapes, weights, candidates, [largest]), count=count, cost=seconds, may_split=True
        )
        assert chosen.lower_bound <= min(costs) * (1 + 1e-9)
        assert min(costs) <= chosen.cost <= min(costs) * 1.2
