"""Free the blocks that sliding windows have passed, which no query will read again."""

from vllm.core.kv.kv_cache_manager import KVCacheManager
from vllm.core.running_batch import RunningBatch
from vllm.messages import IntArray


def free_out_of_window_blocks(
    running: RunningBatch, cache: KVCacheManager, rows: IntArray
) -> list[tuple[int, int, int]]:
    """Free the blocks that the sliding windows of running requests have passed.

    Args:
        running: the running requests.
        cache: the KV cache with their blocks.
        rows: batch indices of the requests in the step that is being scheduled.

    Returns:
        Entries for `SchedulerOutput.passed_blocks`.
    """
    computed = running.num_computed[rows]
    due = (cache.num_passed(computed) > running.num_passed[rows]).nonzero()[0]
    if not len(due):
        return []
    rows = rows[due]
    requests = running.at(rows)
    # Count only tokens with results: tokens of a step in flight may still be removed.
    known = [len(request.token_ids) - 1 for request in requests]
    positions = computed[due].clip(max=known)
    running.num_passed[rows] = cache.num_passed(positions)
    return [
        (request.row, group, num_blocks)
        for request, position in zip(requests, positions.tolist(), strict=True)
        for group, num_blocks in cache.free_out_of_window(request, position)
    ]
