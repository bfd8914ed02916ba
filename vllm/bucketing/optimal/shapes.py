"""Arrays of shapes and buckets, and the cost of shapes in a set of buckets.

A bucket covers the shapes that are not larger in any dimension.
"""

from collections.abc import Sequence

import numpy as np

from vllm.bucketing.bucket import Bucket, Phase
from vllm.bucketing.optimal.certificate import Floats, Ints, Mask, ShapeCost
from vllm.bucketing.traffic import Shapes, Weights


def cost_of(
    buckets: Sequence[Bucket],
    shapes: Shapes,
    weights: Weights,
    cost: ShapeCost,
    *,
    may_split: bool = False,
) -> float:
    """Return the cost of all shapes, each padded to the cheapest bucket that covers it.

    It is infinite if a shape is not covered. For the arguments see `choose_buckets`.
    """
    least = least_costs(buckets, shapes, cost)
    if may_split:
        least = np.minimum(least, split_factor(shapes) * least_costs(buckets, single(shapes), cost))
    return float(weights @ least)


def least_costs(buckets: Sequence[Bucket], shapes: Shapes, cost: ShapeCost) -> Floats:
    """Return [n] the cost of the cheapest bucket that covers each shape."""
    sizes = sizes_of(buckets)
    prices = cost(*sizes.T)
    least = np.full(len(shapes), np.inf)
    for size, price in sorted(
        zip(sizes.tolist(), prices.tolist(), strict=True), key=lambda x: x[1]
    ):
        covered = covers_shapes(np.array([size], np.int64), shapes)[:, 0] & np.isinf(least)
        least[covered] = price
    return least


def single(shapes: Shapes) -> Shapes:
    """Return the shapes with a batch size of 1."""
    found: Ints = shapes.copy()
    found[:, 1] = 1
    return found


def split_factor(shapes: Shapes) -> Floats:
    """Return the number of forward passes if each request of a shape runs separately.

    Infinity if the shape is not a prefill of several requests.
    """
    is_split = (shapes[:, 0] == Phase.PREFILL) & (shapes[:, 1] > 1)
    return np.where(is_split, shapes[:, 1], np.inf)


def merged(shapes: Ints, weights: Floats) -> tuple[Ints, Floats]:
    """Merge equal shapes, adding up their weights."""
    unique, index = np.unique(shapes, axis=0, return_inverse=True)
    sums = np.bincount(index.reshape(-1), np.asarray(weights, np.float64), minlength=len(unique))
    found: Ints = unique[sums > 0]
    return found, sums[sums > 0].astype(np.float64)


def covers_shapes(sizes: Ints, shapes: Ints) -> Mask:
    """Return [n, m] whether each candidate [m, 4] covers each shape [n, 4]."""
    found: Mask = np.equal(shapes[:, None, 0], sizes[None, :, 0])
    for column in range(1, 4):
        found &= shapes[:, None, column] <= sizes[None, :, column]
    return found


def sizes_of(buckets: Sequence[Bucket]) -> Ints:
    return np.array([(b.phase, b.batch, b.query_len, b.blocks) for b in buckets], np.int64).reshape(
        -1, 4
    )


def buckets_of(sizes: Ints) -> tuple[Bucket, ...]:
    return tuple(sorted({Bucket(Phase(phase), *rest) for phase, *rest in sizes.tolist()}))
