"""A padded shape of a forward pass, for which the device has a compiled graph.

prefill  [batch, query_len] tokens; each sequence attends to up to `blocks` blocks of context
         that an earlier forward pass has computed
decode   [batch, query_len] tokens, 1 or the drafts to verify and one more; `blocks` counts the
         block references of the whole batch, so a block that two sequences share counts twice
"""

from dataclasses import dataclass
from enum import IntEnum


class Phase(IntEnum):
    """Kind of forward pass, prefill or decode; `str()` gives the word."""

    PREFILL = 0
    DECODE = 1

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, order=True, slots=True)
class Bucket:
    """A padded shape of forward passes, ordered as (phase, batch, query_len, blocks).

    It also represents the exact shape of a batch, for example one without a bucket.
    """

    phase: Phase
    batch: int
    query_len: int
    blocks: int

    def __post_init__(self) -> None:
        if self.batch < 1 or self.query_len < 1 or self.blocks < 0:
            raise ValueError(
                f"batch and query_len must be at least 1, and blocks at least 0, got {self}"
            )

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a forward pass, padding included."""
        return self.batch * self.query_len

    def covers(self, shape: "Bucket") -> bool:
        """Return whether a batch of this shape can be padded to this bucket."""
        return (
            self.phase is shape.phase
            and self.batch >= shape.batch
            and self.query_len >= shape.query_len
            and self.blocks >= shape.blocks
        )


def prefill(batch: int, query_len: int, blocks: int = 0) -> Bucket:
    """Make a prefill bucket."""
    return Bucket(Phase.PREFILL, batch, query_len, blocks)


def decode(batch: int, blocks: int, query_len: int = 1) -> Bucket:
    """Make a decode bucket."""
    return Bucket(Phase.DECODE, batch, query_len, blocks)
