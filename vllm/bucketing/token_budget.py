"""Which prefill buckets a step's token budget allows."""

from collections.abc import Sequence

from vllm.bucketing.bucket import Bucket
from vllm.bucketing.step_limits import StepLimits, round_up


def split_by_token_budget(
    buckets: Sequence[Bucket], limits: StepLimits, config: str
) -> tuple[list[Bucket], list[Bucket], str | None]:
    """Buckets to keep, buckets to omit, and a warning or None.

    A batch counts with its context, since that is gathered for every row of it. One prompt alone
    has to run with whatever is before it and at any length within the budget, so it counts
    without context, and the padding of its last block is free.

    When nothing would be left the budget is ignored, and the warning says so.

    Args:
        buckets: prefill buckets.
        limits: the budget and the block size.
        config: the ranges the buckets come from, for the warning.
    """
    kept: list[Bucket] = []
    omitted: list[Bucket] = []
    for bucket in buckets:
        (kept if _is_within(bucket, limits) else omitted).append(bucket)
    if kept or not omitted:
        return kept, omitted, None
    smallest = min(bucket.num_tokens for bucket in buckets)
    return (
        list(buckets),
        [],
        (
            f"The current bucketing configuration (min, step, max_warmup): {config} cannot be used "
            f"with specified max_num_batched_tokens ({limits.max_num_batched_tokens}), as the "
            f"smallest bucket ({smallest}) would exceed token budget. Please increase "
            f"max_num_batched_tokens or decrease bucket minimum. Ignoring max_num_batched_tokens "
            f"at risk of out-of-memory errors."
        ),
    )


def _is_within(bucket: Bucket, limits: StepLimits) -> bool:
    budget, block = limits.max_num_batched_tokens, limits.block_size
    if bucket.batch == 1:
        return bucket.query_len <= round_up(budget, block)
    return bucket.batch * (bucket.query_len + bucket.blocks * block) <= budget
