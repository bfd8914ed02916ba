"""Generates the buckets of a strategy within limits, with log lines."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vllm.bucketing.bucket import Bucket, Phase
from vllm.bucketing.log_lines import bucket_config_line, listed, omitted_line
from vllm.bucketing.settings import LINEAR_VARIABLES, BucketSettings, merge_prompts, usual_steps
from vllm.bucketing.step_limits import StepLimits, split_by_token_budget
from vllm.bucketing.strategies.bucket_file import parse_buckets
from vllm.bucketing.strategies.exponential import (
    ExponentialSettings,
    exponential_decode_buckets,
    exponential_prefill_buckets,
)
from vllm.bucketing.strategies.linear import linear_decode_buckets, linear_prefill_buckets
from vllm.bucketing.strategies.padding_aware import (
    PaddingAwareSettings,
    padding_aware_decode_buckets,
    padding_aware_prefill_buckets,
)
from vllm.bucketing.strategies.sparse import (
    SparseSettings,
    sparse_decode_buckets,
    sparse_prefill_buckets,
)

Strategy = Literal["linear", "exponential", "sparse", "pad"]

DEFAULT_MAX_PREFILL_BATCH = 64

_WITH_LIMIT = ("min", "step", "max_warmup", "limit")


@dataclass(frozen=True, kw_only=True)
class GeneratedBuckets:
    """The buckets of a strategy or a file. Some may still be missing: see `catalog.closure`."""

    prefill: tuple[Bucket, ...]
    decode: tuple[Bucket, ...]
    """Decode buckets, ascending; prompt buckets are ascending too."""
    omitted: tuple[Bucket, ...] = ()
    """Prefill buckets above the token budget."""
    info: tuple[str, ...] = ()
    """Log lines: the configured ranges, and how many buckets were omitted."""
    warnings: tuple[str, ...] = ()


def generate_buckets(
    strategy: Strategy,
    limits: StepLimits,
    settings: BucketSettings,
    *,
    merged_prefill: bool = False,
) -> GeneratedBuckets:
    """Return the buckets of a strategy, which may be more than steps can use.

    Args:
        strategy: `linear` and `pad` use the variables, the others only the limits.
        limits: limits of a step.
        settings: the variables, and the ranges of linear bucketing.
        merged_prefill: prompts are concatenated into one sequence (linear only).

    Raises:
        ConfigError: the variables give no bucket.
    """
    if strategy == "linear":
        return _linear(limits, settings, merged_prefill)
    if strategy == "pad":
        return _padding_aware(limits, settings, merged_prefill)
    name = strategy.capitalize()
    warnings = [
        f"Using {name} Strategy - Your configuration {variable}={value} will be overwritten!"
        for variable, value in settings.given
    ]
    notes = _unmerged(strategy, merged_prefill)
    if strategy == "exponential":
        batch = min(limits.max_num_seqs, DEFAULT_MAX_PREFILL_BATCH)
        ranges = ExponentialSettings.derive(limits, batch)
        prefill = exponential_prefill_buckets(ranges, limits)
        decode = exponential_decode_buckets(ranges, limits)
        info = _config_lines(ranges)
        config = f"bs:{ranges.prompt_bs}, seq:{ranges.prompt_seq}"
    else:
        sparse = SparseSettings.derive(limits)
        prefill = sparse_prefill_buckets(sparse, limits)
        decode = sparse_decode_buckets(sparse, limits)
        info = _config_lines(sparse)
        config = f"bs:{sparse.prompt_bs}, seq:{sparse.prompt_seq}"
    return _within_budget(prefill, decode, limits, config, [*notes, *info], warnings)


def buckets_from_file(text: str, source: str, limits: StepLimits) -> GeneratedBuckets:
    """Return the buckets of a file that fit the token budget; a warning lists the others.

    Raises:
        ConfigError: some lines are not buckets; see `parse_buckets`.
    """
    buckets = parse_buckets(text, source)
    prefill = [bucket for bucket in buckets if bucket.phase is Phase.PREFILL]
    decode = [bucket for bucket in buckets if bucket.phase is Phase.DECODE]
    kept, omitted, warning = split_by_token_budget(prefill, limits, source)
    warnings = [] if warning is None else [warning]
    if omitted:
        warnings.append(
            f"The following prompt buckets from custom bucketing file {source} exceed "
            f"max_num_batched_tokens ({limits.max_num_batched_tokens}) and were omitted: "
            f"{listed(omitted)}"
        )
    return GeneratedBuckets(
        prefill=tuple(sorted(kept)),
        decode=tuple(sorted(decode)),
        omitted=tuple(omitted),
        warnings=tuple(warnings),
    )


def _linear(limits: StepLimits, settings: BucketSettings, merged_prefill: bool) -> GeneratedBuckets:
    notes: Sequence[str] = ()
    settings = usual_steps(settings, limits)
    if merged_prefill:
        settings, notes = merge_prompts(settings, limits)
    prefill = linear_prefill_buckets(settings, limits)
    decode = linear_decode_buckets(settings)
    info = [
        bucket_config_line(Phase.PREFILL, settings.prompt_bs, settings.prompt_seq),
        bucket_config_line(Phase.DECODE, settings.decode_bs, settings.decode_block),
    ]
    warnings = [
        f"{name}={value} has no effect: only VLLM_BUCKETING_STRATEGY=pad reads it"
        for name, value in settings.given
        if name not in LINEAR_VARIABLES
    ]
    config = f"bs:{settings.prompt_bs}, seq:{settings.prompt_seq}"
    return _within_budget(prefill, decode, limits, config, [*notes, *info], warnings)


def _padding_aware(
    limits: StepLimits, settings: BucketSettings, merged_prefill: bool
) -> GeneratedBuckets:
    ranges = PaddingAwareSettings.resolve(limits, dict(settings.given))
    prefill = padding_aware_prefill_buckets(ranges, limits)
    decode = padding_aware_decode_buckets(ranges)
    parts = ("min", "step", "max_warmup", "pad_max", "pad_percent")
    info = [
        bucket_config_line(
            Phase.PREFILL,
            ranges.prompt_bs,
            ranges.prompt_seq,
            context=ranges.prompt_ctx,
            size_label="query",
            parts=parts,
        ),
        bucket_config_line(
            Phase.DECODE, ranges.decode_bs, ranges.decode_block, size_label="block", parts=parts
        ),
    ]
    notes = _unmerged("pad", merged_prefill)
    config = f"bs:{ranges.prompt_bs}, query:{ranges.prompt_seq}"
    return _within_budget(prefill, decode, limits, config, [*notes, *info], [])


def _unmerged(strategy: Strategy, merged_prefill: bool) -> list[str]:
    if not merged_prefill:
        return []
    return [f"Merged prefill warmup is not implemented for {strategy} bucketing yet"]


def _config_lines(ranges: ExponentialSettings | SparseSettings) -> list[str]:
    return [
        bucket_config_line(Phase.PREFILL, ranges.prompt_bs, ranges.prompt_seq, parts=_WITH_LIMIT),
        bucket_config_line(
            Phase.DECODE,
            ranges.decode_bs,
            ranges.decode_block,
            size_label="block",
            parts=_WITH_LIMIT,
        ),
    ]


def _within_budget(
    prefill: Sequence[Bucket],
    decode: Sequence[Bucket],
    limits: StepLimits,
    config: str,
    info: list[str],
    warnings: list[str],
) -> GeneratedBuckets:
    kept, omitted, warning = split_by_token_budget(prefill, limits, config)
    if omitted:
        info.append(omitted_line(omitted, limits.max_num_batched_tokens))
    if warning is not None:
        warnings.append(warning)
    return GeneratedBuckets(
        prefill=tuple(sorted(set(kept))),
        decode=tuple(sorted(set(decode))),
        omitted=tuple(omitted),
        info=tuple(info),
        warnings=tuple(warnings),
    )
