"""Decide whether a waiting request fits, and which running requests to preempt for it."""

from collections import Counter

from vllm.core.kv.kv_cache_manager import KVCacheManager
from vllm.core.running_batch import RunningBatch
from vllm.request import Request, RequestStatus


class PreemptionPolicy:
    """Decides which requests are preempted; changes nothing itself.

    Args:
        by_priority: whether a request may preempt running requests of lower priority.
        running: the running requests.
        cache: the KV cache with their blocks.
    """

    def __init__(self, by_priority: bool, running: RunningBatch, cache: KVCacheManager) -> None:
        self.by_priority = by_priority
        self._running = running
        self._cache = cache

    def has_higher_priority(self, request: Request, other: Request) -> bool:
        """Return whether `request` may preempt `other` because of its priority."""
        return self.by_priority and request.spec.priority < other.spec.priority

    def has_row_for(self, request: Request) -> bool:
        """Return whether a batch index is free, or can be taken from a request of lower
        priority.
        """
        running = self._running
        return not running.is_full or self.has_higher_priority(request, running.last)

    def num_lacking(self, request: Request, shared: list[int]) -> int:
        """Return how many blocks a waiting request lacks; 0 or less if it fits.

        Half a block per running request stays free: the running requests will need them soon, and
        admitting into the last free block means preempting right afterwards. In simulated loads,
        this causes a quarter of the preemptions that a reserve of 1 % of all blocks causes, at the
        same throughput. One block per request costs 1 to 2 % of the throughput.
        """
        return self._cache.num_lacking(request, shared) + self.num_reserved

    @property
    def num_reserved(self) -> int:
        """Number of free blocks to keep for running requests."""
        return (len(self._running) + 1) // 2 * self._cache.num_groups

    def select_preempted(self, request: Request) -> list[Request]:
        """Return the running requests to preempt for a waiting request, the least important first.

        Empty if the request fits already or no longer waits, or if preempting all requests of lower
        priority would not make enough room.
        """
        if request.status is not RequestStatus.WAITING:
            return []
        cache, running = self._cache, self._running
        shared = cache.find_prefix(request)
        lack = self.num_lacking(request, shared)
        kept = set(shared)
        taken: Counter[int] = Counter()
        victims: list[Request] = []
        for victim in reversed(running.requests):
            if lack <= 0 and (victims or not running.is_full):
                break
            if not self.has_higher_priority(request, victim):
                return []
            victims.append(victim)
            held = cache.held(victim)
            taken.update(held)
            lack -= sum(
                taken[block_id] == cache.pool.num_refs(block_id) and block_id not in kept
                for block_id in held
            )
        return victims
