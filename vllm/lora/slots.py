"""Assign adapters to a fixed number of slots, by their keys. Independent of weights."""

from collections import Counter, OrderedDict


class AdapterSlots:
    """Slots for the adapters of running requests.

    An unused adapter remains in its slot until another one needs the slot. Then the adapter that
    was released first is replaced.

    Args:
        num_slots: number of different adapters in use at the same time.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))[::-1]
        self._slots: OrderedDict[str, int] = OrderedDict()
        self._uses: Counter[str] = Counter()

    def take(self, key: str) -> tuple[int, bool]:
        """Assign a slot for one more request with this adapter.

        Returns:
            (slot, whether the adapter has to be written to it).
        """
        slot = self._slots.get(key)
        is_new = slot is None
        if slot is None:
            slot = self._free.pop() if self._free else self._take_unused()
            self._slots[key] = slot
        self._uses[key] += 1
        return slot, is_new

    def _take_unused(self) -> int:
        unused = next((key for key in self._slots if not self._uses[key]), None)
        assert unused is not None, "more adapters are in use than were admitted"
        return self._slots.pop(unused)

    def release(self, key: str) -> None:
        """Record that a request with this adapter has ended."""
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            self._slots.move_to_end(key)

    def has(self, key: str) -> bool:
        """Return whether the adapter is in a slot. May be called from any thread."""
        return key in self._slots

    def unused(self) -> list[str]:
        """Return the adapters in slots that no request uses."""
        return [key for key in self._slots if not self._uses[key]]

    def forget(self, key: str) -> int:
        """Free the slot of an adapter that no request uses. Returns the slot."""
        assert not self._uses[key], "the adapter is in use"
        slot = self._slots.pop(key)
        self._free.append(slot)
        return slot
