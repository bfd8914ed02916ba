"""Track KV blocks: how many requests hold each block, which blocks are free, and what they still
contain.

A block is an integer. Its reference count, its content hash and its position in the free queue are
entries of lists, so a pool of a million blocks costs a few lists and no objects.

    free queue:  [no content, freed last] ... [content, freed first] ... [content, freed last]
                  ^ taken next                                            ^ evicted last

A freed block whose content has a hash can be found until the block is allocated again (LRU). A
block without a hash is put at the front, because nothing is lost when it is allocated.
"""

from collections.abc import Iterable, Sequence

from vllm.core.kv.cache_events import CacheEventLog
from vllm.messages import NULL_BLOCK_ID


class BlockPool:
    """Keeps the reference counts, the free queue and the prefix cache of `num_blocks` blocks.

    Block 0 is the null block: it belongs to no request and is never allocated. As nothing else uses
    its links, it is the head of the (doubly linked, circular) free queue.

    Args:
        num_blocks: number of blocks, the null block included.
        events: log in which evicted contents are recorded; None: no log.
    """

    def __init__(self, num_blocks: int, events: CacheEventLog | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (the null block and one more), got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self._next = [*range(1, num_blocks), NULL_BLOCK_ID]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]
        self._num_refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._events = events

    @property
    def num_usable_blocks(self) -> int:
        """Number of blocks that requests can hold: all except the null block."""
        return self.num_blocks - 1

    def num_refs(self, block_id: int) -> int:
        """Return the number of requests that hold the block."""
        return self._num_refs[block_id]

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` free blocks: first blocks without cached content, then the ones freed
        earliest.

        The caller has checked `num_free`.
        """
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        next_, refs, hash_of = self._next, self._num_refs, self._hash_of
        block_ids = []
        forgotten: list[bytes] = []
        block_id = next_[NULL_BLOCK_ID]
        for _ in range(count):
            block_ids.append(block_id)
            refs[block_id] = 1
            old = hash_of[block_id]
            if old is not None:
                del self._block_of[old]
                hash_of[block_id] = None
                forgotten.append(old)
            block_id = next_[block_id]
        # The list of free blocks now begins after the blocks that were taken.
        next_[NULL_BLOCK_ID] = block_id
        self._prev[block_id] = NULL_BLOCK_ID
        self.num_free -= count
        if self._events is not None:
            self._events.removed(forgotten)
        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference to each block. Blocks given first are evicted first."""
        for block_id in block_ids:
            refs = self._num_refs[block_id] - 1
            assert refs >= 0, f"block {block_id} is freed more often than it was allocated"
            self._num_refs[block_id] = refs
            if refs == 0:
                self._link(block_id, at_front=self._hash_of[block_id] is None)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks that hold these contents, up to the first content that is not
        cached.
        """
        found = []
        block_of = self._block_of
        for block_hash in hashes:
            block_id = block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def share(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each block; free blocks leave the free queue."""
        for block_id in block_ids:
            if self._num_refs[block_id] == 0:
                self._unlink(block_id)
            self._num_refs[block_id] += 1

    def is_free(self, block_id: int) -> bool:
        """Return whether no request holds the block. False for the null block."""
        return block_id != NULL_BLOCK_ID and self._num_refs[block_id] == 0

    def has_content(self, block_id: int) -> bool:
        """Return whether the block is in the prefix cache."""
        return self._hash_of[block_id] is not None

    def exchange(self, held: int, free: int) -> None:
        """Swap a held block and a free block in all records of the pool. The caller moves the
        contents.

        Afterwards the requests hold the block `free`, and the block `held` is free and has the
        cached content of the other, with its age.
        """
        refs, next_, prev = self._num_refs, self._next, self._prev
        assert refs[held] > 0 and self.is_free(free), (
            f"block {held} is not in use, or block {free} is not free"
        )
        refs[free], refs[held] = refs[held], 0
        before, after = prev[free], next_[free]
        prev[held], next_[held] = before, after
        next_[before] = prev[after] = held
        hash_of = self._hash_of
        hash_of[held], hash_of[free] = hash_of[free], hash_of[held]
        for block_id in (held, free):
            if (content := hash_of[block_id]) is not None:
                self._block_of[content] = block_id

    def num_free_among(self, block_ids: Sequence[int]) -> int:
        """Count how many of the blocks are free."""
        return sum(self._num_refs[block_id] == 0 for block_id in block_ids)

    def cache_blocks(self, block_ids: Iterable[int], hashes: Iterable[bytes]) -> list[int]:
        """Add the contents of held blocks to the prefix cache, except contents that it already has.

        Returns:
            Indices into the arguments of the contents that were added.
        """
        block_of, hash_of = self._block_of, self._hash_of
        stored = []
        for index, (block_id, block_hash) in enumerate(zip(block_ids, hashes, strict=True)):
            if hash_of[block_id] is None and block_hash not in block_of:
                block_of[block_hash] = block_id
                hash_of[block_id] = block_hash
                stored.append(index)
        return stored

    def uncache_blocks(self, hashes: Iterable[bytes]) -> None:
        """Remove contents from the prefix cache, even if their blocks are held. Unknown hashes are
        ignored.
        """
        forgotten = []
        for block_hash in hashes:
            block_id = self._block_of.pop(block_hash, None)
            if block_id is None:
                continue
            self._hash_of[block_id] = None
            forgotten.append(block_hash)
            if self._num_refs[block_id] == 0:
                self._unlink(block_id)
                self._link(block_id, at_front=True)
        if self._events is not None:
            self._events.removed(forgotten)

    def forget_all(self) -> bool:
        """Empty the prefix cache. Returns False and changes nothing while any block is held."""
        if self.num_free != self.num_usable_blocks:
            return False
        self._block_of.clear()
        self._hash_of = [None] * self.num_blocks
        if self._events is not None:
            self._events.cleared()
        return True

    def _link(self, block_id: int, at_front: bool) -> None:
        if at_front:
            before, after = NULL_BLOCK_ID, self._next[NULL_BLOCK_ID]
        else:
            before, after = self._prev[NULL_BLOCK_ID], NULL_BLOCK_ID
        self._prev[block_id], self._next[block_id] = before, after
        self._next[before] = block_id
        self._prev[after] = block_id
        self.num_free += 1

    def _unlink(self, block_id: int) -> None:
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1
