"""The twelve variables VLLM_{PROMPT|DECODE}_{BS|SEQ|BLOCK}_BUCKET_{MIN|STEP|MAX}.

Their values are arguments: nothing here reads the environment. Their defaults are documented in
`vllm.envs`, whose texts are tested against `_default_ranges`.

In addition to these defaults, the largest prompt size is at most max_model_len, and a default
adapts to a value that was set: a lower maximum lowers the minimum, and the other way round.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import prod

from vllm.bucketing.step_limits import StepLimits, ceil_div, round_up
from vllm.envs import Envs
from vllm.errors import ConfigError

LINEAR_VARIABLES = tuple(
    f"VLLM_{dimension}_BUCKET_{part}"
    for dimension in ("PROMPT_BS", "PROMPT_SEQ", "DECODE_BS", "DECODE_BLOCK")
    for part in ("MIN", "STEP", "MAX")
)

BUCKET_VARIABLES: dict[str, int] = {
    variable.name: variable.metadata["at_least"]
    for variable in fields(Envs)
    if "_BUCKET_" in variable.name
}
"""Variables of bucket ranges and their smallest values. Padding-aware bucketing reads all of them,
linear bucketing the first twelve."""

_USUAL_BLOCK_SIZE = 128
"""Block size for which the defaults of the variables were made."""

_MAX_SIZES, _MAX_BUCKETS = 20_000, 200_000
"""Limits for one range, and for the combinations of ranges. A warm-up of so many takes days."""

_UNSET_HINT = "Or unset one of the two: its default is then derived from the other."


@dataclass(frozen=True)
class BucketRange:
    """Sizes of one dimension: doubling from `min` up to `step`, then every `step` up to `max`."""

    min: int
    step: int
    max: int

    def __str__(self) -> str:
        return f"[{self.min}, {self.step}, {self.max}]"

    def as_tuple(self) -> tuple[int, int, int]:
        """Return (min, step, max)."""
        return (self.min, self.step, self.max)


@dataclass(frozen=True, kw_only=True)
class BucketSettings:
    """The four ranges of linear bucketing."""

    prompt_bs: BucketRange
    prompt_seq: BucketRange
    decode_bs: BucketRange
    decode_block: BucketRange
    given: tuple[tuple[str, int], ...] = ()
    """The variables that were set, and their values."""
    max_fine_len: int | None = None
    """Sequences that are longer have fewer prompt buckets. None: none have."""

    @classmethod
    def resolve(
        cls, limits: StepLimits, given: Mapping[str, int | None] | None = None
    ) -> "BucketSettings":
        """Make settings from variables, by name (None: not set), and from defaults.

        Raises:
            ConfigError: a name is not one of the twelve, a value is below 1, or a minimum that
                was set is above a maximum that was set.
        """
        values = {name: value for name, value in (given or {}).items() if value is not None}
        defaults = _default_ranges(limits)
        for name, value in values.items():
            if name not in BUCKET_VARIABLES:
                names = ", ".join(BUCKET_VARIABLES)
                raise ConfigError(f"{name} is not a bucket variable; accepted: {names}")
            if value < BUCKET_VARIABLES[name]:
                raise ConfigError(
                    f"{name}={value} must be an integer of at least {BUCKET_VARIABLES[name]}"
                )
        ranges = {key: resolve_range(key, default, values) for key, default in defaults.items()}
        return cls(
            prompt_bs=ranges["PROMPT_BS"],
            prompt_seq=ranges["PROMPT_SEQ"],
            decode_bs=ranges["DECODE_BS"],
            decode_block=ranges["DECODE_BLOCK"],
            given=tuple(values.items()),
        )

    def is_given(self, name: str) -> bool:
        """Whether the variable was set."""
        return any(name == given for given, _ in self.given)


def usual_steps(settings: BucketSettings, limits: StepLimits) -> BucketSettings:
    """Scale the default steps so that they have as many tokens as with blocks of 128 tokens.

    Every size is compiled, whatever the block size. With unscaled defaults, blocks of 16 tokens
    would have 64 times as many decode sizes as blocks of 128, and blocks of 512 only one. Values
    that were set are kept.
    """
    tokens = round_up(min(_USUAL_BLOCK_SIZE, limits.max_query_len), limits.block_size)
    blocks = ceil_div(_USUAL_BLOCK_SIZE**2, limits.block_size)
    return replace(
        settings,
        prompt_seq=_with_step(settings, "PROMPT_SEQ", settings.prompt_seq, tokens),
        decode_block=_with_step(settings, "DECODE_BLOCK", settings.decode_block, blocks),
    )


def _with_step(settings: BucketSettings, key: str, sizes: BucketRange, step: int) -> BucketRange:
    if any(settings.is_given(_name(key, part)) for part in ("MIN", "STEP")):
        return sizes
    if settings.is_given(_name(key, "MAX")):
        return BucketRange(min(step, sizes.max), step, sizes.max)
    most = round_up(sizes.max, step)
    return BucketRange(min(step, most), step, most)


def merge_prompts(
    settings: BucketSettings, limits: StepLimits
) -> tuple[BucketSettings, tuple[str, ...]]:
    """Return settings for merged prefill, and log lines about the change.

    All prompts of a batch are concatenated into one sequence, so only the length varies.
    """
    old_bs, old_seq = settings.prompt_bs, settings.prompt_seq
    longest = min(old_bs.max * old_seq.max, limits.max_num_batched_tokens)
    bs, seq = BucketRange(1, 1, 1), BucketRange(min(old_seq.min, longest), old_seq.step, longest)
    return replace(settings, prompt_bs=bs, prompt_seq=seq), (
        "Merged prefill is enabled!",
        "Overriding prompt bucketing settings!",
        f"prompt bs cfg: {old_bs} -> {bs}",
        f"prompt seq cfg: {old_seq} -> {seq}",
    )


def _default_ranges(limits: StepLimits) -> dict[str, BucketRange]:
    seqs, block = limits.max_num_seqs, limits.block_size
    step = min(seqs, 32)
    longest = min(1024, round_up(limits.max_model_len, block))
    return {
        "PROMPT_BS": BucketRange(1, step, min(seqs, 64)),
        "PROMPT_SEQ": BucketRange(min(block, longest), block, longest),
        "DECODE_BS": BucketRange(1, step, seqs),
        "DECODE_BLOCK": BucketRange(block, block, max(128, seqs * 2048 // block)),
    }


def _name(key: str, part: str) -> str:
    return f"VLLM_{key}_BUCKET_{part}"


def resolve_range(key: str, default: BucketRange, values: Mapping[str, int]) -> BucketRange:
    """Return the range of one dimension: values that are set, by variable, and defaults.

    Raises:
        ConfigError: a minimum that was set is above a maximum that was set.
    """
    low_name, step_name, high_name = (_name(key, part) for part in ("MIN", "STEP", "MAX"))
    low, high = values.get(low_name), values.get(high_name)
    if low is not None and high is not None and low > high:
        raise ConfigError(
            f"{low_name}={low} is greater than {high_name}={high}. Lower the first or raise the "
            f"second. {_UNSET_HINT}"
        )
    if high is None:
        high = max(default.max, low or 0)
    if low is None:
        low = min(default.min, high)
    return BucketRange(low, values.get(step_name, default.step), high)


def check_num_steps(key: str, low: int, step: int, high: int, most: int = _MAX_SIZES) -> None:
    """Check the number of steps of a range before its sizes are made.

    Args:
        key: dimension, such as PROMPT_BS.
        low, step, high: the range.
        most: limit.

    Raises:
        ConfigError: there are more.
    """
    if (high - low) // step > most:
        _, step_name, high_name = (_name(key, part) for part in ("MIN", "STEP", "MAX"))
        raise ConfigError(
            f"{high_name}={high} with {step_name}={step} gives {(high - low) // step} steps, and "
            f"at most {most} are accepted. Lower the first (by default, it follows flags such as "
            f"--max-num-seqs and --max-model-len) or raise the second"
        )


def check_combinations(phase: str, *sizes: int) -> None:
    """Check the number of buckets before they are made.

    Args:
        phase: prefix of the variables: PROMPT or DECODE.
        sizes: numbers of sizes of the dimensions.

    Raises:
        ConfigError: there are more than anyone compiles.
    """
    if prod(sizes) > _MAX_BUCKETS:
        raise ConfigError(
            f"the variables VLLM_{phase}_*_BUCKET_* give {' x '.join(map(str, sizes))} buckets, "
            f"and each one is compiled; at most {_MAX_BUCKETS} are accepted. Raise their steps or "
            f"lower their maximums"
        )
