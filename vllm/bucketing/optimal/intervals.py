"""Merges neighbouring sizes to intervals, for traffic with many shapes.

Buckets end at the upper ends of the intervals, so each set covers its shapes. For the lower bound
the same buckets are priced at the lower ends, so no set of other sizes costs less.
"""

import numpy as np

from vllm.bucketing.optimal.certificate import Floats, Ints, ShapeCost
from vllm.bucketing.optimal.shapes import covers_shapes, merged


def make_intervals(
    shapes: Ints, weights: Floats, tolerance: float, cost: ShapeCost
) -> tuple[list[dict[tuple[int, int], int]], list[dict[tuple[int, int], int]]]:
    """Divide the sizes of each dimension into intervals; return their upper and lower ends.

    Both map (phase, size) to the end of its interval. Within an interval the cost of an average
    shape grows by no more than the tolerance.
    """
    uppers: list[dict[tuple[int, int], int]] = [{} for _ in range(4)]
    lowers: list[dict[tuple[int, int], int]] = [{} for _ in range(4)]
    for phase in np.unique(shapes[:, 0]).tolist():
        of_phase = shapes[:, 0] == phase
        average = np.average(shapes[of_phase], axis=0, weights=weights[of_phase]).round()
        for column in range(1, 4):
            values = np.unique(shapes[of_phase, column])
            example = np.tile(average.astype(np.int64), (len(values), 1))
            example[:, column] = values
            grown = cost(*example.T)
            start = 0
            for index in range(1, len(values) + 1):
                is_inside = index < len(values) and tolerance > 0
                if is_inside and grown[index] <= grown[start] * (1 + tolerance):
                    continue
                low, high = int(values[start]), int(values[index - 1])
                for value in values[start:index].tolist():
                    uppers[column][phase, value], lowers[column][phase, value] = high, low
                start = index
    return uppers, lowers


def mapped(shapes: Ints, ends: list[dict[tuple[int, int], int]]) -> Ints:
    """Return the shapes [n, 4] with each size replaced by the end of its interval.

    `ends` has one dictionary per column, which maps (phase, size) to the end; see `make_intervals`.
    """
    found: Ints = shapes.copy()
    phases = shapes[:, 0].tolist()
    for column in range(1, 4):
        values = shapes[:, column].tolist()
        found[:, column] = [ends[column][key] for key in zip(phases, values, strict=True)]
    return found


def make_grid(
    shapes: Ints, uppers: list[dict[tuple[int, int], int]], lowers: list[dict[tuple[int, int], int]]
) -> tuple[Ints, Ints]:
    """Return the buckets that upper ends of intervals form, and the corresponding lower ends.

    Within one phase, the ends of all dimensions are combined. Of these combinations only tight
    buckets are kept: each size of a tight bucket equals a size of a shape that the bucket covers.
    """
    ups: list[Ints] = []
    lows: list[Ints] = []
    for phase in np.unique(shapes[:, 0]).tolist():
        ends = [
            sorted({(high, lowers[column][key]) for key, high in uppers[column].items()
                    if key[0] == phase})
            for column in range(1, 4)
        ]  # fmt: skip
        index = np.stack(np.meshgrid(*(np.arange(len(e)) for e in ends), indexing="ij"), -1)
        index = index.reshape(-1, 3)
        for found, end in ((ups, 0), (lows, 1)):
            columns = [np.full(len(index), phase)] + [
                np.array([pair[end] for pair in e])[index[:, c]] for c, e in enumerate(ends)
            ]
            found.append(np.stack(columns, 1).astype(np.int64))
    up, low = np.concatenate(ups), np.concatenate(lows)
    # Keep only tight buckets: each of their sizes equals a size of a shape that they cover.
    covers = covers_shapes(up, shapes)
    is_tight = np.ones(len(up), bool)
    for column in range(1, 4):
        largest = np.where(covers, shapes[:, column][:, None], -1).max(0)
        is_tight &= largest == up[:, column]
    tight_up: Ints = up[is_tight]
    tight_low: Ints = low[is_tight]
    return tight_up, tight_low


def snapped(shapes: Ints, weights: Floats, sizes: Ints) -> tuple[Ints, Floats]:
    """Round shapes up to sizes of candidates, and merge equal ones; the same candidates
    cover them.
    """
    found = shapes.copy()
    for phase in np.unique(shapes[:, 0]):
        of_phase = shapes[:, 0] == phase
        for column in range(1, 4):
            values = np.unique(sizes[sizes[:, 0] == phase, column])
            index = np.searchsorted(values, shapes[of_phase, column])
            is_inside = index < len(values)
            rounded = shapes[of_phase, column].copy()
            rounded[is_inside] = values[index[is_inside]]
            found[of_phase, column] = rounded
    return merged(found, weights)
