"""Writes counters of padded forward passes into a trace."""

from vllm.bucketing import Phase
from vllm.utils.trace import LAUNCH_COUNTERS, PaddingCounts, Trace, launch_counters
from vllm.worker.hpu.launches.planner import PaddedLaunch


def trace_launch(trace: Trace, launch: PaddedLaunch, block_size: int) -> None:
    """Write the counters of a forward pass to a trace: requested sizes, and the bucket used."""
    bucket = launch.bucket
    is_prompt = bucket.phase is Phase.PREFILL
    seq_lens = launch.num_computed_tokens + launch.num_scheduled_tokens
    held = launch.num_computed_tokens if is_prompt else seq_lens
    blocks = -(-held // block_size)
    size = PaddingCounts(
        phase="prompt" if is_prompt else "decode",
        rows=len(launch.rows),
        padded_rows=bucket.batch,
        query_len=int(launch.num_scheduled_tokens.max(initial=1)),
        tokens=int(launch.num_scheduled_tokens.sum()),
        padded_tokens=bucket.num_tokens,
        block_refs=int(blocks.max(initial=0) if is_prompt else blocks.sum()),
        padded_blocks=bucket.blocks,
    )
    trace.counter(LAUNCH_COUNTERS, **launch_counters(size))
