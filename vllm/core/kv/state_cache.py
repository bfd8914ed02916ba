"""Cache recurrent states for prompts that share a prefix, by the hash of their tokens."""

from collections import OrderedDict
from collections.abc import Iterable


class StateCache:
    """Assigns cached recurrent states to prefixes, by the hash of the tokens that a state
    summarises.

    A cached state is an additional index in the tensors that hold the states of running requests. A
    running request may own one cached state: it overwrites it at the end of each block, and
    publishes it when it leaves the batch, because all its tokens are known then. If no state is
    free, the least recently used one is replaced; at most half of all states are owned.

    Args:
        first: index of the first cached state, after the states of running requests.
        count: number of cached states.
    """

    def __init__(self, first: int, count: int) -> None:
        self._free = list(range(first + count - 1, first - 1, -1))
        self._by_hash: OrderedDict[bytes, int] = OrderedDict()
        self._owned: dict[str, int] = {}
        self._max_owned = count // 2

    def has(self, prefix_hash: bytes) -> bool:
        """Return whether the state after these tokens is cached."""
        return prefix_hash in self._by_hash

    def use(self, prefix_hash: bytes) -> int:
        """Return the index of a cached state, and mark it as recently used."""
        self._by_hash.move_to_end(prefix_hash)
        return self._by_hash[prefix_hash]

    def keep(self, prefix_hash: bytes) -> int | None:
        """Return the index at which to store the state after these tokens; None if it is cached
        already or there is no room.
        """
        if prefix_hash in self._by_hash:
            self._by_hash.move_to_end(prefix_hash)
            return None
        number = self._take()
        if number is not None:
            self._by_hash[prefix_hash] = number
        return number

    def own(self, request_id: str) -> int | None:
        """Return the index of the state that a request owns, and assign one if it owns none; None
        if there is no room.
        """
        number = self._owned.get(request_id)
        if number is None and len(self._owned) < self._max_owned:
            number = self._take()
            if number is not None:
                self._owned[request_id] = number
        return number

    def publish(self, request_id: str, prefix_hash: bytes | None) -> None:
        """Add the state that a request owns to the cache. The request owns none afterwards.

        Args:
            request_id: id of the request.
            prefix_hash: hash of the tokens of the state; None: the tokens are not known, so the
                state is freed.
        """
        number = self._owned.pop(request_id, None)
        if number is None:
            return
        if prefix_hash is None or prefix_hash in self._by_hash:
            self._free.append(number)
        else:
            self._by_hash[prefix_hash] = number

    def remove(self, hashes: Iterable[bytes]) -> None:
        """Free the cached states of these prefix hashes."""
        for prefix_hash in hashes:
            number = self._by_hash.pop(prefix_hash, None)
            if number is not None:
                self._free.append(number)

    def forget_all(self) -> None:
        """Free all states that no request owns."""
        self.remove(list(self._by_hash))

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        return self._by_hash.popitem(last=False)[1] if self._by_hash else None
