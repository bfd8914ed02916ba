"""Finds the cheapest bucket that covers a shape, by table or by search.

    ranks   buckets of one phase, cheapest first: 0, 1, 2, ...
    table   for each cell of the grid of all sizes, the lowest rank among the buckets that are
            as large or larger in every dimension

A shape is rounded up to its cell by three bisections. The last entry of each axis is for sizes
larger than every bucket.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from vllm.bucketing.bucket import Bucket

MAX_TABLE_ENTRIES = 1 << 24
"""64 MiB. A phase with more is searched."""


class BucketIndex(Protocol):
    """A set of buckets of one phase, in which the cheapest covering bucket can be found."""

    def add(self, ranks: Iterable[int]) -> None:
        """Add buckets by their ranks."""
        ...

    def find(self, batch: int, query_len: int, blocks: int) -> Bucket | None:
        """Return the bucket of lowest rank that covers the shape, or None."""
        ...


def make_index(by_rank: Sequence[Bucket], max_entries: int = MAX_TABLE_ENTRIES) -> BucketIndex:
    """Make an empty index over buckets of one phase, cheapest first."""
    axes = (
        sorted({bucket.batch for bucket in by_rank}),
        sorted({bucket.query_len for bucket in by_rank}),
        sorted({bucket.blocks for bucket in by_rank}),
    )
    num_entries = (len(axes[0]) + 1) * (len(axes[1]) + 1) * (len(axes[2]) + 1)
    return CoverTable(by_rank, axes) if num_entries <= max_entries else CoverSearch(by_rank)


class CoverTable:
    """Finds buckets with a table, in a microsecond.

    Its memory grows with the number of combinations of sizes.
    """

    def __init__(
        self, by_rank: Sequence[Bucket], axes: tuple[list[int], list[int], list[int]]
    ) -> None:
        self._batches, self._lengths, self._counts = axes
        self._by_rank: list[Bucket | None] = [*by_rank, None]
        self._stride = len(self._counts) + 1
        self._batch_stride = (len(self._lengths) + 1) * self._stride
        shape = (len(self._batches) + 1, len(self._lengths) + 1, self._stride)
        self._table = np.full(shape, len(by_rank), np.int32)
        self._cells = self._table.reshape(-1).data

    def add(self, ranks: Iterable[int]) -> None:
        """Add buckets by their ranks.

        One bucket updates the part of the table that it covers; several update the whole table
        once.
        """
        ranks = list(ranks)
        buckets = [bucket for rank in ranks if (bucket := self._by_rank[rank]) is not None]
        if len(ranks) == 1:
            i, j, k = self._cell(buckets[0])
            part = self._table[: i + 1, : j + 1, : k + 1]
            np.minimum(part, ranks[0], out=part)
            return
        if not ranks:
            return
        cells = np.array([self._cell(bucket) for bucket in buckets])
        np.minimum.at(self._table, tuple(cells.T), np.array(ranks, np.int32))
        for axis in range(3):
            flipped = np.flip(self._table, axis)
            np.minimum.accumulate(flipped, axis, out=flipped)

    def find(self, batch: int, query_len: int, blocks: int) -> Bucket | None:
        """Return the bucket of lowest rank that covers the shape, or None."""
        cell = (
            bisect_left(self._batches, batch) * self._batch_stride
            + bisect_left(self._lengths, query_len) * self._stride
            + bisect_left(self._counts, blocks)
        )
        return self._by_rank[self._cells[cell]]

    def _cell(self, bucket: Bucket) -> tuple[int, int, int]:
        return (
            bisect_left(self._batches, bucket.batch),
            bisect_left(self._lengths, bucket.query_len),
            bisect_left(self._counts, bucket.blocks),
        )


class CoverSearch:
    """Finds buckets by searching all of them, cheapest first; for sets too large for a table."""

    def __init__(self, by_rank: Sequence[Bucket]) -> None:
        self._by_rank = by_rank
        self._sizes = np.array([(b.batch, b.query_len, b.blocks) for b in by_rank], np.int64)
        self._is_in = np.zeros(len(by_rank), np.bool_)

    def add(self, ranks: Iterable[int]) -> None:
        """Add buckets by their ranks."""
        self._is_in[list(ranks)] = True

    def find(self, batch: int, query_len: int, blocks: int) -> Bucket | None:
        """Return the bucket of lowest rank that covers the shape, or None."""
        fits = (self._sizes >= (batch, query_len, blocks)).all(axis=1) & self._is_in
        rank = int(fits.argmax())
        return self._by_rank[rank] if fits[rank] else None
