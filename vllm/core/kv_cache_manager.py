"""Block tables of requests, and what they share through the prefix cache."""

from collections.abc import Sequence

from vllm.core.block_hash import block_hashes, root_hash
from vllm.core.block_pool import BlockPool
from vllm.core.cache_events import CacheEventLog
from vllm.request import Request


class KVCacheManager:
    """Gives blocks to requests and takes them back.

    Args:
        num_blocks: blocks of the cache, the null block included.
        block_size: tokens per block.
        enable_caching: find and keep shared prefixes.
        events: log of the changes of the prefix cache; None: no log is kept.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_caching: bool,
        events: CacheEventLog | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, events)
        self._events = events
        self.block_size = block_size
        self.enable_caching = enable_caching
        self._being_computed: set[int] = set()

    def begin_step(self) -> None:
        """What has been remembered so far is computed by earlier steps."""
        self._being_computed.clear()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, request: Request) -> list[int]:
        """Cached blocks with the beginning of the request, longest match; takes none of them.

        At least one token is left to compute, since only computed tokens give logits. A request
        for prompt logprobs needs the logits of every prompt token and matches nothing.
        """
        if not self.enable_caching or request.wants_prompt_logprobs:
            return []
        num_full = (len(request.token_ids) - 1) // self.block_size
        return self.pool.find(self._hashes(request, num_full))

    def num_lacking(self, request: Request, shared: Sequence[int]) -> int:
        """Free blocks that `admit` would need beyond those there are; 0 or less: it can go."""
        need = self.num_blocks_for(len(request.token_ids)) - len(shared)
        return need - self.pool.num_free + self.pool.num_free_among(shared)

    def admit(self, request: Request, shared: Sequence[int]) -> None:
        """Give a request the shared prefix and room for the rest of its known tokens.

        Room for all of them at once: a long prompt that gets its blocks chunk by chunk would
        start, run out half-way, and start again. The caller has checked `num_lacking`.
        """
        self.pool.share(shared)
        need = self.num_blocks_for(len(request.token_ids)) - len(shared)
        request.block_ids = [*shared, *self.pool.allocate(need)]
        request.num_cached_blocks = len(shared)

    def extend(self, requests: Sequence[Request]) -> list[int]:
        """Append a block to the table of each; the caller has checked that they are free."""
        block_ids = self.pool.allocate(len(requests))
        for request, block_id in zip(requests, block_ids, strict=True):
            request.block_ids.append(block_id)
        return block_ids

    def shorten(self, request: Request, num_tokens: int) -> int | None:
        """Take the blocks beyond the first `num_tokens` tokens back. No prefix-cache key has been
        made of them: what is beyond the known tokens has none.

        Returns:
            How many blocks are left; None: nothing has changed.
        """
        num_kept = self.num_blocks_for(num_tokens)
        if len(request.block_ids) <= num_kept:
            return None
        self.pool.free(reversed(request.block_ids[num_kept:]))
        del request.block_ids[num_kept:]
        return num_kept

    def remember(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks among the first `num_tokens` tokens findable.

        The tokens are computed, or will be in the step that is being scheduled.
        """
        first, end = request.num_cached_blocks, num_tokens // self.block_size
        if end <= first or not self.enable_caching:
            return
        block_ids = request.block_ids[first:end]
        hashes = self._hashes(request, end)
        stored = self.pool.remember(block_ids, hashes[first:])
        if self._events is not None:
            self._events.stored(hashes, [first + i for i in stored], request.token_ids)
        self._being_computed.update(block_ids)
        request.num_cached_blocks = end

    def forget(self, request: Request) -> None:
        """Let nobody find the blocks of a request whose computation failed.

        Its keys may be NaN, and every request that read them would fail, too. That counts for the
        blocks it has shared as well: they may be where the NaN came from.
        """
        self.pool.forget(request.block_hashes)

    def are_computed(self, block_ids: Sequence[int]) -> bool:
        """False when the step that is being scheduled is what computes some of the blocks."""
        return self._being_computed.isdisjoint(block_ids)

    def free(self, request: Request) -> None:
        """Take all blocks back; the end of the sequence is evicted before its beginning."""
        self.pool.free(reversed(request.block_ids))
        request.block_ids = []
        request.num_cached_blocks = 0

    def _hashes(self, request: Request, count: int) -> list[bytes]:
        """The hashes of the first `count` blocks, each of them computed once."""
        hashes, size = request.block_hashes, self.block_size
        first = len(hashes)
        if first < count:
            spec, start = request.spec, first * size
            parent = hashes[-1] if hashes else root_hash(spec)
            token_ids = request.token_ids[start : count * size]
            hashes += block_hashes(parent, token_ids, size, spec.cache_extra_keys, start)
        return hashes[:count]
