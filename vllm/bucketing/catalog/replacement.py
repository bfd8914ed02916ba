"""Replaces the buckets of a running engine, so that each forward pass always has a bucket."""

from collections.abc import Iterable

from vllm.bucketing.bucket import Bucket, Phase
from vllm.bucketing.catalog.catalog import Catalog
from vllm.bucketing.catalog.closure import missing_buckets, prove
from vllm.bucketing.step_limits import StepLimits


def replacement(
    wanted: Iterable[Bucket], present: Catalog, limits: StepLimits, *, keeps_prompts: bool = False
) -> list[Bucket]:
    """Return a closed set: the wanted buckets, and as few of the present ones as possible.

    A wanted bucket is left out if no present one is as large: it could need more memory than the
    engine has measured.

    Args:
        wanted: buckets for the traffic.
        present: buckets in use, which are closed.
        limits: limits of a forward pass.
        keeps_prompts: keep all present buckets of prompts.
    """
    held = (*present.prefill, *present.decode)
    chosen = {bucket for bucket in wanted if any(other.covers(bucket) for other in held)}
    if keeps_prompts:
        chosen.update(present.prefill)
    while not (report := prove(_catalog_of(chosen), limits)).is_covered:
        # Add the largest missing buckets; if those have no sizes of present buckets, the smallest.
        for lacking in (missing_buckets(_catalog_of(chosen), limits), report.uncovered):
            found = {present.fit(b.phase, b.batch, b.query_len, b.blocks) for b in lacking}
            new = {bucket for bucket in found if bucket is not None} - chosen
            if new:
                break
        assert new, f"the current buckets do not cover every step: {report}"
        chosen |= new
    return sorted(chosen)


def _catalog_of(buckets: Iterable[Bucket]) -> Catalog:
    each = list(buckets)
    return Catalog(
        (b for b in each if b.phase is Phase.PREFILL), (b for b in each if b.phase is Phase.DECODE)
    )
