"""Store responses in memory for later retrieval, limited in number, bytes and age.

The least recently used response is dropped first. A response in progress is never dropped; the
number of these has its own limit. Single-threaded: belongs to one event loop.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from vllm.entrypoints.openai.shared.response_items import Item
from vllm.errors import CapacityError, NotFoundError

if TYPE_CHECKING:
    from vllm.entrypoints.openai.responses.job import BackgroundJob


@dataclass
class StoredResponse:
    """A response, with the conversation that it belongs to."""

    response: dict[str, Any]
    """The response as it was sent to the client; its output grows while the job runs."""
    input_items: list[Item]
    """The input items of the request."""
    history: list[Item]
    """The conversation before this response: inputs and outputs of the responses it follows."""
    owner: bytes = b""
    """Owner of the response; for other owners it does not exist."""
    job: "BackgroundJob | None" = None
    """The background job, or None; its events can be read again."""
    num_bytes: int = field(default=0, init=False)
    expires_at: float = field(default=0.0, init=False)

    @property
    def is_running(self) -> bool:
        """Whether the response is in progress."""
        return self.job is not None and self.job.is_running

    @property
    def conversation(self) -> list[Item]:
        """The conversation including this response."""
        return [*self.history, *self.input_items, *self.response["output"]]

    def measure(self) -> int:
        """Return the size of the response in bytes, as JSON."""
        content = (self.response, self.input_items, self.history)
        num_events_bytes = 0 if self.job is None else self.job.num_bytes
        return len(msgspec.json.encode(content)) + num_events_bytes


class ResponseStore:
    """Stores responses by id.

    Args:
        max_entries: maximum number of finished responses.
        max_bytes: maximum size of finished responses, as JSON; and of the events of responses in
            progress.
        max_running: maximum number of background responses in progress.
        ttl_s: seconds after its last use for which a response is kept.
        clock: returns seconds.
    """

    def __init__(
        self,
        *,
        max_entries: int = 10_000,
        max_bytes: int = 256 * 2**20,
        max_running: int = 1024,
        ttl_s: float = 24 * 3600,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_bytes = max_bytes
        self._max_entries = max_entries
        self._max_running = max_running
        self._ttl_s = ttl_s
        self._clock = clock
        self._finished: OrderedDict[str, StoredResponse] = OrderedDict()
        self._running: dict[str, StoredResponse] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._finished) + len(self._running)

    def add(self, entry: StoredResponse) -> None:
        """Store a response. If it is in progress, call `finish` when it ends.

        Raises:
            CapacityError: (503) too many are in progress.
        """
        if not entry.is_running:
            self._keep(entry)
        else:
            self.check_room()
            self._running[entry.response["id"]] = entry

    def check_room(self) -> None:
        """Raise CapacityError (503) if no further background response can start."""
        num_bytes = sum(entry.job.num_bytes for entry in self._running.values() if entry.job)
        if len(self._running) >= self._max_running or num_bytes >= self.max_bytes:
            raise CapacityError(
                f"too many background responses: {len(self._running)} are running, with "
                f"{num_bytes} bytes of events; the limits are {self._max_running} responses and "
                f"{self.max_bytes} bytes. Try again later",
                status=503,
            )

    def finish(self, entry: StoredResponse) -> None:
        """Record that a response in progress has ended. It is kept unless it was deleted."""
        if self._running.pop(entry.response["id"], None) is not None:
            self._keep(entry)

    def get(self, response_id: str, owner: bytes, *, param: str = "response_id") -> StoredResponse:
        """Return a response of this owner, and extend its time in the store.

        Args:
            response_id: id of the response.
            owner: owner that asks for it.
            param: field of the request that has the id, for errors.

        Raises:
            NotFoundError: it is unknown, expired, or belongs to another owner.
        """
        self._drop_old()
        entry = self._running.get(response_id) or self._finished.get(response_id)
        if entry is None or entry.owner != owner:
            raise NotFoundError(
                f"Response with id {response_id!r:.100} not found: it was not stored, has been "
                f"deleted, or is too old",
                param=param,
            )
        if response_id in self._finished:
            self._touch(entry)
        return entry

    def find_items(self, ids: Collection[str], owner: bytes) -> dict[str, Item]:
        """Return the items with these ids in the stored responses of this owner; unknown ids are
        left out.
        """
        self._drop_old()
        found: dict[str, Item] = {}
        for entry in self._finished.values():
            if entry.owner == owner:
                for item in (*entry.input_items, *entry.response["output"]):
                    if item["id"] in ids:
                        found[item["id"]] = item
        return found

    def delete(self, entry: StoredResponse) -> None:
        """Delete a response from the store."""
        response_id = entry.response["id"]
        self._running.pop(response_id, None)
        if self._finished.pop(response_id, None) is not None:
            self.num_bytes -= entry.num_bytes

    def _keep(self, entry: StoredResponse) -> None:
        entry.num_bytes = entry.measure()
        if entry.num_bytes > self.max_bytes:
            # Larger than the whole store: keeping it would displace all others and then itself.
            return
        self._finished[entry.response["id"]] = entry
        self.num_bytes += entry.num_bytes
        self._touch(entry)
        self._drop_old()

    def _touch(self, entry: StoredResponse) -> None:
        entry.expires_at = self._clock() + self._ttl_s
        self._finished.move_to_end(entry.response["id"])

    def _drop_old(self) -> None:
        """Drop expired responses, and the least recently used ones beyond the limits. The order of
        use is also the order of expiry.
        """
        now = self._clock()
        while self._finished:
            oldest = next(iter(self._finished.values()))
            is_within = (
                len(self._finished) <= self._max_entries and self.num_bytes <= self.max_bytes
            )
            if is_within and oldest.expires_at > now:
                return
            self.delete(oldest)
