"""Assign ranks to groups, given only the sizes of the groups."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm.config import ParallelConfig


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks for messages.

    >>> ranks_text([2]), ranks_text([0, 3])
    ('rank 2', 'ranks 0, 3')
    """
    return f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks))}"


class PipelineNeighbors(NamedTuple):
    """The ranks of other stages that a rank exchanges tensors with."""

    before: int | None
    """Rank from which hidden states are received; None: this is the first stage."""
    after: int | None
    """Rank to which hidden states are sent; None: this is the last stage."""
    other_end: int | None
    """Rank at the other end of the pipeline: in the last stage for a rank of the first stage, and
    the reverse; None for ranks of the stages between."""


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """Ranks of one engine, and their groups. Ranks that share a layer are consecutive, because they
    exchange the most data.

    >>> layout = RankLayout(tensor_size=2, pipeline_size=2)
    >>> layout.tensor_groups
    [[0, 1], [2, 3]]
    >>> layout.tensor_rank(3), layout.pipeline_rank(3)
    (1, 1)
    """

    tensor_size: int = 1
    """Ranks that share every layer."""
    pipeline_size: int = 1
    """Stages, which run consecutive layers."""

    @classmethod
    def of(cls, parallel: ParallelConfig) -> "RankLayout":
        """Return the layout of the ranks of an engine."""
        return cls(
            tensor_size=parallel.tensor_parallel_size, pipeline_size=parallel.pipeline_parallel_size
        )

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.tensor_size * self.pipeline_size

    def tensor_rank(self, rank: int) -> int:
        """Return the index of a rank among the ranks that share its layers."""
        return rank % self.tensor_size

    def pipeline_rank(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return rank // self.tensor_size

    def stages_around(self, rank: int) -> PipelineNeighbors:
        """Return the ranks at the same position in other stages.

        >>> RankLayout(pipeline_size=3).stages_around(2)
        PipelineNeighbors(before=1, after=None, other_end=0)
        """
        before, after = rank - self.tensor_size, rank + self.tensor_size
        is_first, is_last = before < 0, after >= self.world_size
        last = self.result_rank + self.tensor_rank(rank)
        other_end = None
        if is_first != is_last:  # with a single stage both are true, and nothing is sent
            other_end = last if is_first else self.tensor_rank(rank)
        return PipelineNeighbors(
            None if is_first else before, None if is_last else after, other_end
        )

    @property
    def result_rank(self) -> int:
        """The rank whose results are used: the first of the last stage."""
        return self.world_size - self.tensor_size

    @property
    def ranks_without_tokens(self) -> range:
        """The ranks that do not sample: all stages except the last."""
        return range(self.result_rank)

    @property
    def tensor_groups(self) -> list[list[int]]:
        """Ranks that share layers, stage by stage."""
        return [
            list(range(first, first + self.tensor_size))
            for first in range(0, self.world_size, self.tensor_size)
        ]
