"""Queue the requests that wait for admission, smallest `sort_key` first.

First come, first served and priority scheduling differ only in this key. A preempted request keeps
its key, so it is ahead of all requests that arrived after it.
"""

import heapq
from collections.abc import Iterator

from vllm.request import Request, RequestStatus


class RequestQueue:
    """A heap of waiting requests. A cancelled request is removed when it reaches the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], Request]] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the waiting requests, in no particular order."""
        return (r for _, r in self._heap if r.status is RequestStatus.WAITING)

    def push(self, request: Request) -> None:
        """Queue a request whose status is WAITING."""
        heapq.heappush(self._heap, (request.sort_key, request))
        self._num_waiting += 1

    def peek(self) -> Request:
        """Return the request to admit next. The queue must not be empty."""
        while self._heap[0][1].status is not RequestStatus.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def in_order(self) -> Iterator[Request]:
        """Iterate over the waiting requests, in the order of admission. The queue must not change
        meanwhile.

        The first k requests cost O(k log k), however many wait.
        """
        heap = self._heap
        indices = [(heap[0][0], 0)] if heap else []
        while indices:
            _, index = heapq.heappop(indices)
            request = heap[index][1]
            if request.status is RequestStatus.WAITING:
                yield request
            for below in (2 * index + 1, 2 * index + 2):
                if below < len(heap):
                    heapq.heappush(indices, (heap[below][0], below))

    def pop(self) -> Request:
        """Remove and return the request to admit next."""
        request = self.peek()
        heapq.heappop(self._heap)
        self._num_waiting -= 1
        return request

    def discard(self, request: Request) -> None:
        """Remove a waiting request and set its status to FINISHED."""
        request.status = RequestStatus.FINISHED
        self._num_waiting -= 1
        if len(self._heap) > 2 * self._num_waiting + 64:
            self._heap = [e for e in self._heap if e[1].status is RequestStatus.WAITING]
            heapq.heapify(self._heap)
