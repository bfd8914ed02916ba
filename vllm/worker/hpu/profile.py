"""The profiling run: how much memory launches need, before the KV cache takes what is left.

The largest launches are run on next to no cache. Where the card has no memory for them, or so
little that no cache would be left, ever smaller ones are, as the warm-up will do.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from vllm.bucketing import Bucket, Catalog, Phase, StepLimits, plan_buckets
from vllm.bucketing.catalog import padded_cost
from vllm.bucketing.shrink import shrink_launches
from vllm.config import VllmConfig
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.worker.hpu.launches import PaddedRunner
from vllm.worker.hpu.memory_profile import Attempt, MemoryProfile, attempt
from vllm.worker.hpu.planner import PaddedShape
from vllm.worker.prompt_logprobs import PART_SIZE


def held_bytes(config: VllmConfig) -> int:
    """Most device memory that requests and the results of a step hold while a launch runs.

    A mask of the vocabulary for each request, and for each token of the step and each request the
    log-probabilities of all that may be asked for.
    """
    scheduler, vocab_size = config.scheduler, config.model.resolved_arch.vocab_size
    positions = scheduler.max_num_batched_tokens + scheduler.max_num_seqs * (PART_SIZE + 2)
    num_logprobs = 1 + min(vocab_size, max(1, config.model.max_logprobs))
    return vocab_size * scheduler.max_num_seqs + positions * (8 * num_logprobs + 16)


def profile_launches(
    config: VllmConfig, bridge: HabanaBridge, runner: PaddedRunner, most_bytes: int
) -> MemoryProfile | None:
    """Run the largest launches that need `most_bytes` at most; of those the one that needs most.

    What needs more is reported only where nothing smaller can be launched.

    Args:
        config: of the engine.
        bridge: the card.
        runner: has a cache of a block or more, which is written to.
        most_bytes: device memory.

    Returns:
        The peak of that launch. None: the card cannot run any launch of some phase.
    """
    plan = plan_buckets(config)
    runner.launches.execution.allow_shapes(2 * len(plan.catalog))

    def run(bucket: Bucket) -> Attempt:
        return attempt(bridge, partial(_run_beside_others, config, bridge, runner, bucket))

    profiles = []
    for phase in runner.launches.phases:
        profile = _largest_within(run, phase, plan.catalog, plan.limits, most_bytes)
        if profile is None:
            return None
        profiles.append(profile)
    return max(profiles, key=lambda profile: profile.device_bytes)


def _largest_within(
    run: Callable[[Bucket], Attempt],
    phase: Phase,
    catalog: Catalog,
    limits: StepLimits,
    most_bytes: int,
) -> MemoryProfile | None:
    given_up: list[Bucket] = []
    while True:
        buckets = catalog.prefill if phase is Phase.PREFILL else catalog.decode
        attempts = {b: run(b) for b in _heaviest(buckets, limits.block_size)}
        needs_most = max(attempts.values(), key=lambda attempted: attempted.needed_bytes)
        have_run = all(attempted.refused_bytes is None for attempted in attempts.values())
        if have_run and needs_most.needed_bytes <= most_bytes:
            return needs_most.profile
        lost = _too_large(buckets, attempts, most_bytes, limits.block_size)
        given_up += lost
        found = shrink_launches(catalog.without(lost), limits, given_up)
        if found is None:
            return needs_most.profile if have_run else None
        catalog, limits = found


def _heaviest(buckets: Sequence[Bucket], block_size: int) -> set[Bucket]:
    """Those with the most work and with the largest matrix of scores."""
    return {
        max(buckets, key=padded_cost),
        max(buckets, key=lambda bucket: _num_scores(bucket, block_size)),
    }


def _too_large(
    buckets: Sequence[Bucket],
    attempts: Mapping[Bucket, Attempt],
    most_bytes: int,
    block_size: int,
) -> list[Bucket]:
    """Those that have failed, and those that in proportion to them would: some at least."""
    failed = {
        bucket: attempted.needed_bytes
        for bucket, attempted in attempts.items()
        if attempted.refused_bytes is not None or attempted.needed_bytes > most_bytes
    }

    def is_hopeless(bucket: Bucket) -> bool:
        if bucket in failed:
            return True
        return any(
            needed * padded_cost(bucket) > most_bytes * padded_cost(other)
            and needed * _num_scores(bucket, block_size)
            > most_bytes * _num_scores(other, block_size)
            for other, needed in failed.items()
        )

    return [bucket for bucket in buckets if is_hopeless(bucket)]


def _num_scores(bucket: Bucket, block_size: int) -> int:
    """Of one head: new tokens against all that they attend to."""
    return bucket.num_tokens * (bucket.query_len + bucket.blocks * block_size)


def _run_beside_others(
    config: VllmConfig, bridge: HabanaBridge, runner: PaddedRunner, bucket: Bucket
) -> None:
    """A launch while all that it may find in memory is there."""
    held = bridge.zeros((held_bytes(config),), torch.uint8)
    runner.warm_up(PaddedShape(bucket), with_sampler=True)
    del held
