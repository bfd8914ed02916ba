"""Tracks launch shapes that were compiled at their first use, and decides when to compile another
one.

A launch compiles if there was no warm-up, or if the warm-up left its bucket out. From then on its
shape counts as warmed up: a later launch that fits into it is padded to it and compiles nothing.
This has a limit; otherwise the first long prompt would make every short prompt as slow as itself.
The cost of padding is counted for the shape that would have been compiled. When it reaches
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
    """A shape of launches, which can be hashed."""

    @property
    def bucket(self) -> Bucket:
        """Its padded sizes."""
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
        """Note that a shape is compiled."""
        self._shapes[shape] = None
        self._lost.pop(shape, None)

    def price(self, shape: Shape) -> float:
        """Return the remaining cost of compiling a shape, in padded cost: the full cost, less what
        was lost by padding its launches to other shapes."""
        return max(0, COMPILE_COST[shape.bucket.phase] - self._lost.get(shape, 0))

    def note_loss(self, shapes: Iterable[Shape], lost: float) -> None:
        """Note how much launches have cost more than they would have in these shapes."""
        shapes = list(shapes)
        for shape in shapes:
            self._lost[shape] = self._lost.get(shape, 0) + lost / len(shapes)
