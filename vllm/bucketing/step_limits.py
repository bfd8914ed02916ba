"""Limits of a scheduler step, and the largest shapes of forward passes that follow from them.

The bounds hold for every order of arrival, cancellation, preemption and prefix hit, because they
depend only on the config:

    L  longest sequence     min(max_model_len, tokens that all usable blocks hold)
    C  its blocks           ceil(L / block_size)
    U  usable blocks        num_blocks - 1: block 0 is padding and belongs to no request

Decode of n sequences. Sequence i references ceil(len_i / block_size) blocks, C at most. Without
prefix caching every reference is to a different block: n*C references, and never more than U. With
it, sequences share the beginning of their tables, but the block a sequence writes in this step is
its own: no other request can have found it yet. n sequences hold n such blocks, which leaves U - n
to be shared, so no table is longer than U - n + 1. One prompt shared by all attains it:

    most references of n sequences = n * min(C, U - n + 1)

With contiguous access a decode may also read the first blocks of the cache as a slice. Any decode
can gather its blocks, so a slice is never needed; it is prepared up to the size that n sequences
fill when their blocks are adjacent, the null block included: min(n * C, U) + 1.

Prefill of q tokens after t computed ones: t + q <= L, hence ceil((L - q) / block_size) blocks of
context. Without chunked prefill t is a prefix hit, whole blocks; without prefix caching as well
there is no context.

`split_by_token_budget` applies the token budget of a step to prefill buckets, `trim_decodes` the
bounds above to decode buckets.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from vllm.bucketing.bucket import Bucket
from vllm.config.fields import check_longest_prompt
from vllm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """The settings of the config that limit a step."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int | None = None
    """KV blocks, the null block included. None: not known yet, no limit."""
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    contiguous_pa: bool = False
    """A decode may read the cache as one slice, up to its highest block id, where that costs less
    than to gather its blocks."""
    reads_blocks: bool = True
    """Forward passes read KV blocks. False: the model has no KV cache, so prompts have no blocks of
    context, and each sequence of a decode counts as one block."""
    max_chunk_tokens: int | None = None
    """Tokens of one prompt in one step, where the scheduler is told less than the budget."""
    max_block_refs: int | None = None
    """Block references of one decode launch, where larger batches are launched in parts."""
    max_prefill_batch: int = 1
    """Prompts in one launch that are certain to have a bucket, as long as together they are
    within the token budget when padded to the longest. 1: a group of prompts without a bucket is
    launched in smaller groups, the smallest of which is one prompt."""

    max_draft_tokens: int = 0
    """Drafts of one sequence that a decode may verify."""
    max_draft_batch: int | None = None
    """Sequences of a decode launch that verifies drafts; None: as many as of any."""

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_model_len",
            "max_num_batched_tokens",
            "block_size",
            "max_prefill_batch",
        ):
            _check_at_least(name, getattr(self, name), 1)
        _check_at_least("num_blocks", self.num_blocks, 2)
        _check_at_least("max_chunk_tokens", self.max_chunk_tokens, 1)
        _check_at_least("max_draft_batch", self.max_draft_batch, 1)
        if self.max_block_refs is not None and self.max_block_refs < self.max_blocks_per_seq:
            raise ConfigError(
                f"max_block_refs ({self.max_block_refs}) must be at least "
                f"{self.max_blocks_per_seq}, the blocks of one sequence of {self.max_seq_len} "
                "tokens, because a sequence cannot be split over several forward passes. Raise "
                "max_block_refs or lower max_model_len."
            )
        check_longest_prompt(self)

    @property
    def usable_blocks(self) -> int:
        """U, the number of usable blocks. If it is not known, as many as could ever be needed."""
        if self.num_blocks is None:
            return self.max_num_seqs * ceil_div(self.max_model_len, self.block_size)
        return self.num_blocks - 1

    @property
    def max_seq_len(self) -> int:
        """L, the length of the longest sequence that can run, in tokens."""
        return min(self.max_model_len, self.usable_blocks * self.block_size)

    @property
    def max_blocks_per_seq(self) -> int:
        """C, the number of blocks of the longest sequence."""
        return ceil_div(self.max_seq_len, self.block_size)

    @property
    def has_context(self) -> bool:
        """Whether a prefill can read blocks of tokens that are computed already."""
        return self.reads_blocks and (self.enable_chunked_prefill or self.enable_prefix_caching)

    @property
    def max_query_len(self) -> int:
        """Largest number of tokens of one prompt in one step."""
        longest = min(self.max_seq_len, self.max_num_batched_tokens)
        if self.enable_chunked_prefill and self.max_chunk_tokens is not None:
            return min(longest, self.max_chunk_tokens)
        return longest

    def max_context_blocks(self, query_len: int) -> int:
        """Return the largest number of context blocks before a chunk of `query_len` tokens."""
        if not self.has_context or query_len >= self.max_seq_len:
            return 0
        rest = self.max_seq_len - query_len
        if self.enable_chunked_prefill:
            return ceil_div(rest, self.block_size)
        return rest // self.block_size

    def max_query_before(self, context_blocks: int) -> int:
        """Return the largest chunk that can follow this many context blocks; 0 or less:
        none can.
        """
        if not context_blocks:
            return self.max_seq_len
        if not self.has_context:
            return 0
        tokens = context_blocks * self.block_size
        if self.enable_chunked_prefill:  # the last block of the context may contain a single token
            tokens -= self.block_size - 1
        return self.max_seq_len - tokens

    @property
    def max_decode_batch(self) -> int:
        """Largest number of sequences that can decode together; each needs a block of its own."""
        return min(self.max_num_seqs, self.max_num_batched_tokens, self.usable_blocks)

    @property
    def decode_query_lens(self) -> tuple[int, ...]:
        """Query lengths that have decode buckets, ascending: 1, and 1 + max_draft_tokens with
        drafts.
        """
        return (1, 1 + self.max_draft_tokens) if self.max_draft_tokens else (1,)

    def max_batch_of(self, query_len: int) -> int:
        """Return how many sequences with `query_len` tokens each can decode together."""
        if query_len == 1 or self.max_draft_batch is None:
            return self.max_decode_batch
        return min(self.max_decode_batch, self.max_draft_batch)

    def max_decode_blocks(self, batch: int) -> int:
        """Return the largest number of blocks of a decode.

        Args:
            batch: number of sequences, at most `max_decode_batch`.
        """
        if not self.reads_blocks:
            return batch
        distinct = min(batch * self.max_blocks_per_seq, self.usable_blocks)
        refs = distinct
        if self.enable_prefix_caching:
            refs = batch * min(self.max_blocks_per_seq, self.usable_blocks - batch + 1)
        if self.max_block_refs is not None:
            refs, distinct = min(refs, self.max_block_refs), min(distinct, self.max_block_refs)
        # A slice of the cache that contains them begins with the null block.
        return max(refs, distinct + 1) if self.contiguous_pa else refs

    @property
    def max_blocks(self) -> int:
        """Maximum number of blocks of a decode of any batch."""
        return max(self.max_decode_blocks(n) for n in range(1, self.max_decode_batch + 1))

    @property
    def max_prefill_rows(self) -> int:
        """Largest number of prompts in a batch that must have a bucket."""
        return min(self.max_prefill_batch, self.max_decode_batch)

    def max_prefill_query(self, batch: int) -> int:
        """Return the longest query of a batch of `batch` prompts that must have a bucket."""
        return min(self.max_query_len, self.max_num_batched_tokens // batch)

    def max_prefill_context(self, batch: int, query_len: int) -> int:
        """Return the largest context, in blocks, of a batch of prompts that must have a bucket.

        In a batch the longest context may belong to another request than the longest query.
        """
        return self.max_context_blocks(query_len if batch == 1 else 1)


def ceil_div(value: int, divisor: int) -> int:
    """Divide two positive integers, rounded up."""
    return -(-value // divisor)


def round_up(value: int, step: int) -> int:
    """Round up to the next multiple of `step`."""
    return ceil_div(value, step) * step


def _check_at_least(name: str, value: int | None, smallest: int) -> None:
    if value is not None and value < smallest:
        raise ConfigError(f"{name} must be at least {smallest}, got {value}")


def trim_decodes(buckets: Iterable[Bucket], limits: StepLimits) -> list[Bucket]:
    """Lower the blocks of decode buckets to the most that their batches can have; sorted.

    The slice of a full batch needs one block more, for the null block. If that makes it one block
    larger than another bucket, it replaces that bucket.

    Args:
        buckets: decode buckets in any order.
        limits: limits of a forward pass.
    """
    largest = [0]
    for batch in range(1, limits.max_decode_batch + 1):
        largest.append(max(largest[-1], limits.max_decode_blocks(batch)))
    found: set[Bucket] = set()
    for bucket in buckets:
        most = largest[min(bucket.batch, limits.max_decode_batch)]
        is_largest = bucket.blocks >= most - limits.contiguous_pa
        found.add(replace(bucket, blocks=most) if is_largest else bucket)
    return sorted(found)


def split_by_token_budget(
    buckets: Sequence[Bucket], limits: StepLimits, config: str
) -> tuple[list[Bucket], list[Bucket], str | None]:
    """Split prefill buckets into (kept, omitted) by the token budget; also return a warning or
    None.

    A batch counts with its context, since the context is gathered for each of its requests. A
    single prompt has to run with any context and at any length within the budget, so it counts
    without context, and the padding of its last block is not counted.

    If no bucket would be left the budget is ignored, and the warning says so.

    Args:
        buckets: prefill buckets.
        limits: the budget and the block size.
        config: the ranges the buckets come from, for the warning.
    """
    kept: list[Bucket] = []
    omitted: list[Bucket] = []
    for bucket in buckets:
        (kept if is_within(bucket, limits) else omitted).append(bucket)
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


def is_within(bucket: Bucket, limits: StepLimits) -> bool:
    """Return whether a prefill bucket fits the token budget of a step."""
    budget, block = limits.max_num_batched_tokens, limits.block_size
    if bucket.batch == 1:
        return bucket.query_len <= round_up(budget, block)
    return bucket.batch * (bucket.query_len + bucket.blocks * block) <= budget
