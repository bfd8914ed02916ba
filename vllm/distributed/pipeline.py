"""Divide a model into pipeline stages: consecutive layers, whose hidden states are sent from one
rank to the next.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vllm.config.parallel import even_partition
from vllm.distributed.groups import TPGroup
from vllm.distributed.layout import RankLayout
from vllm.errors import CollectiveError


class Link(Protocol):
    """Sends hidden states from each stage to the next one.

    Raises:
        CollectiveError: the other rank has failed, or has not answered in time.
    """

    def send(self, hidden_states: Tensor) -> None:
        """Send hidden states to the next stage. The caller must not write to the tensor any
        more.
        """
        ...

    def receive(self, hidden_states: Tensor) -> None:
        """Receive hidden states from the previous stage into the tensor. Both stages know the shape
        from the step.
        """
        ...

    def send_drafts(self, drafts: Tensor) -> None:
        """Send drafts [n] int32 from the first stage to the last one, or in the other direction.
        The caller must not write to the tensor any more.
        """
        ...

    def receive_drafts(self, drafts: Tensor) -> None:
        """Receive drafts from the other end of the pipeline into the tensor."""
        ...


@dataclass(eq=False)
class Stage:
    """A pipeline stage from the view of one rank.

    Its layers may be loaded before the ranks are connected; `link` is needed when they run.
    """

    first_layer: int
    end_layer: int
    """Index after the last one."""
    index: int = 0
    count: int = 1
    """Number of stages."""
    link: Link | None = None

    @classmethod
    def of(
        cls, index: int, count: int, num_layers: int, partition: Sequence[int] | None = None
    ) -> "Stage":
        """Create a stage of a model.

        Args:
            index: index of the stage.
            count: number of stages.
            num_layers: number of layers of the model.
            partition: number of layers of each stage; None: as `even_partition`.
        """
        sizes = list(partition or even_partition(num_layers, count))
        first = sum(sizes[:index])
        return cls(first, first + sizes[index], index, count)

    @property
    def is_first(self) -> bool:
        """Whether the stage embeds the tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage computes logits and samples."""
        return self.index == self.count - 1

    @property
    def connected(self) -> Link:
        """The link to other stages. The ranks must be connected."""
        assert self.link is not None, "the ranks have not met"
        return self.link

    def receive(
        self, num_tokens: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Receive the hidden states [num_tokens, size] of a batch from the previous stage."""
        hidden_states = torch.empty(num_tokens, size, dtype=dtype, device=device)
        self.connected.receive(hidden_states)
        return hidden_states


class _StageLink(ABC):
    """Base class of links: at most one tensor of a kind is in flight, and errors name the rank.

    Args:
        rank: rank of this process.
        before, after, other_end: see `PipelineNeighbors`.
    """

    def __init__(
        self, rank: int, before: int | None, after: int | None, other_end: int | None
    ) -> None:
        self._rank = rank
        self._before, self._after, self._other_end = before, after, other_end
        self._sent: dict[str, tuple[torch.distributed.Work, Tensor]] = {}
        """Kind of a tensor -> the last one that was sent, and its transfer."""

    def close(self) -> None:
        """Drop tensors in flight. Nothing may be sent afterwards."""
        self._sent.clear()

    def send(self, hidden_states: Tensor) -> None:
        """Send hidden states. Waits until the previous tensor has been received."""
        self._send("hidden states", hidden_states, self._after)

    def receive(self, hidden_states: Tensor) -> None:
        self._take(hidden_states, self._before)

    # All stages send in the same order: first the drafts of a step, then its hidden states.

    def send_drafts(self, drafts: Tensor) -> None:
        """Send drafts. Waits until the previous drafts have been received."""
        self._send("drafts", drafts, self._other_end)

    def receive_drafts(self, drafts: Tensor) -> None:
        self._take(drafts, self._other_end)

    def _send(self, kind: str, x: Tensor, rank: int | None) -> None:
        assert rank is not None
        try:
            if kind in self._sent:
                self._sent[kind][0].wait()
            self._sent[kind] = self._begin_send(x, rank)
        except RuntimeError as error:
            raise CollectiveError(f"send to rank {rank}", self._rank, str(error)) from error

    def _take(self, x: Tensor, rank: int | None) -> None:
        assert rank is not None
        try:
            self._receive(x, rank)
        except RuntimeError as error:
            raise CollectiveError(f"receive from rank {rank}", self._rank, str(error)) from error

    @abstractmethod
    def _begin_send(self, x: Tensor, rank: int) -> "tuple[torch.distributed.Work, Tensor]":
        """Begin to send a tensor. Keep the result until the tensor has been sent."""

    @abstractmethod
    def _receive(self, x: Tensor, rank: int) -> None:
        """Receive a tensor from a rank into `x`."""


class GlooLink(_StageLink):
    """Sends hidden states through gloo, while the rank computes its next step.

    Args:
        group: process group of all ranks.
        rank: rank of this process in it.
        around: neighbours; see `PipelineNeighbors`.
    """

    def __init__(
        self, group: "torch.distributed.ProcessGroup", rank: int, *around: int | None
    ) -> None:
        super().__init__(rank, *around)
        self._group: torch.distributed.ProcessGroup | None = group

    def close(self) -> None:
        """Close the link and drop the group."""
        super().close()
        self._group = None

    def _begin_send(self, x: Tensor, rank: int) -> "tuple[torch.distributed.Work, Tensor]":
        assert self._group is not None
        data = _bytes_of(x.contiguous())
        return self._group.send([data], rank, 0), data

    def _receive(self, x: Tensor, rank: int) -> None:
        assert self._group is not None
        self._group.recv([_bytes_of(x)], rank, 0).wait()


class CardLink(_StageLink):
    """Sends hidden states from card to card through the default group of torch.distributed.

    Args:
        rank: rank of this process.
        around: neighbours; see `PipelineNeighbors`.
        before: called before each exchange, when the data is computed or recorded; None: no call.
    """

    def __init__(
        self, rank: int, *around: int | None, before: Callable[[], None] | None = None
    ) -> None:
        super().__init__(rank, *around)
        self._before_exchange = before

    def connect(self, device: torch.device) -> None:
        """Exchange one value with each neighbour, because the first exchange of two cards opens
        their connection, which takes seconds.
        """
        if self._before is not None:
            self.receive(torch.empty(1, device=device))
        if self._after is not None:
            self.send(torch.zeros(1, device=device))
        if self._other_end is None:
            return
        if self._before is None:
            self.send_drafts(torch.zeros(1, device=device))
            self.receive_drafts(torch.empty(1, device=device))
        else:
            self.receive_drafts(torch.empty(1, device=device))
            self.send_drafts(torch.zeros(1, device=device))

    def _begin_send(self, x: Tensor, rank: int) -> "tuple[torch.distributed.Work, Tensor]":
        if self._before_exchange is not None:
            self._before_exchange()
        work = torch.distributed.isend(x, rank)
        assert work is not None, "the rank is in the default group"
        return work, x

    def _receive(self, x: Tensor, rank: int) -> None:
        if self._before_exchange is not None:
            self._before_exchange()
        torch.distributed.recv(x, rank)


def _bytes_of(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def place_in_engine(tp: TPGroup, stage: Stage | None) -> tuple[int, int]:
    """Return (rank among all ranks of the engine, number of ranks).

    Args:
        tp: ranks that share the layers.
        stage: pipeline stage of the ranks; None: there is only one.
    """
    if stage is None:
        return tp.rank, tp.size
    layout = RankLayout(tensor_size=tp.size, pipeline_size=stage.count)
    return layout.tensor_groups[stage.index][tp.rank], layout.world_size
