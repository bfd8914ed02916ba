"""Exchanges the outcome of forward passes between cards that run every one together.

Their layers exchange tensors. If one card runs out of memory in the middle of a forward pass, the
others wait in an exchange that it never joins, and the engine has to stop. If all cards run out of
memory, or all reach the end, they can continue with a smaller batch.
"""

from collections.abc import Sequence

import msgspec

from vllm.distributed import Rendezvous

_MIN_PATIENCE_S = 1.0


class TPGroupStatus:
    """Communicates the outcome of forward passes between the ranks that share layers.

    Args:
        rendezvous: of this rank.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._num_launches = 0

    def end_launch(self) -> None:
        """Tell the other cards that this card has finished a forward pass, successfully or not."""
        self._num_launches += 1
        self._rendezvous.arrive(self._name)

    def are_done(self, took_s: float) -> bool:
        """Return whether all cards have finished the forward pass that this one has finished.

        Args:
            took_s: seconds it took here; the others get the same time again, and at least a second.
        """
        return self._rendezvous.is_stage_here(self._name, max(_MIN_PATIENCE_S, took_s))

    def all_reduce_max(self, numbers: Sequence[int]) -> list[int]:
        """Return the elementwise maximum of these integers over all cards."""
        data = msgspec.msgpack.encode(list(numbers))
        found = self._rendezvous.exchange(
            f"{self._name}: memory", data, "memory of a launch", ranks=self._rendezvous.stage_ranks
        )
        rows = [msgspec.msgpack.decode(each, type=list[int]) for each in found]
        return [max(column) for column in zip(*rows, strict=True)]

    @property
    def _name(self) -> str:
        return f"launch {self._num_launches}"
