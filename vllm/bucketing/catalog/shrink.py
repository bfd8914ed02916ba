"""Smaller forward passes, if the device has no memory for the largest ones.

A bucket that does not fit is given up. If every batch still has a bucket, nothing else changes.
Otherwise the limits of a forward pass are lowered until every batch has one, and larger steps run
in parts:

    prefill  fewer tokens of a prompt at a time; later chunks have the earlier ones as context
    decode   blocks gathered instead of read as a slice; then fewer blocks, then fewer sequences
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from vllm.bucketing.bucket import Bucket, Phase
from vllm.bucketing.catalog.catalog import Catalog
from vllm.bucketing.catalog.closure import missing_buckets, prove
from vllm.bucketing.step_limits import StepLimits, round_up


def shrink_launches(
    catalog: Catalog, limits: StepLimits, given_up: Sequence[Bucket]
) -> tuple[Catalog, StepLimits] | None:
    """Return a closed catalog and limits without the buckets that were given up.

    It may be called again with its results after more buckets had to be given up; this ends,
    because the limits are lower every time.

    Args:
        catalog: without those buckets.
        limits: limits of a forward pass; the number of KV blocks is known.
        given_up: none of them, and nothing as large as one of them, is added.

    Returns:
        The catalog, with buckets for smaller forward passes, and the largest limits for which it
        is closed; both unchanged if it is closed already. None if no forward pass is small enough.
    """
    for phase in Phase:
        if all(shape.phase is not phase for shape in prove(catalog, limits).uncovered):
            continue
        for smaller in _smaller(phase, catalog, limits):
            added = [b for b in missing_buckets(catalog, smaller) if b.phase is phase]
            if not any(bucket.covers(dropped) for bucket in added for dropped in given_up):
                catalog, limits = catalog.with_buckets(added), smaller
                break
        else:
            return None
    return catalog, limits


def _smaller(phase: Phase, catalog: Catalog, limits: StepLimits) -> Iterator[StepLimits]:
    if phase is Phase.PREFILL:
        return _smaller_prefills(catalog, limits)
    return _smaller_decodes(catalog, limits)


def _smaller_prefills(catalog: Catalog, limits: StepLimits) -> Iterator[StepLimits]:
    """Yield limits with shorter and shorter chunks of prompts: whole blocks, or bucket lengths."""
    block = limits.block_size
    lengths = {bucket.query_len for bucket in catalog.prefill}
    least = min({block, *lengths})
    for length in _descending(lengths, below=limits.max_query_len, least=least, step=block):
        # A part of a prompt has context even if chunked prefill is off.
        yield replace(limits, enable_chunked_prefill=True, max_chunk_tokens=length)


def _smaller_decodes(catalog: Catalog, limits: StepLimits) -> Iterator[StepLimits]:
    """Yield lower and lower limits of decodes.

    First without contiguous slices, then with smaller batches, each with fewer and fewer blocks.
    """
    if limits.contiguous_pa:
        limits = replace(limits, contiguous_pa=False)
        yield limits
    counts = {bucket.blocks for bucket in catalog.decode}
    batch = limits.max_decode_batch
    while True:
        least = limits.max_blocks_per_seq
        for refs in _descending(counts, below=limits.max_blocks, least=least):
            yield replace(limits, max_block_refs=refs)
        batch //= 2
        if not batch:
            return
        limits = replace(limits, max_num_seqs=batch)
        yield limits


def _descending(sizes: Iterable[int], *, below: int, least: int, step: int = 1) -> list[int]:
    """Return the sizes from `least` up to but not including `below`, and halves of `below`,
    descending.
    """
    found = {size for size in sizes if least <= size < below}
    half = below
    while half > max(least, step):
        half = max(least, round_up(half // 2, step))
        found.add(half)
    return sorted((size for size in found if size < below), reverse=True)
