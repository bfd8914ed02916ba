"""Stages of a pipeline: consecutive layers, whose hidden states go from one rank to the next."""

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
    """Carries hidden states from each stage to the next one.

    Raises:
        CollectiveError: the other rank has failed, or has not answered in time.
    """

    def send(self, hidden_states: Tensor) -> None:
        """Send to the next stage. The tensor is not written any more by the caller."""
        ...

    def receive(self, hidden_states: Tensor) -> None:
        """Fill the tensor with what the stage before has sent. Both know the shape from the
        step."""
        ...

    def send_drafts(self, drafts: Tensor) -> None:
        """Send drafts [n] int32 from the first stage to the last one, or the other way round. The
        caller must not write to the tensor any more."""
        ...

    def receive_drafts(self, drafts: Tensor) -> None:
        """Fill the tensor with what the other end has sent."""
        ...


@dataclass(eq=False)
class Stage:
    """A stage as one rank sees it. Its layers may be loaded before the ranks have met; `link` is
    needed when they run."""

    first_layer: int
    end_layer: int
    """Index after the last one."""
    index: int = 0
    count: int = 1
    """Stages in all."""
    link: Link | None = None

    @classmethod
    def of(
        cls, index: int, count: int, num_layers: int, partition: Sequence[int] | None = None
    ) -> "Stage":
        """Make a stage of a model.

        Args:
            index: of the stage.
            count: stages in all.
            num_layers: of the model.
            partition: number of layers of each stage; None: as `even_partition`.
        """
        sizes = list(partition or even_partition(num_layers, count))
        first = sum(sizes[:index])
        return cls(first, first + sizes[index], index, count)

    @property
    def is_first(self) -> bool:
        """Whether it embeds the tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes logits and samples."""
        return self.index == self.count - 1

    @property
    def connected(self) -> Link:
        """The link; the ranks have met."""
        assert self.link is not None, "the ranks have not met"
        return self.link

    def receive(
        self, num_tokens: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Receive the hidden states [num_tokens, size] of a launch from the stage before."""
        hidden_states = torch.empty(num_tokens, size, dtype=dtype, device=device)
        self.connected.receive(hidden_states)
        return hidden_states


class _StageLink(ABC):
    """The base of links: one tensor of a kind in flight, and errors that name the rank.

    Args:
        rank: of this process.
        before, after, other_end: see `PipelineNeighbors`.
    """

    def __init__(
        self, rank: int, before: int | None, after: int | None, other_end: int | None
    ) -> None:
        self._rank = rank
        self._before, self._after, self._other_end = before, after, other_end
        self._sent: dict[str, tuple[torch.distributed.Work, Tensor]] = {}
        """The last tensor of each kind."""

    def close(self) -> None:
        """Give up what is under way; nothing is sent from here on."""
        self._sent.clear()

    def send(self, hidden_states: Tensor) -> None:
        """Send hidden states. Wait until the previous tensor has been received."""
        self._send("hidden states", hidden_states, self._after)

    def receive(self, hidden_states: Tensor) -> None:
        self._take(hidden_states, self._before)

    # All stages send in the same order: first the drafts of a step, then its hidden states.

    def send_drafts(self, drafts: Tensor) -> None:
        """Send drafts. Wait until the previous drafts have been received."""
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
        """Begin to send a tensor; what is returned has to be kept until it has left."""

    @abstractmethod
    def _receive(self, x: Tensor, rank: int) -> None:
        """Fill a tensor with what a rank sends."""


class GlooLink(_StageLink):
    """Sends hidden states through gloo, while the rank computes its next step.

    Args:
        group: of all ranks.
        rank: of this process in it.
        around: see `PipelineNeighbors`.
    """

    def __init__(
        self,
        group: "torch.distributed.ProcessGroup",
        rank: int,
        *around: int | None,
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
        rank: of this process.
        around: see `PipelineNeighbors`.
        before: called before each exchange, when what is sent is computed or recorded; None:
            nothing is.
    """

    def __init__(
        self, rank: int, *around: int | None, before: Callable[[], None] | None = None
    ) -> None:
        super().__init__(rank, *around)
        self._before_exchange = before

    def connect(self, device: torch.device) -> None:
        """Exchange one number with each of these stages: the first exchange of two cards opens
        their connection, which takes seconds."""
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
    """Return (rank among all ranks of the engine, their number).

    Args:
        tp: the ranks that share the layers.
        stage: that has them; None: there is one.
    """
    if stage is None:
        return tp.rank, tp.size
    layout = RankLayout(tensor_size=tp.size, pipeline_size=stage.count)
    return layout.tensor_groups[stage.index][tp.rank], layout.world_size
