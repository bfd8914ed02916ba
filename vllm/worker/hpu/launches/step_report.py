"""Reports avoidable costs of a step: compilations, operators on the host, unexpected shapes.

The lines contain the words that users of the Gaudi stack grep for, at level WARNING. A report makes
the host wait for the device after each step, so it is off by default.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from vllm.bucketing.bucket import Bucket, Phase
from vllm.config.hpu import StepLog
from vllm.cost_model.padded import forward_seconds
from vllm.logger import init_logger
from vllm.messages import LAUNCH_FIELDS
from vllm.platforms.habana.bridge import DeviceCounters, HabanaBridge

logger = init_logger(__name__)

_CONTEXT_LEN_OF_NO_ROWS = 128
_MIN_READ_INTERVAL_S = 1.0
"""The bridge makes a list of everything it has compiled to tell how much that was."""
_OFF = nullcontext()
_Stats = list[tuple[str, object]]


@dataclass(frozen=True, slots=True)
class StepShape:
    """The size of a step, as a report shows it."""

    is_prompt: bool
    """Whether any row is in its prompt."""
    num_seqs: int
    max_context_len: int
    """Longest row in tokens, prompt and output."""
    block_size: int

    @classmethod
    def of(cls, seq_lens: Sequence[int], block_size: int, *, is_prompt: bool) -> "StepShape":
        """Return the shape of requests with these lengths in tokens; a step without requests has
        128."""
        longest = max(seq_lens, default=_CONTEXT_LEN_OF_NO_ROWS)
        return cls(is_prompt, len(seq_lens), longest, block_size)

    def __str__(self) -> str:
        max_num_blocks = (self.max_context_len - 1) // self.block_size + 1
        return (
            f"is_prompt: {self.is_prompt}, num_seqs: {self.num_seqs}, "
            f"max_context_len: {self.max_context_len}, max_num_blocks {max_num_blocks}"
        )


class RecentLaunches:
    """Sizes and times of the forward passes of the last two steps that have ended.

    Only the process that collects metrics counts them by size, so that a step need not do it.

    Args:
        clock: clock that counts seconds, of the device; None: steps are not timed.
        block_size: tokens of a KV block.

    Attributes:
        num_decode_blocks: KV blocks that decodes had to read.
        num_padded_blocks: KV blocks of padding that they read as well.
        record: record of `RunnerStats`; it is replaced and never changed, so any thread may read
            it.
    """

    def __init__(self, clock: Callable[[], float] | None, block_size: int) -> None:
        self.num_decode_blocks = 0
        self.num_padded_blocks = 0
        self.record: tuple[int, ...] = ()
        self._clock, self._block_size = clock or _no_clock, block_size
        self._steps: deque[tuple[float, list[int]]] = deque()
        """When each step began that has not ended, and values of its forward passes as in
        `record`; the oldest first."""
        self._passes: list[int] = []
        """Values of the forward passes of the newest step."""
        self._num_passes = 0
        self._before: list[int] = []
        """Values of the last step in `record`."""
        self._ended = 0.0
        """When the last step has ended."""

    def begin_step(self) -> None:
        """Note that a step begins."""
        passes: list[int] = []
        self._passes = passes
        self._steps.append((self._clock(), passes))

    def add(self, needed: tuple[int, int, int], bucket: Bucket, *, is_compiled: bool) -> None:
        """Record a forward pass of the step that has begun last.

        Args:
            needed: batch, query length and blocks without padding.
            bucket: bucket to which the forward pass is padded.
            is_compiled: nothing is compiled while it runs.
        """
        batch, query_len, blocks = needed
        phase, padded = 0, bucket.blocks
        if bucket.phase is Phase.DECODE:
            phase = 1
            self.num_decode_blocks += blocks
            self.num_padded_blocks += padded - blocks
        # The last value is replaced by microseconds when the step ends, unless it is 0.
        self._passes += (
            phase, batch, query_len, blocks,
            bucket.batch, bucket.query_len, padded, is_compiled,
        )  # fmt: skip

    def end_step(self) -> None:
        """Note that the oldest step has ended, and divide its time over its forward passes.

        It ran since the previous step ended, or since it began if that was later. The time is
        divided in proportion to predicted times.
        """
        began, passes = self._steps.popleft()
        now = self._clock()
        micros = 1e6 * (now - max(began, self._ended))
        self._ended = now
        if not passes:
            return
        if len(passes) == LAUNCH_FIELDS:
            passes[-1] = round(micros) if passes[-1] else 0
        else:
            self._divide(micros, passes)
        self._num_passes += len(passes) // LAUNCH_FIELDS
        self.record = (self._num_passes, *self._before, *passes)
        self._before = passes

    def _divide(self, micros: float, passes: list[int]) -> None:
        """Divide the microseconds of a step over its forward passes; 0 if one of them compiled."""
        size, starts = self._block_size, range(0, len(passes), LAUNCH_FIELDS)
        is_compiled = all(passes[LAUNCH_FIELDS - 1 :: LAUNCH_FIELDS])
        expected = [
            forward_seconds(passes[i], passes[i + 4], passes[i + 5], passes[i + 6], size)
            for i in starts
        ]
        for start, seconds in zip(starts, expected, strict=True):
            share = seconds / sum(expected) if is_compiled else 0.0
            passes[start + LAUNCH_FIELDS - 1] = round(share * micros)


def _no_clock() -> float:
    """Return 0, so that all times are 0."""
    return 0.0


class StepReport:
    """Writes the reports of one worker's steps to the log.

    Args:
        bridge: whose counters are read.
        log_compilations: which steps report their graph compilations.
        log_fallbacks: which steps report their operators that ran on the host.
        log_recipes: a report of compilations lists recipes, as far as the bridge supports it.

    Attributes:
        num_hits: forward passes of a known shape.
        num_misses: forward passes of an unknown shape; it is known from then on.
    """

    def __init__(
        self,
        bridge: HabanaBridge,
        log_compilations: StepLog = "off",
        log_fallbacks: StepLog = "off",
        *,
        log_recipes: bool = False,
    ) -> None:
        self._bridge = bridge
        self._log_compilations = log_compilations
        self._log_fallbacks = log_fallbacks
        self._log_recipes = log_recipes
        self._known: set[tuple[Phase, int, int, int]] = set()
        self._warmup_compilations: int | None = None
        self._recent_compilations = 0
        self._next_read = 0.0
        self.num_hits = 0
        self.num_misses = 0

    @property
    def is_on(self) -> bool:
        """Whether steps are reported."""
        return self._log_compilations != "off" or self._log_fallbacks != "off"

    def step(self, describe: Callable[[], StepShape]) -> AbstractContextManager[None]:
        """Report the step that runs in this context, after it ends; a step that raises is not
        reported.

        If reports are on, leaving the context waits for the device, so that running compilations
        are counted.

        Args:
            describe: called on entering, and only when a report is on.
        """
        return self._measured(describe()) if self.is_on else _OFF

    @contextmanager
    def _measured(self, shape: StepShape) -> Iterator[None]:
        before = self._bridge.counters()
        yield
        self._bridge.synchronize()
        after = self._bridge.counters()
        num_compiled, compiled = _compilation_stats(before, after)
        if self._log_recipes:
            compiled.append(("recipe", list(after.recipes[len(before.recipes) :])))
        for tag, mode, (count, stats) in (
            ("GRAPH_COMPILATION", self._log_compilations, (num_compiled, compiled)),
            ("CPU_FALLBACK", self._log_fallbacks, _fallback_stats(before, after)),
        ):
            if mode == "all" or (mode == "some" and count):
                logger.warning("VLLM_HPU_STEP_%s: %s, %s", tag, stats, shape)

    def mark_warmed(self, phase: Phase, batch: int, query_len: int, blocks: int) -> None:
        """Note that the warm-up has run this shape."""
        self._known.add((phase, batch, query_len, blocks))

    def check_warmed(self, phase: Phase, batch: int, query_len: int, blocks: int) -> bool:
        """Return whether a padded shape is known. If not, warn once; it is known from then on."""
        shape = (phase, batch, query_len, blocks)
        if shape in self._known:
            self.num_hits += 1
            return True
        self.num_misses += 1
        self._next_read = 0.0
        self._known.add(shape)
        logger.warning(not_warmed_line(phase, batch, query_len, blocks))
        return False

    def miss_sampling(self, batch: int, stages: Sequence[tuple[str, int]]) -> None:
        """Warn that stages of the sampler, with these sizes, are compiled now."""
        self.num_misses += 1
        self._next_read = 0.0
        for name, size in stages:
            logger.warning(
                "Configuration: (sampling, %d, %s, %d) was not warmed-up!", batch, name, size
            )

    def finish_warmup(self) -> None:
        """Start to count compilations for `compilations_after_warmup`."""
        self._bridge.synchronize()
        self._warmup_compilations = self._bridge.counters().compilations

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Exclude compilations in this context from the count, as part of a later warm-up."""
        before = self._bridge.counters().compilations
        yield
        self._bridge.synchronize()
        if self._warmup_compilations is not None:
            self._warmup_compilations += self._bridge.counters().compilations - before

    def compilations_after_warmup(self) -> int:
        """Return the number of compilations since `finish_warmup`; 0 before it.

        It reads the counters of the device, so do not call it in every step.
        """
        if self._warmup_compilations is None:
            return 0
        return self._bridge.counters().compilations - self._warmup_compilations

    def recent_compilations(self) -> int:
        """Return `compilations_after_warmup`, at most a second old; cheap enough for every step."""
        now = time.monotonic()
        if now >= self._next_read:
            self._next_read = now + _MIN_READ_INTERVAL_S
            self._recent_compilations = self.compilations_after_warmup()
        return self._recent_compilations


