"""Frees the blocks that sliding windows have passed: no query will see them again."""

from vllm.core.kv.kv_cache_manager import KVCacheManager
from vllm.core.running_batch import RunningBatch
from vllm.messages import IntArray


def free_out_of_window_blocks(
    running: RunningBatch, cache: KVCacheManager, rows: IntArray
) -> list[tuple[int, int, int]]:
    """Free the blocks that the windows of layers have passed; see
    `SchedulerOutput.passed_blocks`.

    Args:
        running: has the rows.
        cache: has their blocks.
        rows: that run in the step that is being scheduled.
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
