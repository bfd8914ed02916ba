"""Delay Ctrl-C until the end of the running step.

An interrupted step would leave the scheduler and the workers in different states, and the engine
could not continue. So the first Ctrl-C waits until the running step has ended.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class PendingInterrupt:
    """Records whether Ctrl-C was pressed since `defer_interrupts` was entered."""

    def __init__(self) -> None:
        self.is_set = False

    def raise_if_set(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed. Called where an interrupt is safe."""
        if self.is_set:
            raise KeyboardInterrupt

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal of Ctrl-C. The second Ctrl-C interrupts at once."""
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


@contextmanager
def defer_interrupts() -> Iterator[PendingInterrupt]:
    """Defer Ctrl-C inside the context; the code there must check the yielded object.

    Changes nothing outside the main thread, or if the program handles SIGINT itself.
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
