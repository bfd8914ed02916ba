"""Delays Ctrl-C until the end of the running step.

An interrupted step would leave scheduler and workers in different states, and the engine could not
continue. So the first Ctrl-C waits for the step that is running.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class PendingInterrupt:
    """Whether Ctrl-C was pressed since `defer_interrupts` was entered."""

    def __init__(self) -> None:
        self.is_set = False

    def raise_if_set(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed. Called where it is safe."""
        if self.is_set:
            raise KeyboardInterrupt

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal. The second Ctrl-C interrupts at once."""
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


@contextmanager
def defer_interrupts() -> Iterator[PendingInterrupt]:
    """Defer Ctrl-C inside the block, which checks for it.

    Changes nothing outside the main thread, or where the program handles SIGINT itself.
    """
    pending = PendingInterrupt()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pending
        return
    signal.signal(signal.SIGINT, pending.handle)
    try:
        yield pending
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
