"""Test counter-based random numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from tests.sample.helpers import repeatable
from vllm.sample.random import exponentials_at, stream_keys

NUM_BINS = 64
INT64 = st.integers(-(2**63), 2**63 - 1)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the first random number [n] at `positions[i]` of `seeds[i]`, converted to
    be uniform.
    """
    first = exponentials_at(stream_keys(seeds), positions, 1)[:, 0]
    return np.exp(-first.astype(np.float64))


def grid(num_seeds: int, num_positions: int, first_seed: int = 0) -> np.ndarray:
    """Return random numbers [seeds, positions] of consecutive seeds and positions."""
    seeds = np.arange(first_seed, first_seed + num_seeds, dtype=np.int64)
    flat = uniforms(np.repeat(seeds, num_positions), np.tile(np.arange(num_positions), num_seeds))
    return flat.reshape(num_seeds, num_positions)


def assert_uniform(values: np.ndarray) -> None:
    counts, _ = np.histogram(values, NUM_BINS, (0, 1))
    assert chisquare(counts).pvalue > 1e-3


def assert_independent(x: np.ndarray, y: np.ndarray) -> None:
    """Check that all pairs of eighths of [0, 1) are equally frequent."""
    counts, _, _ = np.histogram2d(x.ravel(), y.ravel(), 8, ((0, 1), (0, 1)))
    assert chisquare(counts.ravel()).pvalue > 1e-3


@pytest.mark.parametrize("seed", [0, 1, 2**31, -1, 2**63 - 1])
def test_positions_of_one_seed_are_uniform(seed):
    positions = np.arange(50_000)
    assert_uniform(uniforms(np.full(50_000, seed, np.int64), positions))


@pytest.mark.parametrize("position", [0, 1, 1000])
def test_consecutive_seeds_at_one_position_are_uniform(position):
    seeds = np.arange(50_000, dtype=np.int64)
    assert_uniform(uniforms(seeds, np.full(50_000, position)))


@pytest.mark.parametrize("distance", [1, 2, 64])
def test_neighbours_are_independent(distance):
    values = grid(300, 300)
    assert_independent(values[distance:], values[:-distance])
    assert_independent(values[:, distance:], values[:, :-distance])
    assert_independent(values[distance:, distance:], values[:-distance, :-distance])
    assert_independent(values[distance:, :-distance], values[:-distance, distance:])


@repeatable
@given(st.lists(st.tuples(INT64, st.integers(0, 2**31 - 1)), min_size=1))
def test_numbers_are_positive_and_finite(pairs):
    seeds, positions = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
    values = exponentials_at(stream_keys(seeds), positions, 3)
    assert values.dtype == np.float32
    assert ((values >= 2.0**-24) & (values < 17)).all()
    odd = np.exp(-values.astype(np.float64)) * 2**24
    is_exact = odd < 2**22  # only where the logarithms of neighboring integers differ in float32
    nearest = odd[is_exact].round()
    assert (nearest % 2 == 1).all(), "every number is an odd multiple of 2**-24"


@repeatable
@given(st.lists(st.tuples(INT64, st.integers(0, 10_000)), min_size=2, max_size=50), st.randoms())
def test_a_number_does_not_depend_on_its_neighbours(pairs, random):
    seeds, positions = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
    together = uniforms(seeds, positions)
    order = list(range(len(pairs)))
    random.shuffle(order)
    assert (uniforms(seeds[order], positions[order]) == together[order]).all()
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(len(pairs))]
    assert alone == together.tolist()


def test_signed_and_unsigned_seeds_of_the_same_bits_agree():
    signed = np.array([-1, -(2**63), 5], np.int64)
    positions = np.array([0, 1, 2])
    assert (uniforms(signed, positions) == uniforms(signed.view(np.uint64), positions)).all()


def test_seeds_keep_their_meaning_between_releases():
    """The seed of a user must give the same text in later releases: do not change these values."""
    keys = stream_keys(np.array([0, 0, 1, 42, -7], np.int64))
    values = exponentials_at(keys, np.array([0, 1, 0, 7, 100]), 2)
    want = [[2.04295, 2.99733], [0.52518, 1.22921], [0.12241, 0.9084], [0.04572, 0.02765]]
    np.testing.assert_allclose(values, [*want, [0.83549, 1.03796]], atol=1e-5)


def test_exponential_numbers_follow_their_distribution():
    values = exponentials_at(stream_keys(np.arange(300)), np.arange(300), 300)
    assert values.dtype == np.float32 and values.min() > 0 and values.max() < 17
    assert_uniform(np.exp(-values.astype(np.float64)).ravel())


def test_more_exponential_numbers_leave_the_first_ones_alone():
    keys, positions = stream_keys(np.arange(5)), np.arange(5)
    many = exponentials_at(keys, positions, 200)
    assert (exponentials_at(keys, positions, 70) == many[:, :70]).all()
    alone = [exponentials_at(keys[i : i + 1], positions[i : i + 1], 70)[0] for i in range(5)]
    assert (np.array(alone) == many[:, :70]).all()
