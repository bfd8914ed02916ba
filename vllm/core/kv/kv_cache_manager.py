"""Manage the block tables of requests, and the blocks that they share through the prefix cache."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

import numpy as np

from vllm.core.kv.block_hash import block_hashes, group_keys, root_hash
from vllm.core.kv.block_pool import BlockPool
from vllm.core.kv.cache_events import CacheEventLog
from vllm.core.kv.state_cache import StateCache
from vllm.kv_cache_spec import FULL_GROUP, KVCacheGroup
from vllm.messages import NULL_BLOCK_ID, EngineRequest, IntArray
from vllm.request import Request

_Block = TypeVar("_Block")
"""The content of a block, kept elsewhere."""


class KVCacheManager:
    """Allocates blocks to requests and frees them.

    A request has a block table for each group of layers. All its tables are equally long; blocks
    that a sliding window has passed are freed and replaced by the null block.

    Args:
        num_blocks: blocks of the cache, the null block included.
        block_size: tokens per block.
        enable_caching: find and keep shared prefixes.
        events: log of changes of the prefix cache; None: no log is kept.
        groups: groups of layers, with full attention first.
        is_dense: whether to give running requests the blocks with the lowest ids, if the cache
            allows it (see the attribute `is_dense`).
        states: cache of recurrent states; None: the model has no recurrent layers, or their states
            are not cached.

    Attributes:
        num_groups: number of groups of layers.
        has_windows: some layers have a sliding window, so blocks are freed while a request runs.
        freed: (block, hash) of the cached blocks of requests that have left the batch, which a
            connector takes and saves; None: no connector does.
        is_dense: running requests have the blocks with the lowest ids (`core.compaction`). True
            only for caches with one group without a window, if no other part stores block ids.
        forgotten: hashes of blocks whose content may be wrong; filled only if `freed` is not None.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_caching: bool,
        events: CacheEventLog | None = None,
        groups: Sequence[KVCacheGroup] = (FULL_GROUP,),
        is_dense: bool = False,
        states: StateCache | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, events)
        self.states = states
        self.events = events
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.num_groups = len(groups)
        self.groups = tuple(groups)
        self._windowed = {i: g for i, g in enumerate(groups) if g.window is not None}
        self.has_windows = bool(self._windowed)
        self.is_dense = is_dense and self.num_groups == 1 and not self.has_windows
        self._being_computed: set[int] = set()
        self.freed: list[tuple[int, bytes]] | None = None
        self.forgotten: list[bytes] = []

    def begin_step(self) -> None:
        """Start to schedule a step: all blocks cached so far are computed by earlier steps."""
        self._being_computed.clear()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens, over all groups."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def find_prefix(self, request: Request) -> list[int]:
        """Find the longest cached prefix of a request, and return its blocks. Allocates nothing.

        The result has the beginnings of its block tables, one group after another. A group with a
        sliding window needs only the blocks in the window of the first token that is not cached.

        At least one token is left to compute, because only computed tokens give logits. A request
        for prompt logprobs needs the logits of every prompt token, so it uses no cached prefix.
        """
        if not self.enable_caching or request.wants_prompt_logprobs:
            return []
        num_full = (len(request.token_ids) - 1) // self.block_size
        hashes = self._hashes(request, num_full)
        found = self._find(hashes)
        return found if self.states is None else self._up_to_a_state(hashes, found)

    def _find(self, hashes: list[bytes]) -> list[int]:
        if self.num_groups == 1 and not self.has_windows:
            return self.pool.find(hashes)
        return self._find_in_groups(hashes)

    def _up_to_a_state(self, hashes: list[bytes], found: list[int]) -> list[int]:
        """Shorten a prefix to the longest one whose recurrent state is cached."""
        assert self.states is not None
        for count in range(len(found) // self.num_groups, 0, -1):
            if self.states.has(hashes[count - 1]):
                shorter = self._find(hashes[:count])
                # Layers with a sliding window may need blocks that are missing.
                if len(shorter) == count * self.num_groups:
                    return shorter
        return []

    def state_ends(self, request: Request, num_cached: int) -> list[int]:
        """Return the numbers of prompt tokens after which the recurrent state should be cached.

        These are the end of the blocks that other requests share, and the end of the last full
        block.

        Args:
            request: request that is about to enter the batch; none of its own blocks is cached yet.
            num_cached: tokens of the request that need not be computed.
        """
        num_full = (len(request.token_ids) - 1) // self.block_size
        num_shared = len(self._find(self._hashes(request, num_full))) // self.num_groups
        ends = {num_shared * self.block_size, num_full * self.block_size}
        return sorted(end for end in ends if end > num_cached)

    def prefix_hash(self, request: Request, num_tokens: int) -> bytes:
        """Return the hash of the first `num_tokens` tokens of a request, which fill whole
        blocks.
        """
        count = num_tokens // self.block_size
        return self._hashes(request, count)[count - 1]

    def _find_in_groups(self, hashes: list[bytes]) -> list[int]:
        num_found = len(hashes)
        for index in range(self.num_groups):
            if index not in self._windowed:
                num_found = len(self.pool.find(group_keys(hashes[:num_found], index)))
        while (missing := self._last_missing(hashes, num_found)) is not None:
            num_found = missing
        tables = []
        for index, group in enumerate(self.groups):
            first = group.first_block(num_found * self.block_size, self.block_size)
            found = self.pool.find(group_keys(hashes[first:num_found], index))
            tables += [NULL_BLOCK_ID] * first + found
        return tables

    def _last_missing(self, hashes: list[bytes], num_found: int) -> int | None:
        """Return the index of the last block that is needed and not cached; None if no block is
        missing.

        Only blocks before this index can be used.
        """
        size = self.block_size
        for index, group in self._windowed.items():
            first = group.first_block(num_found * size, size)
            keys = group_keys(reversed(hashes[first:num_found]), index)
            for distance, key in enumerate(keys, start=1):
                if not self.pool.find([key]):
                    return num_found - distance
        return None

    def num_tokens_in(self, shared: Sequence[int]) -> int:
        """Return the number of cached tokens in the blocks that `find_prefix` returned."""
        return len(shared) // self.num_groups * self.block_size

    def num_lacking(self, request: Request, shared: Sequence[int]) -> int:
        """Return how many free blocks are missing to `admit` the request; 0 or less if there are
        enough.
        """
        need = self.num_blocks_for(len(request.token_ids)) - len(shared)
        return need - self.pool.num_free + self.pool.num_free_among(self._real(shared))

    def admit(self, request: Request, shared: Sequence[int]) -> None:
        """Give a request its shared prefix, and allocate blocks for all its other known tokens.

        All blocks are allocated at once: a long prompt that gets its blocks chunk by chunk could
        run out of blocks half-way and would have to start again. The caller has checked
        `num_lacking`.
        """
        self.pool.share(self._real(shared))
        num_groups, num_shared = self.num_groups, len(shared) // self.num_groups
        new = self.pool.allocate(self.num_blocks_for(len(request.token_ids)) - len(shared))
        num_new = len(new) // num_groups
        request.block_ids, *request.more_block_ids = (
            [
                *shared[index * num_shared : (index + 1) * num_shared],
                *new[index * num_new : (index + 1) * num_new],
            ]
            for index in range(num_groups)
        )
        request.num_cached_blocks = num_shared

    def extend(self, requests: Sequence[Request]) -> list[int]:
        """Append one block to every block table of each request. The caller has checked that blocks
        are free.

        Returns:
            The new blocks, request by request, and for each request in the order of the groups.
        """
        num_groups = self.num_groups
        block_ids = self.pool.allocate(len(requests) * num_groups)
        for request, block_id in zip(requests, block_ids[::num_groups], strict=True):
            request.block_ids.append(block_id)
        for index in range(1, num_groups):
            for request, block_id in zip(requests, block_ids[index::num_groups], strict=True):
                request.more_block_ids[index - 1].append(block_id)
        return block_ids

    def shorten(self, request: Request, num_tokens: int) -> int | None:
        """Free the blocks of a request after its first `num_tokens` tokens. These blocks are not
        cached, because only known tokens have hashes.

        Returns:
            The new length of its tables; None if nothing has changed.
        """
        num_kept = -(-num_tokens // self.block_size)
        if len(request.block_ids) <= num_kept:
            return None
        for table in (request.block_ids, *request.more_block_ids):
            self.pool.free(reversed(table[num_kept:]))
            del table[num_kept:]
        return num_kept

    def num_passed(self, positions: IntArray) -> IntArray:
        """Return the number of blocks before the sliding windows of a query at each position,
        summed over all groups.
        """
        passed = np.zeros_like(positions)
        for group in self._windowed.values():
            assert group.window is not None
            passed += np.maximum(positions - group.window + 1, 0) // self.block_size
        return passed

    def free_out_of_window(self, request: Request, position: int) -> list[tuple[int, int]]:
        """Free the blocks of a request that no query at `position` or later reads.

        Returns:
            (group, number of null blocks at the beginning of its table) for each group in which
            that number has grown.
        """
        passed = []
        tables = [request.block_ids, *request.more_block_ids]
        for index, group in self._windowed.items():
            table, end = tables[index], group.first_block(position, self.block_size)
            start = end
            while start and table[start - 1] != NULL_BLOCK_ID:
                start -= 1
            if start < end:
                self.pool.free(table[start:end])
                table[start:end] = [NULL_BLOCK_ID] * (end - start)
                passed.append((index, end))
        return passed

    def tables(self, request: Request) -> list[int]:
        """Return all block tables of a request, concatenated."""
        return [*request.block_ids, *chain.from_iterable(request.more_block_ids)]

    def held(self, request: Request) -> list[int]:
        """Return all blocks that a request holds, without null blocks."""
        return list(self._real(self.tables(request)))

    def _real(self, block_ids: Sequence[int]) -> Sequence[int]:
        """Return the given blocks without null blocks, which exist only if layers have sliding
        windows.
        """
        return [b for b in block_ids if b != NULL_BLOCK_ID] if self.has_windows else block_ids

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Add the full blocks among the first `num_tokens` tokens to the prefix cache.

        The tokens are computed, or will be in the step that is being scheduled.
        """
        first, end = request.num_cached_blocks, num_tokens // self.block_size
        if end <= first or not self.enable_caching:
            return
        hashes = self._hashes(request, end)
        for index, table in enumerate((request.block_ids, *request.more_block_ids)):
            block_ids, new = table[first:end], hashes[first:]
            indices: Sequence[int] = range(first, end)
            if index in self._windowed:
                indices = [i for i in indices if table[i] != NULL_BLOCK_ID]
                block_ids, new = [table[i] for i in indices], [hashes[i] for i in indices]
            stored = self.pool.cache_blocks(block_ids, group_keys(new, index))
            if self.events is not None and index == 0:
                new_indices = [indices[i] for i in stored]
                self.events.stored(hashes, new_indices, request.token_ids, request.spec)
            self._being_computed.update(block_ids)
        request.num_cached_blocks = end

    def uncache_blocks(self, request: Request) -> None:
        """Remove all blocks of a failed request from the prefix cache, shared blocks included.

        Its keys may be NaN, which would make every request that reads them fail. The NaN may have
        come from a shared block.
        """
        for index in range(self.num_groups):
            self.pool.uncache_blocks(group_keys(request.block_hashes, index))
        if self.states is not None:
            self.states.remove(request.block_hashes)
        if self.freed is not None:
            wrong = set(request.block_hashes)
            self.freed = [entry for entry in self.freed if entry[1] not in wrong]
            self.forgotten += request.block_hashes

    def forget_all(self) -> bool:
        """Empty the prefix cache. Returns False and changes nothing while any block is held."""
        is_done = self.pool.forget_all()
        if is_done and self.states is not None:
            self.states.forget_all()
        return is_done

    def are_computed(self, block_ids: Sequence[int]) -> bool:
        """Return whether earlier steps compute all of these blocks. False if the step that is being
        scheduled computes some of them.
        """
        return self._being_computed.isdisjoint(block_ids)

    def free(self, request: Request) -> None:
        """Free all blocks of a request. The blocks at the end of the sequence are evicted first."""
        if self.freed is not None:
            known = request.num_cached_blocks
            self.freed += zip(request.block_ids[:known], request.block_hashes, strict=False)
        tables = [request.block_ids, *request.more_block_ids]
        block_ids = self._real(list(chain.from_iterable(zip(*tables, strict=True))))
        self.pool.free(reversed(block_ids))
        request.block_ids, request.more_block_ids = [], []
        request.num_cached_blocks = 0

    def restore(
        self,
        hashes: Sequence[bytes],
        token_ids: Sequence[int],
        load: Callable[[Sequence[bytes]], list[_Block]],
        write: Callable[[list[int], list[_Block]], bool],
        source: EngineRequest | None = None,
    ) -> int:
        """Fill free blocks with contents from another storage, and add them to the prefix cache.

        Args:
            hashes: hashes of the first blocks of a prompt, some of which may be cached already.
            token_ids: tokens of these blocks, for events.
            load: returns the contents of hashes, up to the first one that it does not have.
            write: writes contents into blocks; returns False if it could not.
            source: request with the prompt, for events; None: it has neither an adapter nor media.

        Returns:
            The number of blocks that were filled.
        """
        assert self.num_groups == 1 and not self.has_windows
        pool = self.pool
        found = pool.find(hashes)
        pool.share(found)  # hold them, so that allocating the other blocks does not evict them
        block_ids: list[int] = []
        try:
            contents = load(hashes[len(found) :][: pool.num_free])
            block_ids = pool.allocate(len(contents))
            if not contents or not write(block_ids, contents):
                return 0
            end = len(found) + len(contents)
            stored = pool.cache_blocks(block_ids, hashes[len(found) : end])
            if self.events is not None:
                indices = [len(found) + i for i in stored]
                self.events.stored(hashes, indices, token_ids, source)
            return len(contents)
        finally:
            pool.free(reversed(block_ids))
            pool.free(reversed(found))

    def _hashes(self, request: Request, count: int) -> list[bytes]:
        """Return the hashes of the first `count` blocks of a request. Each hash is computed once
        and kept.
        """
        hashes, size = request.block_hashes, self.block_size
        first = len(hashes)
        if first < count:
            spec, start = request.spec, first * size
            parent = hashes[-1] if hashes else root_hash(spec)
            token_ids = request.token_ids[start : count * size]
            hashes += block_hashes(parent, token_ids, size, spec.cache_extra_keys, start)
        return hashes[:count]
