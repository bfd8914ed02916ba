"""Cancelling the current task from a callback, and telling that from a cancellation by others.

Does for one await what a task of its own with `asyncio.wait` would do, without that task.
"""

import asyncio


class ScopedCancel:
    """Made in a task, for what it awaits next.

    Attributes:
        is_requested: `request` was called.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "made in a task"
        self._task = task
        self.is_requested = False

    def request(self) -> None:
        """Cancel the task. It must be waiting: call this from another task or a timer, and never
        after the await that it is for."""
        self.is_requested = True
        self._task.cancel()

    def is_the_only_one(self) -> bool:
        """Whether only `request` caused a CancelledError that the task got; it is then undone, and
        the task continues as if it had not been cancelled."""
        if not self.is_requested:
            return False
        uncancel = getattr(self._task, "uncancel", None)  # exists since Python 3.11
        return uncancel is None or uncancel() == 0
