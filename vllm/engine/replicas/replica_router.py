"""Choose the replica for each request: the one with the fewest tokens to compute.

    tokens to compute  =  prompts that have no token yet, without what is cached
                          + _OUTPUT_TOKENS per output, or max_tokens if that is less

The length of an output is not known, so all outputs count alike. A replica that was sent a prompt
with the same beginning has fewer tokens to compute. So it is chosen, unless its other load is
higher by more than that. Independent of processes and of the event loop.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm.messages import EngineRequest

_OUTPUT_TOKENS = 256
"""Tokens that are expected of an output with a larger limit."""

_MAX_PREFIXES = 1 << 15
"""Beginnings of prompts that are remembered, over all replicas; about 10 MB."""

_ENDS = (*range(64, 1025, 64), *range(1536, 4097, 512))
"""Lengths at which the beginnings of two prompts are compared."""


class PrefixMemory:
    """Remembers which beginnings of prompts each replica was sent.

    A beginning is identified by its hash. A collision only makes a choice worse, so Python's hash
    is sufficient.

    Args:
        capacity: number of beginnings to remember; the least recently sent ones are forgotten.
    """

    def __init__(self, capacity: int = _MAX_PREFIXES) -> None:
        self._capacity = capacity
        self._replicas: dict[int, int] = {}
        """Hash of a beginning -> bit mask of replicas, the one sent last at the end."""

    def __len__(self) -> int:
        return len(self._replicas)

    def hashes(self, request: EngineRequest) -> list[int]:
        """Return the hashes of the beginnings of a prompt, short ones first."""
        token_ids, keys, found = request.prompt_token_ids, request.cache_extra_keys, []
        last = hash(request.cache_salt)
        start = 0
        for end in _ENDS:
            if end > len(token_ids):
                break
            new = tuple(key for key in keys if start <= key.start < end)
            last = hash((last, new, tuple(token_ids[start:end])))
            found.append(last)
            start = end
        return found

    def num_known_tokens(self, hashes: Sequence[int], num_replicas: int) -> list[int]:
        """Return for each replica how many of the prompt's first tokens it was sent before.

        Args:
            hashes: hashes of the beginnings of the prompt, from `hashes`.
            num_replicas: number of replicas.
        """
        known = [0] * num_replicas
        left = (1 << num_replicas) - 1
        for end, key in zip(_ENDS, hashes, strict=False):
            left &= self._replicas.get(key, 0)
            if not left:
                break
            for index in range(num_replicas):
                if left >> index & 1:
                    known[index] = end
        return known

    def add(self, hashes: Sequence[int], replica: int) -> None:
        """Record that a replica is sent a prompt with these beginnings."""
        replicas = self._replicas
        for key in hashes:
            replicas[key] = replicas.pop(key, 0) | 1 << replica
        while len(replicas) > self._capacity:
            del replicas[next(iter(replicas))]

    def remove_replica(self, replica: int) -> None:
        """Forget a replica that has lost its cache."""
        mask = ~(1 << replica)
        kept = ((key, found & mask) for key, found in self._replicas.items())
        self._replicas = {key: found for key, found in kept if found}


@dataclass(slots=True)
class ReplicaLoad:
    """The load of one replica."""

    num_tokens: int = 0
    """Tokens to compute."""
    requests: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Id in the core -> tokens to compute of its prompt and of its output."""
    prefilling: set[str] = field(default_factory=set)
    """Requests that have no output token yet."""


class ReplicaRouter:
    """Tracks the load of the replicas, and chooses between them.

    Args:
        num_replicas: number of replicas, at least 1.
        max_num_seqs: number of requests that one replica runs at a time; further ones wait in it.
        has_prefix_cache: whether replicas cache prefixes.
    """

    def __init__(self, num_replicas: int, max_num_seqs: int, *, has_prefix_cache: bool) -> None:
        self.loads = [ReplicaLoad() for _ in range(num_replicas)]
        self._max_num_seqs = max_num_seqs
        self._has_prefixes = has_prefix_cache and num_replicas > 1
        self._prefixes = PrefixMemory()
        self._owners: dict[str, int] = {}
        self._last = num_replicas - 1

    def choose(
        self, request: EngineRequest, core_ids: Sequence[str], candidates: Sequence[int]
    ) -> int:
        """Choose the replica to send a request to, and count its tokens as load of this replica.

        Args:
            request: request to send.
            core_ids: ids of its samples, which the core computes as separate requests.
            candidates: indices of the replicas that may get it, at least one.
        """
        count, prefixes = len(self.loads), self._prefixes
        hashes = prefixes.hashes(request) if self._has_prefixes else []
        known = prefixes.num_known_tokens(hashes, count) if hashes else [0] * count

        def cost(index: int) -> tuple[bool, int, int, int]:
            load = self.loads[index]
            num_requests = len(load.requests)
            has_to_wait = num_requests >= self._max_num_seqs
            turn = (index - self._last - 1) % count
            return has_to_wait, load.num_tokens - known[index], num_requests, turn

        chosen = candidates[0] if len(candidates) == 1 else min(candidates, key=cost)
        self._last = chosen
        if hashes:
            prefixes.add(hashes, chosen)
        self._add(chosen, request, core_ids, known[chosen])
        return chosen

    def owner(self, core_id: str) -> int | None:
        """Return the replica that has a request; None if it has finished."""
        return self._owners.get(core_id)

    def progress(self, replica: int, core_ids: Sequence[str]) -> None:
        """Update the load of a replica whose requests have new tokens."""
        load = self.loads[replica]
        if not load.prefilling:
            return
        for core_id in load.prefilling.intersection(core_ids):
            load.prefilling.discard(core_id)
            num_prompt, num_output = load.requests[core_id]
            load.requests[core_id] = 0, num_output
            load.num_tokens -= num_prompt

    def end(self, core_ids: Iterable[str]) -> None:
        """Remove finished requests from the loads; unknown ids are ignored."""
        for core_id in core_ids:
            owner = self._owners.pop(core_id, None)
            if owner is None:
                continue
            load = self.loads[owner]
            load.num_tokens -= sum(load.requests.pop(core_id))
            load.prefilling.discard(core_id)

    def drop_requests_of(self, replica: int) -> list[str]:
        """Forget the requests and the prefixes of a replica. Returns the ids of the requests."""
        core_ids = list(self.loads[replica].requests)
        self.end(core_ids)
        self._prefixes.remove_replica(replica)
        return core_ids

    def forget_prefixes(self) -> None:
        """Forget all prefixes, because the prefix caches of all replicas were emptied."""
        for index in range(len(self.loads)):
            self._prefixes.remove_replica(index)

    def _add(
        self, replica: int, request: EngineRequest, core_ids: Sequence[str], num_known: int
    ) -> None:
        load = self.loads[replica]
        num_prompt = len(request.prompt_token_ids)
        num_output = 0
        if request.pooling_params is None:
            num_output = min(_OUTPUT_TOKENS, request.max_total_tokens - num_prompt)
        num_new = max(0, num_prompt - num_known)
        for core_id in core_ids:
            load.requests[core_id] = num_new, num_output
            load.num_tokens += num_new + num_output
            load.prefilling.add(core_id)
            self._owners[core_id] = replica
            num_new = 0  # count the prompt once: all outputs share it
