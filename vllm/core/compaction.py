"""Keep the blocks of running requests at the beginning of the cache.

A device that reads the cache as one slice reads it up to the highest block of a running request. So
a block that lies too high and an unused low block exchange their contents. Cached content that
moves up can still be found, and keeps its age.
"""

from collections.abc import Collection
from itertools import chain

import numpy as np

from vllm.core.kv.kv_cache_manager import KVCacheManager
from vllm.core.plan import Plan
from vllm.core.running_batch import RunningBatch
from vllm.messages import BlockMoves

_SLACK = 32
"""One block of so many may be unused below the highest one, because moving a block costs as much as
reading it four times."""


def compact_blocks(
    plan: Plan, running: RunningBatch, cache: KVCacheManager, has_freed: bool
) -> BlockMoves | None:
    """Move the blocks of running requests to low block ids, in their tables and in the plan of this
    step.

    Args:
        plan: complete plan of the step.
        running: requests that hold blocks, the new ones included.
        cache: the KV cache; nothing moves if it is not dense.
        has_freed: whether blocks were freed since the last step.

    Returns:
        The contents that a worker has to move before the step; None if nothing moves.
    """
    if not cache.is_dense or not (has_freed or plan.block_ids or plan.new_requests):
        return None
    requests = running.requests
    tables = [request.block_ids for request in requests]
    held = np.unique(np.fromiter(chain.from_iterable(tables), np.int32))
    limit = len(held) + len(held) // _SLACK
    if not len(held) or held[-1] <= limit:
        return None
    first_high = int(np.searchsorted(held, limit, side="right"))
    is_held = np.zeros(limit + 1, np.bool_)
    is_held[held[:first_high]] = True
    pool = cache.pool
    low = [b for b in np.flatnonzero(~is_held).tolist() if pool.is_free(b)]
    low.sort(key=pool.has_content)  # take blocks without cached content first: nothing is lost
    pairs = list(zip(held[first_high:].tolist(), low, strict=False))
    if not pairs:
        return None
    copies = _copies(pairs, _new_blocks(plan, running, cache.block_size), cache)
    for high, free in pairs:
        pool.exchange(high, free)
    new_ids = dict(pairs)
    for table in (*tables, plan.block_ids, *(new.block_ids for new in plan.new_requests)):
        if not new_ids.keys().isdisjoint(table):
            table[:] = [new_ids.get(block_id, block_id) for block_id in table]
    return BlockMoves(renamed=np.array(pairs, np.int32), copied=np.array(copies, np.int32))


def _new_blocks(plan: Plan, running: RunningBatch, block_size: int) -> set[int]:
    """Return the blocks that have no content before this step."""
    new = set(plan.block_ids)
    for request in plan.new_requests:
        new.update(request.block_ids[running.num_computed[request.row] // block_size :])
    return new


def _copies(
    pairs: list[tuple[int, int]], new_blocks: Collection[int], cache: KVCacheManager
) -> list[tuple[int, int]]:
    """Return (source, target) of each block whose content must be copied.

    The two copies of an exchange are neighbours, and all exchanges precede the one-way moves.
    """
    exchanges: list[tuple[int, int]] = []
    others: list[tuple[int, int]] = []
    for high, low in pairs:
        both = []
        if high not in new_blocks:
            both.append((high, low))
        if cache.pool.has_content(low):
            both.append((low, high))
        (exchanges if len(both) == 2 else others).extend(both)
    return exchanges + others
