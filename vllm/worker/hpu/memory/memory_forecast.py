"""Predicts the minimum memory of a forward pass from smaller ones that have run.

A failed allocation may be fatal on a card, so the warm-up does not run shapes that cannot fit. The
model: memory is a sum of parts that grow with the padded sizes (tokens, block list, scores, logits,
a constant), each with an unknown factor that is not negative. Two measured forward passes leave a
range of factors; the smallest memory that any of them gives for a larger one is the prediction. So
it is rather too low than too high: a shape that fits is not refused, and a shape whose prediction
is too low is given up when its allocation fails, as without a prediction.
"""

from collections.abc import Callable
from itertools import combinations

import numpy as np
import numpy.typing as npt

from vllm.bucketing import Bucket, Phase
from vllm.bucketing.catalog.catalog import padded_cost
from vllm.config.hpu import UNSLICED, PromptSlicing
from vllm.worker.hpu.launches.planner import PaddedShape
from vllm.worker.hpu.memory.memory_profile import Attempt

_TOLERANCE = 0.02
"""Fraction of the memory by which a prediction must exceed it to count, because sizes are rounded
up."""

_MAX_COMPARED = 16
"""Number of launches that a prediction compares: the ones that have taken the most memory."""

_Way = tuple[Phase, bool, int]
"""Launches whose sizes are comparable."""
_Sizes = npt.NDArray[np.float64]


class MemoryForecast:
    """Records the memory of forward passes of one runner, and predicts the memory of others.

    Args:
        slicing: slicing of the attention of prompts.
        block_size: tokens of a block.

    Attributes:
        max_blocks: entries of the longest block list of a decode in the profiling run, which does
            not read slices of the cache. None: there was no profiling run.
        passing_bytes: the most memory that a forward pass has taken in addition to the shared
            workspace.
    """

    def __init__(self, slicing: PromptSlicing = UNSLICED, block_size: int = 1) -> None:
        self._slicing, self._block_size = slicing, block_size
        self.max_blocks: int | None = None
        self.passing_bytes = 0
        # For each launch: its sizes, its bytes, and whether the bytes are exact (else an upper
        # bound).
        self._seen: dict[_Way, list[tuple[_Sizes, int, bool]]] = {}

    def add(self, shape: PaddedShape, attempted: Attempt) -> None:
        """Record the memory of a forward pass that has completed."""
        if attempted.refused_bytes is None:
            # With a shared workspace, its size is known for each launch. Memory that recipes pass
            # to each other depends on the sampling as well, so only its maximum is kept.
            num_bytes = attempted.kept_bytes or attempted.needed_bytes
            if attempted.kept_bytes:
                self.passing_bytes = max(self.passing_bytes, attempted.passing_bytes)
            seen = self._seen.setdefault(_way(shape), [])
            seen.append((self._sizes(shape), num_bytes, attempted.has_grown))

    def exceeds(self, shape: PaddedShape, max_bytes: int) -> int | None:
        """Return the minimum bytes that a forward pass needs, if more than `max_bytes`, else None.

        Its workspace is never freed, so the memory that passes between its parts needs space in
        addition.
        """
        sizes = self._sizes(shape)
        smaller = [each for each in self._seen.get(_way(shape), ()) if (each[0] <= sizes).all()]
        smaller.sort(key=lambda each: -each[1])
        exact = [each for each in smaller if each[2]][:_MAX_COMPARED]
        predicted = [
            least
            for large in exact
            for small in [each for each in smaller if each[1] < large[1]][:_MAX_COMPARED]
            if (small[0] <= large[0]).all()
            if (least := _least(small, large, sizes)) is not None
        ]
        if not predicted:
            return None
        needed = max(predicted) + self.passing_bytes
        return int(needed) if needed > max_bytes * (1 + _TOLERANCE) else None

    @property
    def memory_sizes(self) -> tuple[Callable[[Bucket], float], ...]:
        """Functions of a bucket's sizes, the largest values of which show the most memory-hungry
        buckets.

        Decodes that verify drafts have fewer requests but more tokens, and so more logits. Other
        decodes run other operators: their cross-attention has scores for each slot of an item.
        """
        return (padded_cost, self.num_scores, _num_tokens, _num_pairs, _cost_without_drafts)

    def num_scores(self, bucket: Bucket) -> int:
        """Return how many attention scores of one head exist at a time.

        These are the scores of new tokens for all tokens that they attend to.
        """
        return self._queries_at_once(bucket) * (bucket.query_len + bucket.blocks * self._block_size)

    def _queries_at_once(self, bucket: Bucket) -> int:
        num_keys = bucket.query_len + bucket.blocks * self._block_size
        return bucket.batch * self._slicing.queries_at_once(bucket.query_len, num_keys)

    def _sizes(self, shape: PaddedShape) -> _Sizes:
        """Return the sizes to which the parts of the memory are proportional."""
        bucket, size = shape.bucket, shape.bucket.num_tokens
        if bucket.phase is Phase.DECODE:
            entries = shape.num_entries
            return np.array([1, size, entries, size * entries], float)
        context, at_once = bucket.batch * bucket.blocks, self._queries_at_once(bucket)
        scores = (at_once * bucket.query_len, at_once * bucket.blocks)
        return np.array([1, shape.num_rows, size, scores[0], context, scores[1]], float)


def _num_tokens(bucket: Bucket) -> int:
    return bucket.num_tokens


def _num_pairs(bucket: Bucket) -> int:
    """Return the number of pairs of a token and a block that it may attend to."""
    return bucket.num_tokens * bucket.blocks


def _cost_without_drafts(bucket: Bucket) -> int:
    has_drafts = bucket.phase is Phase.DECODE and bucket.query_len > 1
    return 0 if has_drafts else padded_cost(bucket)


def _way(shape: PaddedShape) -> _Way:
    return shape.bucket.phase, shape.is_contiguous, shape.item_slots


def _least(
    small: tuple[_Sizes, int, bool], large: tuple[_Sizes, int, bool], sizes: _Sizes
) -> float | None:
    """Return the least memory of a shape over all factors that fit two measured forward passes.

    The minimum is reached with only two non-zero factors, as there are two equations. None: no
    factors fit.
    """
    found = []
    for i, j in combinations(range(len(sizes)), 2):
        parts = np.array([[small[0][i], small[0][j]], [large[0][i], large[0][j]]])
        determinant = parts[0, 0] * parts[1, 1] - parts[0, 1] * parts[1, 0]
        if abs(determinant) <= 1e-9 * abs(parts[0, 0] * parts[1, 1]):
            continue  # the equations do not determine the two factors
        first = (small[1] * parts[1, 1] - large[1] * parts[0, 1]) / determinant
        second = (large[1] * parts[0, 0] - small[1] * parts[1, 0]) / determinant
        if min(first * parts[1, 0], second * parts[1, 1]) >= -1e-3 * large[1]:
            found.append(first * sizes[i] + second * sizes[j])
    return min(found, default=None)
