"""Manage the adapters in host memory: which are loaded, which requests hold them, and which one is
dropped next.

Independent of the content of adapters, which the caller reads.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vllm.errors import RequestError
from vllm.messages import AdapterRef


@dataclass(eq=False)
class _Entry:
    """An adapter that is in memory or being loaded."""

    adapter: AdapterRef
    content: Any = None
    reason: str | None = None
    """Reason why the adapter cannot be loaded."""
    is_done: bool = False
    """Whether the adapter is loaded, or has failed to load."""
    holds: "list[_Hold]" = field(default_factory=list)


@dataclass(eq=False)
class _Hold:
    """A request that needs an adapter."""

    adapter: AdapterRef
    is_request: bool
    """Whether a request keeps the adapter until the request is released; False: the adapter is only
    loaded in advance."""
    future: Future[str | None] = field(default_factory=Future)
    """Reason why the adapter cannot be loaded; None: it is loaded."""
    entry: _Entry | None = None
    """None: there was no room for the adapter yet."""


class AdapterMemory:
    """Keeps adapters in host memory. Thread-safe.

    An adapter is kept while a request holds it or it is pinned. To make room, the least recently
    used one of the others is dropped. If there is none, the next request waits, and so do all later
    ones, so that its wait ends. One adapter is read at a time.

    Args:
        read: reads an adapter; may raise any error. Called in a thread.
        most: maximum number of adapters in memory, 1 or more. If more than most - 1 are pinned, it
            grows accordingly.
        run: runs work in the background.
    """

    def __init__(
        self,
        read: Callable[[AdapterRef], Any],
        most: int,
        run: Callable[[Callable[[], None]], None],
    ) -> None:
        self._read = read
        self._most = most
        self._run = run
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        """Adapters in memory by key, the least recently used first."""
        self._held: dict[str, _Hold] = {}
        """Adapters that requests keep, by request id."""
        self._wanted: dict[str, _Hold] = {}
        """Adapters that are loaded in advance, by key, until `load` has reported that they are
        loaded."""
        self._lacking: deque[_Hold] = deque()
        """Holds whose adapter has no room yet, in order."""
        self._unread: deque[_Entry] = deque()
        self._is_reading = False
        self._keys: dict[int, str] = {}
        """Number of an adapter in memory -> its key."""
        self._pinned: set[int] = set()

    # ---- requests -------------------------------------------------------------------------

    def hold(self, request_id: str, adapter: AdapterRef) -> "Future[str | None] | None":
        """Keep an adapter in memory for a request, and load it if necessary.

        Returns:
            A future whose result is None when it is loaded, or the reason why it cannot be. None
            instead of a future: it is in memory.
        """
        hold = _Hold(adapter, is_request=True)
        with self._lock:
            assert request_id not in self._held, f"{request_id} was not released"
            self._held[request_id] = hold
            done = self._enter(hold)
        _finish(done)
        return None if hold.future.done() and hold.future.result() is None else hold.future

    def release(self, request_id: str) -> None:
        """Release the adapter of a request that has ended, if it has one."""
        with self._lock:
            hold = self._held.pop(request_id, None)
            done = [] if hold is None else self._leave(hold)
        _finish(done)

    def held(self, request_id: str) -> Any:
        """Return the adapter that a request holds. Waits while it is read.

        Raises:
            RequestError: it cannot be loaded.
        """
        with self._lock:
            hold = self._held[request_id]
            if hold.entry is None:  # the request has not waited for the adapter before
                self._lacking.remove(hold)
                done = self._join(hold)
            else:
                done = []
        _finish(done)
        if (reason := hold.future.result()) is not None:
            raise RequestError(reason)
        assert hold.entry is not None
        return hold.entry.content

    def has(self, key: str) -> bool:
        """Return whether an adapter is in memory or being loaded."""
        with self._lock:
            return key in self._entries

    # ---- callers --------------------------------------------------------------------------

    def load(self, adapter: AdapterRef) -> str | None:
        """Load an adapter before requests use it. Call this repeatedly until it is done.

        Returns:
            None: it is being loaded. Empty: it is loaded. Otherwise the reason why it cannot be
                loaded.
        """
        with self._lock:
            hold, done = self._wanted.get(adapter.key), []
            if hold is None:
                hold = self._wanted[adapter.key] = _Hold(adapter, is_request=False)
                done = self._enter(hold)
        _finish(done)
        if not hold.future.done():
            return None
        with self._lock:
            self._wanted.pop(adapter.key, None)
            if hold.future.result() is None and adapter.key in self._entries:
                self._name(adapter)
        return hold.future.result() or ""

    def unload(self, number: int) -> bool:
        """Drop an adapter; requests that hold it keep it. Returns False if no adapter has this
        id.
        """
        with self._lock:
            key = self._keys.pop(number, None)
            self._pinned.discard(number)
            if key is not None and key not in self._keys.values():
                del self._entries[key]
            done = self._advance()
        _finish(done)
        return key is not None

    def pin(self, number: int) -> bool:
        """Keep an adapter until it is unloaded. Returns False if it is not loaded, or no room would
        be left for unpinned ones.
        """
        with self._lock:
            if number not in self._keys:
                return False
            pinned = {self._keys[each] for each in (*self._pinned, number)}
            if len(pinned) > max(1, self._most - 1):
                return False
            self._pinned.add(number)
            return True

    def keys(self) -> dict[int, str]:
        """Return the key of each adapter in memory, by its id."""
        with self._lock:
            return dict(sorted(self._keys.items()))

    # ---- room; the lock is held -----------------------------------------------------------

    def _enter(self, hold: _Hold) -> "list[_Hold]":
        """Begin a hold, and return the holds that are done."""
        self._lacking.append(hold)
        return self._advance()

    def _leave(self, hold: _Hold) -> "list[_Hold]":
        if hold.entry is None:
            self._lacking.remove(hold)
        elif hold in hold.entry.holds:
            hold.entry.holds.remove(hold)
            if hold.adapter.key in self._entries:
                self._entries.move_to_end(hold.adapter.key)
        ended = [] if hold.future.done() else [hold]
        return ended + self._advance()

    def _advance(self) -> "list[_Hold]":
        """Make room for the requests that wait for it, in order, and return the holds that are
        done.
        """
        done: list[_Hold] = []
        while len(self._entries) > self._limit and self._drop_unused():
            pass  # the limit counted a pinned adapter that is no longer pinned
        while self._lacking and self._has_room(self._lacking[0].adapter.key):
            done += self._join(self._lacking.popleft())
        return done

    def _has_room(self, key: str) -> bool:
        return key in self._entries or len(self._entries) < self._limit or self._drop_unused()

    @property
    def _limit(self) -> int:
        """Number of adapters that may be in memory now."""
        return max(self._most, len({self._keys[number] for number in self._pinned}) + 1)

    def _drop_unused(self) -> bool:
        """Drop the least recently used adapter. Returns False if all of them must be kept."""
        pinned = {self._keys[number] for number in self._pinned}
        for each, entry in self._entries.items():
            if entry.is_done and not entry.holds and each not in pinned:
                self._drop(each)
                return True
        return False

    def _join(self, hold: _Hold) -> "list[_Hold]":
        """Assign a hold to its entry, which is read if it is new. Returns the hold if it is
        done.
        """
        key = hold.adapter.key
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(hold.adapter)
            self._unread.append(entry)
            if not self._is_reading:
                self._is_reading = True
                self._run(self._read_all)
        self._entries.move_to_end(key)
        hold.entry = entry
        if not entry.is_done:
            entry.holds.append(hold)
            return []
        if hold.is_request:
            entry.holds.append(hold)
        self._name(hold.adapter)
        return [hold]

    def _name(self, adapter: AdapterRef) -> None:
        """Record the id of an adapter in memory."""
        before = self._keys.get(adapter.number)
        self._keys[adapter.number] = adapter.key
        if before not in (None, adapter.key) and before not in self._keys.values():
            self._entries.pop(before, None)

    def _drop(self, key: str) -> None:
        del self._entries[key]
        self._keys = {number: each for number, each in self._keys.items() if each != key}

    # ---- reading --------------------------------------------------------------------------

    def _read_all(self) -> None:
        """Read the waiting adapters, one after another."""
        while True:
            with self._lock:
                if not self._unread:
                    self._is_reading = False
                    return
                entry = self._unread.popleft()
            try:
                entry.content = self._read(entry.adapter)
            # Whatever the error is, only requests for this adapter fail.
            except Exception as error:
                entry.reason = str(error) or repr(error)
            with self._lock:
                done = self._end(entry)
            _finish(done)

    def _end(self, entry: _Entry) -> "list[_Hold]":
        """Record that an adapter was read, and return the holds that are done."""
        entry.is_done = True
        done, key = entry.holds, entry.adapter.key
        is_kept = self._entries.get(key) is entry
        if entry.reason is not None:
            entry.holds = []
            if is_kept:
                del self._entries[key]
        else:
            entry.holds = [hold for hold in done if hold.is_request]
            for hold in done if is_kept else ():
                self._name(hold.adapter)
        return [*done, *self._advance()]


def _finish(holds: "list[_Hold]") -> None:
    """Complete the futures of holds. The lock must not be held, because waiting callers may call
    again.
    """
    for hold in holds:
        hold.future.set_result(None if hold.entry is None else hold.entry.reason)
