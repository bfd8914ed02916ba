"""The recurrent states that are kept for the prefix cache, by the tokens of each."""

from collections import OrderedDict
from collections.abc import Iterable


class StateCache:
    """Kept states, found by the hash of the tokens that they summarise.

    A kept state is one more row of the tensors in which running requests have their states. A
    request may own one of them. It overwrites that at each block, and publishes it when it leaves
    the batch, as all of its tokens are known then. When no state is free, the one that was not used
    for the longest time makes room; at most half of all states are owned.

    Args:
        first: number of the first kept state; the rows of requests are before it.
        count: number of kept states.
    """

    def __init__(self, first: int, count: int) -> None:
        self._free = list(range(first + count - 1, first - 1, -1))
        self._by_hash: OrderedDict[bytes, int] = OrderedDict()
        self._owned: dict[str, int] = {}
        self._max_owned = count // 2

    def has(self, prefix_hash: bytes) -> bool:
        """Return whether the state of these tokens is kept."""
        return prefix_hash in self._by_hash

    def use(self, prefix_hash: bytes) -> int:
        """Return the number of a state that is kept, which counts as used now."""
        self._by_hash.move_to_end(prefix_hash)
        return self._by_hash[prefix_hash]

    def keep(self, prefix_hash: bytes) -> int | None:
        """Return the number of the state to write for these tokens; None: it is kept already, or
        there is no room."""
        if prefix_hash in self._by_hash:
            self._by_hash.move_to_end(prefix_hash)
            return None
        number = self._take()
        if number is not None:
            self._by_hash[prefix_hash] = number
        return number

    def own(self, request_id: str) -> int | None:
        """Return the number of the state that a request owns, from now on if it owned none; None:
        there is no room."""
        number = self._owned.get(request_id)
        if number is None and len(self._owned) < self._max_owned:
            number = self._take()
            if number is not None:
                self._owned[request_id] = number
        return number

    def publish(self, request_id: str, prefix_hash: bytes | None) -> None:
        """Make the state that a request owns findable. The request owns none from now on.

        Args:
            request_id: of the request.
            prefix_hash: of the tokens of its state; None: they are not known, and the state is
                freed.
        """
        number = self._owned.pop(request_id, None)
        if number is None:
            return
        if prefix_hash is None or prefix_hash in self._by_hash:
            self._free.append(number)
        else:
            self._by_hash[prefix_hash] = number

    def remove(self, hashes: Iterable[bytes]) -> None:
        """Free the states of these tokens."""
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
