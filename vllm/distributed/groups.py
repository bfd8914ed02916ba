"""Exchange tensors between the ranks that share a layer. A group of one rank needs no process
group.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from vllm.errors import CollectiveError, ConfigError


def divide(total: int, parts: int) -> int:
    """Divide `total` by `parts`; the result must be an integer.

    Raises:
        ConfigError: the result is not an integer; names both numbers.
    """
    if total % parts:
        raise ConfigError(
            f"{total} cannot be split evenly over {parts} ranks. Choose a tensor_parallel_size "
            f"that divides it"
        )
    return total // parts


class Collectives(Protocol):
    """Exchanges tensors between the ranks of a group.

    All ranks must call the same method with tensors of the same shape and dtype, in the same order.

    Raises:
        CollectiveError: another rank has failed, or has not answered in time.
    """

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum a tensor over the ranks, with bit-identical results on all of them. May work in
        place.
        """
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the tensors [..., n] of all ranks to [..., n * ranks], in rank order."""
        ...


def gather_function() -> Callable[..., Any]:
    """Return the function that gathers into one tensor. torch 2.13 renamed it, and warns about the
    old name.
    """
    distributed: Any = torch.distributed
    return getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class TorchCollectives:
    """Collectives of torch.distributed, called without Python wrappers, so that a card can record
    them.

    Args:
        size: number of ranks in the group.
        process_group: None: the default group.
        before: called before each collective, when its operands are computed or recorded; None: no
            call.
    """

    def __init__(
        self,
        size: int,
        process_group: "torch.distributed.ProcessGroup | None" = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self._size = size
        self._process_group = process_group
        self._before = before
        self._gather = gather_function()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place."""
        if self._before is not None:
            self._before()
        torch.distributed.all_reduce(x, group=self._process_group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the tensors of all ranks in rank order."""
        x = x.contiguous()
        # Gather into one tensor: with a list of tensors, torch copies the data once more.
        gathered = x.new_empty(self._size * x.shape[0], *x.shape[1:])
        if self._before is not None:
            self._before()
        self._gather(gathered, x, group=self._process_group)
        return gathered.unflatten(0, (self._size, x.shape[0])).movedim(0, -2).flatten(-2)


class CheckedCollectives(TorchCollectives):
    """Collectives on the host, whose errors name the rank and the operation.

    Args:
        rank: rank of this process, for messages.
        size: number of ranks in the group.
        process_group: None: the default group.
    """

    def __init__(
        self, rank: int, size: int, process_group: "torch.distributed.ProcessGroup | None" = None
    ) -> None:
        super().__init__(size, process_group)
        self._rank = rank

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place."""
        try:
            return super().all_reduce(x if x.is_contiguous() else x.contiguous())
        except RuntimeError as error:
            raise CollectiveError("all_reduce", self._rank, str(error)) from error

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the tensors of all ranks in rank order."""
        try:
            return super().all_gather(x)
        except RuntimeError as error:
            raise CollectiveError("all_gather", self._rank, str(error)) from error


@dataclass(eq=False)
class TPGroup:
    """A tensor-parallel group from the view of one rank.

    Layers may be built and loaded before the ranks are connected; `collectives` is needed when they
    run.
    """

    rank: int = 0
    size: int = 1
    collectives: Collectives | None = None
    """None: the default group of torch.distributed."""
    has_whole_experts: bool = False
    """The experts of a mixture are divided among the ranks; False: each expert is split."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum a tensor over the ranks. May work in place if there are several."""
        return x if self.size == 1 else self._connected.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the tensors [..., n] of all ranks to [..., n * size], in rank order."""
        return x if self.size == 1 else self._connected.all_gather(x)

    @property
    def _connected(self) -> Collectives:
        if self.collectives is None:
            self.collectives = TorchCollectives(self.size)
        return self.collectives
