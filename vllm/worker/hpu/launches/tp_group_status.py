"""Exchanges the outcome of launches between cards, that run every launch together because their
layers exchange tensors.

If one card runs out of memory in the middle of a launch, the others wait in an exchange that it
never joins, and the engine has to stop. If all cards run out of memory, or all reach the end of the
launch, they can continue with a smaller one.
"""

from collections.abc import Sequence

import msgspec

from vllm.distributed import Rendezvous

_LEAST_PATIENCE_S = 1.0


class TPGroupStatus:
    """The ranks that share layers with this one.

    Args:
        meeting: of this rank.
    """

    def __init__(self, meeting: Rendezvous) -> None:
        self._meeting = meeting
        self._num_launches = 0

    def end_launch(self) -> None:
        """Say that this card is done with a launch, whatever became of it."""
        self._num_launches += 1
        self._meeting.arrive(self._name)

    def are_done(self, took_s: float) -> bool:
        """Whether all cards are done with the launch that this one has ended.

        Args:
            took_s: by this card; the others are given as much time again, and a second at least.
        """
        return self._meeting.is_stage_here(self._name, max(_LEAST_PATIENCE_S, took_s))

    def all_reduce_max(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of the numbers that each card has of the last launch, position by
        position."""
        data = msgspec.msgpack.encode(list(numbers))
        found = self._meeting.exchange(
            f"{self._name}: memory", data, "memory of a launch", ranks=self._meeting.stage_ranks
        )
        rows = [msgspec.msgpack.decode(each, type=list[int]) for each in found]
        return [max(column) for column in zip(*rows, strict=True)]

    @property
    def _name(self) -> str:
        return f"launch {self._num_launches}"
