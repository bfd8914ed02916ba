"""Block tables of requests, and what they share through the prefix cache."""

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

    A request has a block table for each group of layers. All its tables are equally long; where the
    window of a group has passed, the null block replaces the blocks that were freed.

    Args:
        num_blocks: blocks of the cache, the null block included.
        block_size: tokens per block.
        enable_caching: find and keep shared prefixes.
        events: log of changes of the prefix cache; None: no log is kept.
        groups: groups of layers, with full attention first.
        is_dense: see the attribute; asked for.
        states: kept states of a model with layers that have a state of each request; None: it has
            no such layers, or no states are kept.

    Attributes:
        num_groups: how many groups there are.
        has_windows: blocks are freed while a request runs.
        freed: (block, hash) of the findable blocks of requests that have left, for who takes this
            list and saves them; None: nobody does.
        is_dense: the blocks of running requests are kept at the low end (`core.dense_blocks`); for
            caches of one group without a window, of whose blocks nobody else keeps the numbers.
        forgotten: hashes of blocks that were found to be wrong, where `freed` is kept.
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
        self._events = events
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.num_groups = len(groups)
        self._groups = tuple(groups)
        self._windowed = {i: g for i, g in enumerate(groups) if g.window is not None}
        self.has_windows = bool(self._windowed)
        self.is_dense = is_dense and self.num_groups == 1 and not self.has_windows
        self._being_computed: set[int] = set()
        self.freed: list[tuple[int, bytes]] | None = None
        self.forgotten: list[bytes] = []

    def begin_step(self) -> None:
        """Begin to schedule a step: everything remembered so far is computed by earlier steps."""
        self._being_computed.clear()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens, over all groups."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def find_prefix(self, request: Request) -> list[int]:
        """Find the longest cached prefix of the request. Returns its blocks; allocates nothing.

        They are the beginnings of its tables, one after the other. A group with a window needs
        only the blocks in the window of the first token that is not cached.

        At least one token is left to compute, since only computed tokens give logits. A request
        for prompt logprobs needs the logits of every prompt token and matches nothing.
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
        """Shorten a prefix to the longest one whose state is kept."""
        assert self.states is not None
        for count in range(len(found) // self.num_groups, 0, -1):
            if self.states.has(hashes[count - 1]):
                shorter = self._find(hashes[:count])
                # Layers with a sliding window may need blocks that are missing.
                if len(shorter) == count * self.num_groups:
                    return shorter
        return []

    def state_ends(self, request: Request, num_cached: int) -> list[int]:
        """Return after how many tokens the states of a prompt are worth keeping: where its blocks
        end that other requests have as well, and at its last full block.

        Args:
            request: that is about to enter the batch; none of its own blocks is findable yet.
            num_cached: its tokens that need not be computed.
        """
        num_full = (len(request.token_ids) - 1) // self.block_size
        num_shared = len(self._find(self._hashes(request, num_full))) // self.num_groups
        ends = {num_shared * self.block_size, num_full * self.block_size}
        return sorted(end for end in ends if end > num_cached)

    def prefix_hash(self, request: Request, num_tokens: int) -> bytes:
        """Return the hash of the first tokens of a request, which are whole blocks and known."""
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
        for index, group in enumerate(self._groups):
            first = group.first_block(num_found * self.block_size, self.block_size)
            found = self.pool.find(group_keys(hashes[first:num_found], index))
            tables += [NULL_BLOCK_ID] * first + found
        return tables

    def _last_missing(self, hashes: list[bytes], num_found: int) -> int | None:
        """Return the index of the last block that is needed and not cached: only blocks before it
        can be used. None if no block is missing."""
        size = self.block_size
        for index, group in self._windowed.items():
            first = group.first_block(num_found * size, size)
            keys = group_keys(reversed(hashes[first:num_found]), index)
            for distance, key in enumerate(keys, start=1):
                if self.pool.find_one(key) is None:
                    return num_found - distance
        return None

    def num_tokens_in(self, shared: Sequence[int]) -> int:
        """Return the number of tokens in the blocks that `find_prefix` has found; they need not be
        computed."""
        return len(shared) // self.num_groups * self.block_size

    def num_lacking(self, request: Request, shared: Sequence[int]) -> int:
        """Return how many free blocks `admit` lacks; 0 or less: there are enough."""
        need = self.num_blocks_for(len(request.token_ids)) - len(shared)
        return need - self.pool.num_free + self.pool.num_free_among(self._real(shared))

    def admit(self, request: Request, shared: Sequence[int]) -> None:
        """Give a request the shared prefix, and allocate blocks for the rest of its known tokens.

        Room for all of them at once: a long prompt that gets its blocks chunk by chunk would
        start, run out half-way, and start again. The caller has checked `num_lacking`.
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
        """Append a block to all tables of each; the caller has checked that they are free.

        Returns:
            The blocks, request by request, and for each request in the order of the groups.
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
        """Free the blocks beyond the first `num_tokens` tokens. They have no prefix-cache keys,
        because only known tokens have keys.

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
        """Return the number of blocks that windows have passed, over all groups, if the next query
        is at this position."""
        passed = np.zeros_like(positions)
        for group in self._windowed.values():
            assert group.window is not None
            passed += np.maximum(positions - group.window + 1, 0) // self.block_size
        return passed

    def free_out_of_window(self, request: Request, position: int) -> list[tuple[int, int]]:
        """Free the blocks that no query at `position` or later sees.

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
        """Return all blocks that a request holds."""
        return list(self._real(self.tables(request)))

    def _real(self, block_ids: Sequence[int]) -> Sequence[int]:
        """Return the blocks without null blocks, which exist only after a window has passed
        blocks."""
        return [b for b in block_ids if b != NULL_BLOCK_ID] if self.has_windows else block_ids

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks among the first `num_tokens` tokens findable.

        The tokens are computed, or will be in the step that is being scheduled.
        """
        first, end = request.num_cached_blocks, num_tokens // self.block_size
        if end <= first or not self.enable_caching:
            return
        hashes = self._hashes(request, end)
        for index, table in enumerate((request.block_ids, *request.more_block_ids)):
            block_ids, new = table[first:end], hashes[first:]
            places: Sequence[int] = range(first, end)
            if index in self._windowed:
                places = [place for place in places if table[place] != NULL_BLOCK_ID]
                block_ids, new = [table[i] for i in places], [hashes[i] for i in places]
            stored = self.pool.cache_blocks(block_ids, group_keys(new, index))
            if self._events is not None and index == 0:
                new_places = [places[i] for i in stored]
                self._events.stored(hashes, new_places, request.token_ids, request.spec)
            self._being_computed.update(block_ids)
        request.num_cached_blocks = end

    def uncache_blocks(self, request: Request) -> None:
        """Remove the blocks of a failed request from the prefix cache.

        Its keys may be NaN, and every request that read them would fail, too. That counts for the
        blocks it has shared as well: they may be where the NaN came from.
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
        """Whether earlier steps compute all of the blocks. False if the step that is being
        scheduled computes some of them."""
        return self._being_computed.isdisjoint(block_ids)

    def free(self, request: Request) -> None:
        """Free all blocks of a request. The end of the sequence is evicted before its beginning."""
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
        """Fill free blocks with contents that are kept elsewhere; they are findable then.

        Args:
            hashes: of the beginning of a prompt, of which the cache may have some blocks.
            token_ids: of these blocks, for events.
            load: gives the contents of hashes, up to the first that is not there.
            write: writes contents into blocks; False: it has not.
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
            if self._events is not None:
                places = [len(found) + i for i in stored]
                self._events.stored(hashes, places, token_ids, source)
            return len(contents)
        finally:
            pool.free(reversed(block_ids))
            pool.free(reversed(found))

    def _hashes(self, request: Request, count: int) -> list[bytes]:
        """Return the hashes of the first `count` blocks. Each is computed once and kept."""
        hashes, size = request.block_hashes, self.block_size
        first = len(hashes)
        if first < count:
            spec, start = request.spec, first * size
            parent = hashes[-1] if hashes else root_hash(spec)
            token_ids = request.token_ids[start : count * size]
            hashes += block_hashes(parent, token_ids, size, spec.cache_extra_keys, start)
        return hashes[:count]
