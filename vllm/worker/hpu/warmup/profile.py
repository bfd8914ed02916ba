"""The profiling run: measures the memory that forward passes need, before the KV cache is sized.

The largest forward passes run with almost no cache. A card never frees the workspace of a forward
pass, so smaller ones run first. A shape that in proportion to them would need more memory than
there is, or would leave none for the cache, is not run but given up, as the warm-up will do.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from vllm.bucketing import Bucket, Phase, StepLimits
from vllm.bucketing.catalog.bucket_plan import plan_buckets
from vllm.bucketing.catalog.catalog import Catalog, padded_cost
from vllm.bucketing.catalog.shrink import shrink_launches
from vllm.config import VllmConfig
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.worker.hpu.launches.launches import PaddedRunner
from vllm.worker.hpu.launches.planner import PaddedShape
from vllm.worker.hpu.memory.memory_forecast import MemoryForecast
from vllm.worker.hpu.memory.memory_profile import Attempt, MemoryProfile, attempt, used_bytes
from vllm.worker.parts.prompt_logprobs import PART_SIZE


def held_bytes(config: VllmConfig) -> int:
    """Return the device memory that requests and results hold at most while a forward pass runs.

    These are a mask of the vocabulary for each request, and for each token of the step and each
    request the largest number of log-probabilities.
    """
    scheduler, vocab_size = config.scheduler, config.model.resolved_arch.vocab_size
    positions = scheduler.max_num_batched_tokens + scheduler.max_num_seqs * (PART_SIZE + 2)
    num_logprobs = 1 + min(vocab_size, max(1, config.model.max_logprobs))
    return vocab_size * scheduler.max_num_seqs + positions * (8 * num_logprobs + 16)


def profile_launches(
    config: VllmConfig,
    bridge: HabanaBridge,
    runner: PaddedRunner,
    max_bytes: int,
    max_blocks: int | None,
    forecast: MemoryForecast,
) -> tuple[MemoryProfile, int] | None:
    """Run the largest shapes that need at most `max_bytes`, and return the one that needs most.

    Shapes that need more are reported only if no smaller one can run.

    Args:
        config: config of the engine.
        bridge: the card.
        runner: has a cache of a block or more, which is overwritten.
        max_bytes: device memory.
        max_blocks: maximum number of blocks of the KV cache; decodes of more blocks cannot occur.
            None: there is no cache.
        forecast: records the memory of the forward passes.

    Returns:
        The peak of that forward pass, and the memory that one forward pass needs: the workspace
        that all of them share, plus the most that one takes in addition. None: the card cannot run
        any shape of some phase.
    """
    plan = plan_buckets(config, max_blocks)
    runner.launches.allow_buckets(len(plan.catalog))
    resident_bytes = used_bytes(bridge)
    forecast.max_blocks = max((bucket.blocks for bucket in plan.catalog.decode), default=0)

    def run(bucket: Bucket) -> Attempt:
        launch = partial(_run_in_full_memory, config, bridge, runner, bucket)
        peers = runner.launches.peers
        attempted = attempt(bridge, launch, resident_bytes, peers).max_over_ranks(peers)
        forecast.add(PaddedShape(bucket), attempted.without(held_bytes(config)))
        return attempted

    attempts = []
    for phase in runner.launches.phases:
        attempted = _largest_within(
            run, phase, plan.catalog, plan.limits, max_bytes, forecast.num_scores
        )
        if attempted is None:
            return None
        attempts.append(attempted)
    kept = max(0, used_bytes(bridge) - resident_bytes)
    needs_most = max(attempts, key=lambda attempted: attempted.needed_bytes)
    passing = max(attempted.passing_bytes for attempted in attempts)
    return needs_most.profile, max(needs_most.needed_bytes, kept + passing)


def _largest_within(
    run: Callable[[Bucket], Attempt],
    phase: Phase,
    catalog: Catalog,
    limits: StepLimits,
    max_bytes: int,
    num_scores: Callable[[Bucket], int],
) -> Attempt | None:
    given_up: list[Bucket] = []
    attempts: dict[Bucket, Attempt] = {}
    while True:
        buckets = catalog.prefill if phase is Phase.PREFILL else catalog.decode
        ladder = _ProfileOrder(attempts, max_bytes, num_scores)
        # Both must fit: the shape with the highest cost, and the one with most attention scores.
        heaviest = {max(buckets, key=size) for size in (padded_cost, num_scores)}
        while (bucket := ladder.next_bucket(buckets, heaviest)) is not None:
            attempts[bucket] = run(bucket)
        failed = {b for b, attempted in attempts.items() if ladder.exceeds_memory(attempted)}
        if heaviest <= attempts.keys() - failed:
            return max((attempts[b] for b in heaviest), key=lambda each: each.passing_bytes)
        lost = [bucket for bucket in buckets if ladder.cannot_fit(bucket)]
        given_up += lost
        found = shrink_launches(catalog.without(lost), limits, given_up)
        if found is None:
            # No smaller bucket is left. Run the heaviest launches to report their memory, if they
            # run at all.
            last = [attempts[b] if b in attempts else run(b) for b in heaviest]
            has_run = all(attempted.refused_bytes is None for attempted in last)
            return max(last, key=lambda each: each.passing_bytes) if has_run else None
        catalog, limits = found


class _ProfileOrder:
    """Chooses the shapes that may run, given the smaller ones that have run.

    Args:
        attempts: forward passes that have run; others may be added.
        max_bytes: maximum number of bytes that a forward pass may need.
        num_scores: function that counts the attention scores of one head that exist at a time.
    """

    def __init__(
        self,
        attempts: Mapping[Bucket, Attempt],
        max_bytes: int,
        num_scores: Callable[[Bucket], int],
    ) -> None:
        self._attempts = attempts
        self._max_bytes = max_bytes
        self._num_scores = num_scores

    def next_bucket(self, buckets: Sequence[Bucket], heaviest: set[Bucket]) -> Bucket | None:
        """Return the shape to run next; None if the heaviest have run, or the others do not fit."""
        if not self._attempts:
            return min(buckets, key=padded_cost)
        wanted = [bucket for bucket in heaviest if bucket not in self._attempts]
        if not wanted:
            return None
        allowed = [bucket for bucket in wanted if not self.cannot_fit(bucket)]
        if allowed:
            return allowed[0]
        most = max(map(padded_cost, self._attempts))
        smaller = [b for b in buckets if padded_cost(b) > most and not self.cannot_fit(b)]
        return max(smaller, key=padded_cost, default=None)

    def exceeds_memory(self, attempted: Attempt) -> bool:
        """Return whether an attempt ran out of memory, or took more than forward passes may."""
        is_above = attempted.has_grown and attempted.needed_bytes > self._max_bytes
        return attempted.refused_bytes is not None or is_above

    def cannot_fit(self, bucket: Bucket) -> bool:
        """Return whether the shape did not fit, or would not in proportion to all that have run."""
        if bucket in self._attempts:
            return self.exceeds_memory(self._attempts[bucket])
        return all(
            self._ratio(bucket, other) > self._reach(attempted)
            for other, attempted in self._attempts.items()
        )

    def _reach(self, attempted: Attempt) -> float:
        """Return how many times larger a shape may be and still fit in memory."""
        if self.exceeds_memory(attempted):
            return 1.0
        # Memory that recipes pass to each other hardly depends on the bucket, so it is not scaled.
        reach = (self._max_bytes - attempted.passing_bytes) / max(1, attempted.kept_bytes)
        # A launch that fit into an earlier workspace may have needed much less than is measured.
        return reach if attempted.has_grown else max(2.0, reach)

    def _ratio(self, bucket: Bucket, other: Bucket) -> float:
        scores = self._num_scores(bucket) / self._num_scores(other)
        return max(scores, padded_cost(bucket) / padded_cost(other))


def _run_in_full_memory(
    config: VllmConfig, bridge: HabanaBridge, runner: PaddedRunner, bucket: Bucket
) -> None:
    """Run a forward pass while other data occupies as much memory as it ever may."""
    held = bridge.zeros((held_bytes(config),), torch.uint8)
    runner.warm_up(PaddedShape(bucket), sampling="heaviest")
    del held
