"""Choose the recurrent states of a step that are stored in the cache of states."""

import numpy as np

from vllm.core.kv.kv_cache_manager import KVCacheManager
from vllm.core.kv.state_cache import StateCache
from vllm.core.running_batch import RunningBatch
from vllm.core.step import RowTokens
from vllm.messages import IntArray
from vllm.request import Request


class StateKeeper:
    """Chooses the recurrent states to cache, so that later requests can start from them.

    These are the states of a prompt where other requests may begin, and for each request the newest
    state at the end of a block, from which the next turn of a conversation can begin.

    Args:
        states: the cache of states.
        cache: the KV cache, which has the hashes of tokens.
        running: the running requests.
    """

    def __init__(self, states: StateCache, cache: KVCacheManager, running: RunningBatch) -> None:
        self._states, self._cache, self._running = states, cache, running

    def keep(self, rows: IntArray, tokens: RowTokens) -> IntArray | None:
        """Choose the states of a step to cache. No chosen state includes a draft that is not yet
        verified.

        Args:
            rows: batch indices of requests that run one decode, drafts, or a part of their prompt.
            tokens: tokens of each request.

        Returns:
            Array for `SchedulerOutput.kept_states`; None if no state is cached.
        """
        begins, ends = tokens.settled()
        size = self._cache.block_size
        passes = begins // size < ends // size
        if not passes.any():
            return None
        kept: dict[int, tuple[int, int, int]] = {}
        """Kept state -> (row, number of tokens in this step, kept state). A state that is replaced
        in the same step is written once."""
        starts = tokens.num_computed[passes].tolist()
        ranges = zip(begins[passes].tolist(), ends[passes].tolist(), starts, strict=True)
        requests = self._running.at(rows[passes])
        for request, (begin, end, start) in zip(requests, ranges, strict=True):
            while request.state_ends and request.state_ends[0] <= end:
                position = request.state_ends.pop(0)
                number = self._states.keep(self._cache.prefix_hash(request, position))
                if number is not None:
                    kept[number] = request.row, position - start, number
            if begin >= request.num_prompt_tokens:
                number = self._states.own(request.request_id)
                if number is not None:
                    newest = end // size * size
                    request.num_kept_tokens = newest
                    kept[number] = request.row, newest - start, number
        return np.array(list(kept.values()), np.int32) if kept else None

    def leave(self, request: Request, num_known: int) -> None:
        """Publish the cached state that a request owns, because the request leaves the batch.

        Args:
            request: request whose tokens are all known.
            num_known: how many of its tokens are computed.
        """
        is_known = 0 < request.num_kept_tokens <= num_known
        key = self._cache.prefix_hash(request, request.num_kept_tokens) if is_known else None
        self._states.publish(request.request_id, key)
        request.num_kept_tokens = 0
        request.state_ends = []
