"""Record changes in the cores since their start, to apply them to a core that is restarted."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vllm.engine.process.core_calls import CoreCalls
from vllm.executor import Worker
from vllm.messages import SLEEP_TAGS


class Change(NamedTuple):
    """A call that has changed all cores."""

    what: str
    """Description of the call, in words."""
    method: Callable[..., Any]
    """Method of `CoreCalls`."""
    args: tuple[Any, ...]


class ReplayLog:
    """The calls (sleep, wake_up, reload_weights) that a restarted engine core must repeat.

    Attributes:
        lock: held while all cores are changed, and while the calls are repeated in a restarted
            core, so that it misses none.
        calls: calls that bring a new core to the state of the others, in order.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.calls: list[Change] = []

    @property
    def sleeping_parts(self) -> list[str]:
        """Tags of the parts that are released (asleep)."""
        asleep: set[str] = set()
        for change in self.calls:
            if change.method is CoreCalls.sleep:
                asleep = set(SLEEP_TAGS)
            elif change.method is CoreCalls.wake_up:
                asleep -= set(change.args[0])
        return [part for part in SLEEP_TAGS if part in asleep]

    def note_sleep(self, level: int = 1) -> None:
        """Record that all parts sleep."""
        self._forget(CoreCalls.sleep, CoreCalls.wake_up)
        self.calls.append(Change(f"sleep(level={level})", CoreCalls.sleep, (level,)))

    def note_awake(self, tags: Sequence[str] | None = None) -> None:
        """Record that parts were woken up; None: all parts."""
        woken = list(SLEEP_TAGS if tags is None else tags)
        self.calls.append(Change(f"wake_up(tags={woken})", CoreCalls.wake_up, (woken,)))
        if not self.sleeping_parts:
            self._forget(CoreCalls.sleep, CoreCalls.wake_up)

    def note_reload(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Record that weights were reloaded, or will be at wake-up. Without arguments, the last
        folder is used again.
        """
        if args or kwargs:
            self._forget(CoreCalls.collective_rpc)
            name = Worker.reload_weights.__name__
            call = (name, None, args, kwargs)
            self.calls.append(Change(name, CoreCalls.collective_rpc, call))

    def _forget(self, *methods: Callable[..., Any]) -> None:
        self.calls = [change for change in self.calls if change.method not in methods]
