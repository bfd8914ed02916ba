"""Plans the buckets of an engine from its config: strategy, missing buckets, log lines."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from vllm.bucketing.bucket import Bucket, Phase, decode
from vllm.bucketing.catalog.catalog import Catalog, padded_cost
from vllm.bucketing.catalog.closure import missing_buckets, prove, unused_buckets
from vllm.bucketing.catalog.from_traffic import bucket_cost, choose_for_traffic
from vllm.bucketing.log_lines import generated_line, listed
from vllm.bucketing.settings import BucketSettings
from vllm.bucketing.step_limits import StepLimits, ceil_div, is_within, trim_decodes
from vllm.bucketing.strategies.generate import GeneratedBuckets, buckets_from_file, generate_buckets
from vllm.bucketing.traffic import TrafficTable
from vllm.config import HPUConfig, VllmConfig
from vllm.errors import ConfigError

LONGEST_PROMPT = "VLLM_PROMPT_SEQ_BUCKET_MAX"


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of an engine. Every forward pass of every step has one of them."""

    catalog: Catalog
    limits: StepLimits
    """Limits of a launch: a larger step is launched in parts."""
    info: tuple[str, ...]
    """Log lines in the order of printing."""
    warnings: tuple[str, ...]
    added: tuple[Bucket, ...] = ()
    """Buckets of the catalog that the variables, the file or the traffic do not have."""


def plan_buckets(config: VllmConfig, num_blocks: int | None = None) -> BucketPlan:
    """Make the bucket catalog for a config.

    Args:
        config: config of the engine.
        num_blocks: KV blocks, the null block included; None: not known yet.

    Raises:
        ConfigError: the variables or the file give no bucket, or the file cannot be read.
    """
    limits = step_limits(config, num_blocks)
    limits = replace(limits, max_block_refs=limits.usable_blocks)
    generated = _generate(config, limits)
    launch_limits = _launch_limits(limits, generated)
    if config.speculative.draft_model is not None:
        # The draft model computes tokens that it has missed, which may begin anywhere in a request.
        launch_limits = replace(launch_limits, enable_chunked_prefill=True)
    is_optimal = _is_optimal(config)
    cost = bucket_cost(limits.block_size) if is_optimal else padded_cost
    catalog = Catalog(generated.prefill, trim_decodes(generated.decode, limits), cost)
    if launch_limits.enable_chunked_prefill != limits.enable_chunked_prefill and not is_optimal:
        parts = _generate(config, launch_limits).prefill
        catalog = catalog.with_buckets(bucket for bucket in parts if bucket.batch == 1)
    limits = launch_limits
    added = [] if is_optimal or _is_range_given(config) else decode_steps(catalog, limits)
    if not is_optimal:  # recorded traffic already includes draft tokens
        added += _verifying([*catalog.decode, *added], limits)
    added += missing_buckets(catalog.with_buckets(added), limits)
    if added:
        catalog = catalog.with_buckets(added)
    unused = unused_buckets(catalog, limits)
    # A merged batch is one padded sequence: its length and context are sums over prompts.
    if config.hpu.merged_prefill:
        unused = [bucket for bucket in unused if bucket.phase is Phase.DECODE]
    catalog = catalog.without(unused)
    report = prove(catalog, limits)
    assert report.is_covered, str(report)
    info = [
        *generated.info,
        generated_line(Phase.PREFILL, catalog.prefill),
        generated_line(Phase.DECODE, catalog.decode),
    ]
    info.sort(key=_belongs_to_decode)
    added = [bucket for bucket in added if bucket in catalog]
    if added:
        info.append(
            f"Added {len(added)} buckets, for steps beyond the configured ranges: {listed(added)}"
        )
    if unused:
        info.append(f"Left out {len(unused)} buckets that no step can use: {listed(unused)}")
    return BucketPlan(catalog, limits, tuple(info), generated.warnings, tuple(added))


def prompt_budgets(config: VllmConfig) -> tuple[int, int] | None:
    """Return the smallest token budgets with which there are prompt buckets.

    The first allows the smallest prompt bucket, the second all of the smallest batch. None: the
    present budget allows a prompt bucket.

    Raises:
        ConfigError: see `plan_buckets`.
    """
    limits = step_limits(config)
    generated = _generate(config, limits)
    buckets = [*generated.prefill, *generated.omitted]
    if not buckets or any(is_within(bucket, limits) for bucket in buckets):
        return None
    fewest = min(bucket.batch for bucket in buckets)
    tokens = [b.batch * b.query_len for b in buckets if b.batch == fewest]
    return min(tokens), max(tokens)


def _belongs_to_decode(line: str) -> bool:
    """Return a sort key that puts log lines of prompts before log lines of decodes."""
    return line.startswith("Decode") or " decode bucket" in line


def _chosen(hpu: HPUConfig) -> GeneratedBuckets:
    """Return the buckets that were chosen for all ranks when the config was resolved."""
    buckets = sorted(Bucket(Phase(phase), *sizes) for phase, *sizes in hpu.chosen_buckets)
    return GeneratedBuckets(
        prefill=tuple(bucket for bucket in buckets if bucket.phase is Phase.PREFILL),
        decode=tuple(bucket for bucket in buckets if bucket.phase is Phase.DECODE),
        info=hpu.chosen_lines,
        warnings=tuple(
            f"{name}={value} has no effect: buckets are chosen for the traffic of --traffic"
            for name, value in hpu.bucket_variables
            if name != LONGEST_PROMPT
        ),
    )


