"""Proves that every possible batch of a step has a bucket, and every bucket a batch.

Padding only adds, so a bucket covers every smaller batch of its phase. The sizes of the buckets
divide the possible batches into classes that are padded to the same sizes, so one comparison per
class is enough:

    prefill  of b prompts, longest query in (q1, q2], q1 and q2 being neighbouring sizes. The
             shorter the query, the more context fits before it: all of them are covered if and
             only if some bucket of b prompts and q2 tokens has the context possible at q1 + 1.
    decode   of n sequences, without drafts or with the largest number of drafts: their block
             references go up to a bound, so all of them are covered if and only if some bucket
             of n sequences has as many.

Beyond the largest size there is one more class, in which nothing is covered.

In the other direction, a bucket is useful if some possible batch has no cheaper bucket. A cheaper
bucket that does not cover a batch covers no larger one either, so it is enough to check the largest
batches that fit into the bucket.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vllm.bucketing.bucket import Bucket, Phase, decode, prefill
from vllm.bucketing.catalog.catalog import Catalog
from vllm.bucketing.step_limits import StepLimits, round_up

_MAX_NAMED = 4


@dataclass(frozen=True)
class ClosureReport:
    """The result of the proof that every possible batch has a bucket."""

    num_classes: int
    """Classes of launches that were compared; together they are all launches."""
    uncovered: tuple[Bucket, ...]
    """The smallest shapes without a bucket, ascending: none of them covers another, and every
    shape without a bucket covers one of them."""

    @property
    def is_covered(self) -> bool:
        """Whether every possible batch has a bucket."""
        return not self.uncovered

    def __str__(self) -> str:
        if self.is_covered:
            return (
                f"every possible step has a bucket ({self.num_classes} classes of shapes compared)"
            )
        named = "; ".join(
            f"{shape.phase!s} of {shape.batch} x {shape.query_len} tokens, {shape.blocks} blocks"
            for shape in self.uncovered[:_MAX_NAMED]
        )
        more = len(self.uncovered) - _MAX_NAMED
        rest = f"; and {more} more" if more > 0 else ""
        return f"some steps have no bucket; the smallest of these steps: {named}{rest}"


def prove(catalog: Catalog, limits: StepLimits) -> ClosureReport:
    """Check whether every possible batch of a step has a bucket; report missing ones."""
    classes = list(_classes(catalog, limits))
    uncovered = {c.smallest for c in classes if c.smallest is not None}
    minimal = [s for s in uncovered if not any(s != t and s.covers(t) for t in uncovered)]
    return ClosureReport(num_classes=len(classes), uncovered=tuple(sorted(minimal)))


def missing_buckets(catalog: Catalog, limits: StepLimits) -> list[Bucket]:
    """Return the buckets that must be added so that every possible batch has one.

    None of them is superfluous; empty if nothing is missing. There is one for each uncovered size,
    unless a larger added bucket covers it. The catalog's sizes are used; beyond its largest, the
    largest that the limits allow, in whole blocks.
    """
    needed = {c.needed for c in _classes(catalog, limits) if c.smallest is not None}
    return sorted(b for b in needed if not any(b != other and other.covers(b) for other in needed))


def unused_buckets(catalog: Catalog, limits: StepLimits) -> list[Bucket]:
    """Return the buckets to which no possible batch is padded, ascending.

    Without them every batch has the same bucket as before.

    Args:
        catalog: has a bucket for every batch.
        limits: limits of a forward pass.
    """
    return [
        bucket
        for bucket in (*catalog.prefill, *catalog.decode)
        if not any(
            catalog.fit(bucket.phase, *shape) == bucket for shape in _largest_within(bucket, limits)
        )
    ]


def _largest_within(bucket: Bucket, limits: StepLimits) -> Iterator[tuple[int, int, int]]:
    """Yield (batch, query_len, blocks) of the largest possible batches that the bucket covers."""
    if bucket.phase is Phase.DECODE:
        for query_len in reversed(limits.decode_query_lens):
            if query_len > bucket.query_len:
                continue
            for batch in range(min(bucket.batch, limits.max_batch_of(query_len)), 0, -1):
                blocks = min(bucket.blocks, limits.max_decode_blocks(batch))
                if blocks >= batch:
                    yield batch, query_len, blocks
        return
    for batch in range(min(bucket.batch, limits.max_decode_batch), 1, -1):
        # Not only the longest prompt of a batch may have the context.
        longest = min(limits.max_query_len, limits.max_num_batched_tokens - batch + 1)
        if longest > 0:
            context = min(bucket.blocks, limits.max_context_blocks(1))
            yield batch, min(bucket.query_len, longest), context
    longest = min(bucket.query_len, limits.max_query_len)
    for context in range(min(bucket.blocks, limits.max_context_blocks(longest)), bucket.blocks + 1):
        query_len = min(longest, limits.max_query_before(context))
        if query_len > 0:
            yield 1, query_len, context


@dataclass(frozen=True, slots=True)
class _Class:
    """Batches that have the same padded sizes."""

    smallest: Bucket | None
    """The smallest launch that no bucket covers; None if all are covered."""
    needed: Bucket
    """A bucket that would cover all of them."""


def _classes(catalog: Catalog, limits: StepLimits) -> Iterator[_Class]:
    yield from _prefill_classes(catalog, limits)
    yield from _decode_classes(catalog, limits)


def _prefill_classes(catalog: Catalog, limits: StepLimits) -> Iterator[_Class]:
    batches = sorted({bucket.batch for bucket in catalog.prefill})
    lengths = sorted({bucket.query_len for bucket in catalog.prefill})
    num_rows = limits.max_prefill_rows
    for batch in range(1, num_rows + 1):
        longest = limits.max_prefill_query(batch)
        padded_batch = _next_size(batches, batch, num_rows)
        stairs = _MaxBlocksBySize(
            (b.query_len, b.blocks) for b in catalog.prefill if b.batch >= batch
        )
        for shorter in [0, *lengths]:
            if shorter >= longest:
                break
            query_len = shorter + 1
            length = _next_size(lengths, query_len, round_up(longest, limits.block_size))
            context = limits.max_prefill_context(batch, query_len)
            height = stairs.at(length)
            yield _Class(
                prefill(batch, query_len, height + 1) if height < context else None,
                prefill(padded_batch, length, context),
            )


def _decode_classes(catalog: Catalog, limits: StepLimits) -> Iterator[_Class]:
    for query_len in limits.decode_query_lens:
        buckets = [bucket for bucket in catalog.decode if bucket.query_len >= query_len]
        batches = sorted({bucket.batch for bucket in buckets})
        stairs = _MaxBlocksBySize((b.batch, b.blocks) for b in buckets)
        most = limits.max_batch_of(query_len)
        for batch in range(1, most + 1):
            padded_batch = _next_size(batches, batch, most)
            refs = limits.max_decode_blocks(batch)
            height = stairs.at(padded_batch)
            yield _Class(
                decode(batch, max(height + 1, batch), query_len) if height < refs else None,
                decode(padded_batch, refs, query_len),
            )


class _MaxBlocksBySize:
    """For each size, the largest number of blocks among buckets of at least this size.

    Args:
        steps: size and blocks of each bucket.
    """

    def __init__(self, steps: Iterable[tuple[int, int]]) -> None:
        self._sizes: list[int] = []
        self._blocks: list[int] = []
        for size, blocks in sorted(steps, reverse=True):
            if self._blocks and blocks <= self._blocks[-1]:
                continue
            self._sizes.append(-size)
            self._blocks.append(blocks)

    def at(self, size: int) -> int:
        """Return the largest number of blocks for a batch of this size; -1 if no bucket is as
        large.
        """
        # Sizes descend and blocks ascend, so take the last entry that is large enough.
        index = bisect_right(self._sizes, -size) - 1
        return self._blocks[index] if index >= 0 else -1


def _next_size(sizes: list[int], value: int, beyond: int) -> int:
    """Return the smallest of the sizes that is at least `value`; `beyond` if there is none."""
    index = bisect_left(sizes, value)
    return sizes[index] if index < len(sizes) else beyond


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
