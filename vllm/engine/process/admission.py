"""Refuse requests beyond the limits at once (admission control)."""

from collections.abc import Iterable
from dataclasses import dataclass

from vllm.errors import CapacityError


@dataclass(frozen=True, kw_only=True)
class AdmissionLimits:
    """Limits of waiting requests. None: no limit."""

    max_queued_requests: int | None = None
    """Maximum number of waiting requests, in addition to a full batch."""
    max_queued_tokens: int | None = None
    """Maximum number of prompt tokens of waiting requests."""
    request_timeout: float | None = None
    """Seconds after which a request is ended."""


class Admission:
    """Counts waiting and running requests, and refuses new ones beyond the limits.

    Args:
        limits: limits of waiting requests.
        max_num_seqs: number of requests that run at a time.
    """

    def __init__(self, limits: AdmissionLimits, max_num_seqs: int) -> None:
        self.limits = limits
        self._max_num_seqs = max_num_seqs
        self._waiting: dict[str, int] = {}
        """Id in the core -> number of prompt tokens."""
        self._running: set[str] = set()
        self._waiting_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Number of requests that were sent to the core and have not begun."""
        return len(self._waiting)

    def check(self, num_requests: int, num_prompt_tokens: int) -> None:
        """Refuse new requests if they would exceed the limits.

        Args:
            num_requests: number of new requests.
            num_prompt_tokens: number of their prompt tokens.

        Raises:
            CapacityError: (status 503) too many requests or tokens wait.
        """
        limits = self.limits
        if limits.max_queued_requests is not None:
            most = self._max_num_seqs + limits.max_queued_requests
            if len(self._waiting) + len(self._running) + num_requests > most:
                raise CapacityError(
                    f"the queue is full: {len(self._waiting)} requests are waiting, and the limit "
                    f"is {limits.max_queued_requests} (max_queued_requests). Try again later",
                    status=503,
                )
        if limits.max_queued_tokens is not None and self._waiting:
            tokens = self._waiting_tokens + num_prompt_tokens
            if tokens > limits.max_queued_tokens:
                raise CapacityError(
                    f"the queue is full: requests with {self._waiting_tokens} prompt tokens are "
                    f"waiting, this one has {num_prompt_tokens}, and the limit is "
                    f"{limits.max_queued_tokens} (max_queued_tokens). Try again later",
                    status=503,
                )

    def add(self, core_id: str, num_prompt_tokens: int) -> None:
        """Count a request that was sent to the core."""
        self._waiting[core_id] = num_prompt_tokens
        self._waiting_tokens += num_prompt_tokens

    def begin(self, core_ids: Iterable[str]) -> None:
        """Mark requests as begun by the core."""
        for core_id in core_ids:
            num_tokens = self._waiting.pop(core_id, None)
            if num_tokens is not None:
                self._waiting_tokens -= num_tokens
                self._running.add(core_id)

    def end(self, core_ids: Iterable[str]) -> None:
        """Remove requests that have ended; unknown ids are ignored."""
        for core_id in core_ids:
            self._waiting_tokens -= self._waiting.pop(core_id, 0)
            self._running.discard(core_id)

    def clear(self) -> None:
        """Forget all requests."""
        self._waiting.clear()
        self._running.clear()
        self._waiting_tokens = 0
