"""Notice the exit of Ray actors, even while no call waits for them."""

import os
import threading
from collections.abc import Sequence
from typing import Any

from vllm.executor.ranks.rank_group import RankError

WATCH_GROUP = "watch"
"""Concurrency group of the methods that an actor answers while it works."""
_LOOK_S = 1.0
"""Interval at which the thread checks whether to end."""
_ANSWER_TIMEOUT_S = 3.0
"""Seconds to wait for an actor that only has to say that it is there."""


class ActorWatch:
    """Waits in a thread for the exit of actors.

    Args:
        ray: the package `ray`.
        actors: the `RankActor` of each rank.

    Attributes:
        failure_fd: file descriptor that becomes readable when an actor has exited.
        failure: error of the actor that exited.
    """

    def __init__(self, ray: Any, actors: Sequence[Any]) -> None:
        self._ray = ray
        self._actors = actors
        self.failure: RankError | None = None
        self._has_failed = threading.Event()
        self._is_closing = False
        self.failure_fd, self._failure_end = os.pipe()
        calls = [each.watch.options(concurrency_group=WATCH_GROUP).remote() for each in actors]
        self._ranks = {call: rank for rank, call in enumerate(calls)}
        self._thread = threading.Thread(target=self._wait, name="actors", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> RankError | None:
        """Wait up to `timeout_s` for the failure of an actor, and return it; None if no actor
        fails.
        """
        self._has_failed.wait(timeout_s)
        return self.failure

    def unresponsive_ranks(self) -> list[int]:
        """Return the ranks whose actors do not respond, because their processes are stopped or
        their machines cannot be reached.
        """
        asked = [each.ping.options(concurrency_group=WATCH_GROUP).remote() for each in self._actors]
        _, silent = self._ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_TIMEOUT_S)
        return [rank for rank, call in enumerate(asked) if call in silent]

    def close(self) -> None:
        """End the thread. Actors may exit afterwards."""
        self._is_closing = True
        self._thread.join()
        os.close(self.failure_fd)
        os.close(self._failure_end)

    def _wait(self) -> None:
        ended: list[Any] = []
        while not ended:
            ended, _ = self._ray.wait(list(self._ranks), num_returns=1, timeout=_LOOK_S)
            if self._is_closing:
                return
        try:
            self._ray.get(ended)
        except self._ray.exceptions.RayError as error:
            self.failure = exit_reason(self._ranks[ended[0]], error)
            self._has_failed.set()
            os.write(self._failure_end, b"x")


def exit_reason(rank: int, error: Exception) -> RankError:
    """Return the error that an engine reports when the actor of a rank has exited.

    Args:
        rank: rank of the actor.
        error: error that Ray raised.
    """
    reason = " ".join(str(error).split())
    return RankError(f"rank {rank} (a Ray actor) has exited: {reason}")
