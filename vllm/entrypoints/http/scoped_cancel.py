"""Cancel the current task from a callback, and distinguish this from a cancellation by others.

It has the effect of running one await in its own task with `asyncio.wait`, without creating that
task.
"""

import asyncio


class ScopedCancel:
    """Cancels the next await of the task in which this object is created.

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
        after the await for which it is meant.
        """
        self.is_requested = True
        self._task.cancel()

    def is_the_only_one(self) -> bool:
        """Return whether only `request` caused a CancelledError. The cancellation is then undone,
        and the task continues as if it had not been cancelled.
        """
        if not self.is_requested:
            return False
        uncancel = getattr(self._task, "uncancel", None)  # exists since Python 3.11
        return uncancel is None or uncancel() == 0