def not_warmed_line(phase: Phase, batch: int, query_len: int, blocks: int) -> str:
    """Return a line such as `Configuration: (prompt, 1, 36864) was not warmed-up!`.

    A prompt with context also names its blocks: (prompt, batch, length, blocks). A decode is
    (decode, batch, blocks), with drafts (decode, batch, blocks, length).
    """
    if phase is Phase.DECODE:
        shape = f"decode, {batch}, {blocks}" + (f", {query_len}" if query_len > 1 else "")
    else:
        shape = f"prompt, {batch}, {query_len}" + (f", {blocks}" if blocks else "")
    return f"Configuration: ({shape}) was not warmed-up!"


def _compilation_stats(before: DeviceCounters, after: DeviceCounters) -> tuple[int, _Stats]:
    """Return the number of compilations, and their times in microseconds as in the bridge's
    metrics.
    """
    count = after.compilations - before.compilations
    total_us = round((after.compile_s - before.compile_s) * 1e6)
    average_us = total_us // count if count else 0
    return count, [("TotalNumber", count), ("TotalTime", total_us), ("AvgTime", average_us)]


def _fallback_stats(before: DeviceCounters, after: DeviceCounters) -> tuple[int, _Stats]:
    ops = {
        name: total - before.cpu_fallbacks.get(name, 0)
        for name, total in after.cpu_fallbacks.items()
        if total > before.cpu_fallbacks.get(name, 0)
    }
    count = sum(ops.values())
    return count, [("TotalNumber", count), ("FallbackOps", ops)]
