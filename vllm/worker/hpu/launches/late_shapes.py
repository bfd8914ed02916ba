"""Tracks shapes that were compiled at their first use, and decides when to compile another one.

A shape is compiled at its first use if there was no warm-up, or if the warm-up left its bucket out.
From then on it counts as warmed up: a later batch that fits is padded to it, and compiles nothing.
This has a limit; otherwise the first long prompt would make every short prompt as slow as itself.
The cost of padding is added up for the shape that would have been compiled. When the sum reaches
`COMPILE_COST`, that shape is compiled. So a rarely needed shape is not compiled, a frequently
needed shape is, and padding never costs more than compiling would have.
"""

from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from vllm.bucketing import Bucket, Phase
from vllm.bucketing.bucket import decode, prefill
from vllm.bucketing.catalog.catalog import padded_cost

COMPILE_COST = {
    Phase.PREFILL: padded_cost(prefill(64, 512)),
    Phase.DECODE: padded_cost(decode(256, 65_280)),
}
"""Cost of compiling a shape, in units of padded cost: 32,768 tokens of prompts, or 65,536 blocks
that decodes read. For an 8B model on a Gaudi 2 these take about 2 s and 0.6 s by published figures;
published compilations take 0.3 to 7 s."""


class BucketShape(Protocol):
    """A hashable shape of padded forward passes."""

    @property
    def bucket(self) -> Bucket:
        """The padded sizes of the shape."""
        ...


Shape = TypeVar("Shape", bound=BucketShape)


class LateShapes(Generic[Shape]):
    """The shapes of one model that were compiled at their first use."""

    def __init__(self) -> None:
        # A dict keeps the order, which must be the same on all ranks.
        self._shapes: dict[Shape, None] = {}
        self._lost: dict[Shape, float] = {}

    def __contains__(self, shape: object) -> bool:
        return shape in self._shapes

    def __iter__(self) -> Iterator[Shape]:
        return iter(self._shapes)

    def add(self, shape: Shape) -> None:
        """Note that a shape has been compiled."""
        self._shapes[shape] = None
        self._lost.pop(shape, None)

    def price(self, shape: Shape) -> float:
        """Return the remaining cost of compiling a shape, in units of padded cost.

        It is the full cost, minus the cost of padding its batches to other shapes so far.
        """
        return max(0, COMPILE_COST[shape.bucket.phase] - self._lost.get(shape, 0))

    def note_loss(self, shapes: Iterable[Shape], lost: float) -> None:
        """Add the extra cost of running batches in larger shapes than these to the shapes'
        records.
        """
        shapes = list(shapes)
        for shape in shapes:
            self._lost[shape] = self._lost.get(shape, 0) + lost / len(shapes)