def longest_prompt(config: VllmConfig) -> int | None:
    """Return the length of the longest prompt bucket if the user has set it, else None."""
    return dict(config.hpu.bucket_variables).get(LONGEST_PROMPT)


def traffic_step_limits(config: VllmConfig, num_blocks: int | None) -> StepLimits:
    """Return the limits of steps for choosing buckets from traffic."""
    limits = step_limits(config, num_blocks)
    return replace(limits, max_block_refs=limits.usable_blocks)


def choose_for_config(config: VllmConfig) -> VllmConfig:
    """Return the config with buckets chosen for its recorded traffic, if it has any.

    Raises:
        ConfigError: the traffic cannot be read, has another block size, or is missing.
    """
    hpu, size = config.hpu, config.cache.block_size
    if not _is_optimal(config):
        return config
    if hpu.traffic is None:
        raise ConfigError(
            "VLLM_BUCKETING_STRATEGY=optimal needs --traffic FILE: a file written by "
            "--record-traffic, or a CSV or JSON Lines file of request lengths"
        )
    table = TrafficTable.load(Path(hpu.traffic), size)
    limits = traffic_step_limits(config, config.cache.num_gpu_blocks_override)
    longest = longest_prompt(config)
    chosen = choose_for_traffic(table, limits, hpu.num_buckets, longest_prompt=longest)
    buckets = tuple((int(b.phase), b.batch, b.query_len, b.blocks) for b in chosen.buckets)
    return replace(config, hpu=replace(hpu, chosen_buckets=buckets, chosen_lines=chosen.lines))


def step_limits(config: VllmConfig, num_blocks: int | None = None) -> StepLimits:
    """Return the limits of the steps that the scheduler can emit."""
    scheduler, cache, drafts = config.scheduler, config.cache, config.speculative.drafts
    max_draft_batch = None if drafts is None else drafts.disable_by_batch_size or None
    return StepLimits(
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=scheduler.max_model_len,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        block_size=cache.block_size,
        num_blocks=num_blocks,
        enable_chunked_prefill=scheduler.enable_chunked_prefill,
        enable_prefix_caching=cache.enable_prefix_caching,
        contiguous_pa=config.hpu.contiguous_pa and config.reads_blocks,
        reads_blocks=config.reads_blocks,
        max_chunk_tokens=scheduler.prefill_chunk_limit,
        max_draft_tokens=scheduler.max_draft_tokens,
        max_draft_batch=max_draft_batch,
    )


def _is_optimal(config: VllmConfig) -> bool:
    return config.hpu.bucketing_strategy == "optimal" and config.hpu.bucketing_file is None


def _is_range_given(config: VllmConfig) -> bool:
    """Return whether the user has set the largest decode bucket."""
    names = (name for name, _ in config.hpu.bucket_variables)
    return config.hpu.bucketing_file is not None or "VLLM_DECODE_BLOCK_BUCKET_MAX" in names


def decode_steps(catalog: Catalog, limits: StepLimits) -> list[Bucket]:
    """Return additional decode buckets, from the strategy's largest up to the largest possible.

    The default ranges end at 2048 tokens per sequence. Longer sequences are rare, so each size is a
    quarter larger than the previous one; without them such a batch would be padded to all blocks of
    the cache.
    """
    largest: dict[int, int] = {}
    for bucket in catalog.decode:
        largest[bucket.batch] = max(bucket.blocks, largest.get(bucket.batch, 0))
    steps = []
    for batch, blocks in largest.items():
        most = limits.max_decode_blocks(min(batch, limits.max_decode_batch))
        while (blocks := ceil_div(blocks * 5, 4)) < most:
            steps.append(decode(batch, blocks))
    return steps


def _verifying(decodes: Iterable[Bucket], limits: StepLimits) -> list[Bucket]:
    """Return decode buckets with the query length of drafts, for batch sizes that can have
    drafts.
    """
    decodes, added = list(decodes), []
    for length in limits.decode_query_lens[1:]:
        most = limits.max_batch_of(length)
        most = min((b.batch for b in decodes if b.batch >= most), default=most)
        added += [replace(b, query_len=length) for b in decodes if b.batch <= most]
    return added


def _launch_limits(limits: StepLimits, generated: GeneratedBuckets) -> StepLimits:
    """Return the limits of one forward pass: no prompt chunk is longer than the longest bucket."""
    longest = max((bucket.query_len for bucket in generated.prefill), default=0)
    if not longest or longest >= limits.max_query_len:
        return limits
    # A part of a prompt has context even if chunked prefill is off.
    return replace(limits, enable_chunked_prefill=True, max_chunk_tokens=longest)


def _generate(config: VllmConfig, limits: StepLimits) -> GeneratedBuckets:
    hpu = config.hpu
    if hpu.bucketing_file is not None:
        path = Path(hpu.bucketing_file).expanduser()
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
            raise ConfigError(
                f"VLLM_BUCKETING_FROM_FILE={path} cannot be read: {reason}. Name a file with a "
                "bucket in each line; vllm plan --write-buckets FILE writes one"
            ) from None
        return buckets_from_file(text, str(path), limits)
    if hpu.bucketing_strategy == "optimal":
        return _chosen(hpu)
    settings = BucketSettings.resolve(limits, dict(hpu.bucket_variables))
    settings = replace(settings, max_fine_len=hpu.max_seq_len_to_capture)
    return generate_buckets(
        hpu.bucketing_strategy, limits, settings, merged_prefill=hpu.merged_prefill
    )
