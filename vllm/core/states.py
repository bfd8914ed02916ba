"""The recurrent states of a step that are kept for the prefix cache."""

import numpy as np

from vllm.core.kv.kv_cache_manager import KVCacheManager
from vllm.core.kv.state_cache import StateCache
from vllm.core.running_batch import RunningBatch
from vllm.messages import IntArray
from vllm.request import Request


class StateKeeper:
    """Keeps the states of prompts where other requests may begin, and the newest state of each
    request at the end of a block, so that the next turn of a conversation begins there.

    Args:
        states: kept so far.
        cache: has the hashes of tokens.
        running: the running requests.
    """

    def __init__(self, states: StateCache, cache: KVCacheManager, running: RunningBatch) -> None:
        self._states, self._cache, self._running = states, cache, running

    def keep(
        self, rows: IntArray, num_computed: IntArray, num_scheduled: IntArray
    ) -> IntArray | None:
        """Choose the states of a step that are kept.

        Args:
            rows: that run one decode or a part of their prompt.
            num_computed: tokens of each before the step.
            num_scheduled: tokens of each in the step.

        Returns:
            See `SchedulerOutput.kept_states`.
        """
        ends = num_computed + num_scheduled
        size = self._cache.block_size
        passes = num_computed // size < ends // size
        if not passes.any():
            return None
        kept: dict[int, tuple[int, int, int]] = {}
        """By the kept state: one that makes room in the step that has kept it is written once."""
        numbers = zip(num_computed[passes].tolist(), ends[passes].tolist(), strict=True)
        requests = self._running.at(rows[passes])
        for request, (start, end) in zip(requests, numbers, strict=True):
            while request.state_ends and request.state_ends[0] <= end:
                position = request.state_ends.pop(0)
                number = self._states.keep(self._cache.prefix_hash(request, position))
                if number is not None:
                    kept[number] = request.row, position - start, number
            if start >= request.num_prompt_tokens and not end % size:
                number = self._states.own(request.request_id)
                if number is not None:
                    request.num_kept_tokens = end
                    kept[number] = request.row, end - start, number
        return np.array(list(kept.values()), np.int32) if kept else None

    def leave(self, request: Request, num_known: int) -> None:
        """Publish the state that a request owns as it leaves the batch.

        Args:
            request: whose tokens are the known ones.
            num_known: how many of them are computed.
        """
        is_known = 0 < request.num_kept_tokens <= num_known
        key = self._cache.prefix_hash(request, request.num_kept_tokens) if is_known else None
        self._states.publish(request.request_id, key)
        request.num_kept_tokens = 0
        request.state_ends = []
