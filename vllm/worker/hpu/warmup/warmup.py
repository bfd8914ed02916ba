"""Runs every padded shape once, before the first request needs it.

The order is:

1. the image encoder;
2. decodes that read longer slices of the cache than the profiling run has measured, the smallest
   first, so that the memory of larger ones can be predicted;
3. prompts, then decodes, the largest first, each in the same way as in real steps;
4. with HPU graphs, their capture, in the configured order and up to the configured memory.

If the bridge supports it, all shapes are compiled without running, and then each runs once. Only
running shows how much memory a shape takes, and a first run is slower than later ones. A shape that
does not fit in memory is given up with a warning. Batches that would have used it are padded to a
larger shape or split.

Each forward pass is a step. The caller decides when a step runs. With several ranks it also decides
whether the shape is kept, so that all ranks take the same steps.
"""

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from functools import partial
from typing import Protocol

import msgspec
import torch
from tqdm import tqdm

from vllm.bucketing import Bucket, MemoryLedger, Phase, StepLimits, format_bytes
from vllm.bucketing.catalog.capture_plan import Capture, CaptureStep, PhaseGraphs, capture_graphs
from vllm.bucketing.catalog.catalog import Catalog, padded_cost
from vllm.bucketing.catalog.shrink import shrink_launches
from vllm.bucketing.ledger import GRAPHS, MemoryClass, assign_graphs
from vllm.bucketing.log_lines import (
    captured_line,
    encoder_graphs_line,
    encoder_line,
    graph_memory_line,
    warmup_finished_line,
    warmup_line,
)
from vllm.config import VllmConfig
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.worker.hpu.launches.execution import GraphExecution
from vllm.worker.hpu.launches.launches import PaddedRunner, Sampling
from vllm.worker.hpu.launches.planner import PaddedShape
from vllm.worker.hpu.memory.memory_forecast import MemoryForecast
from vllm.worker.hpu.memory.memory_profile import Attempt, attempt, used_bytes
from vllm.worker.hpu.warmup.profile import held_bytes
from vllm.worker.hpu.warmup.warmup_estimate import Kind, Stage, WarmUpEstimate, Work
from vllm.worker.interface import WarmUpStep, WarmUpUpdate

logger = init_logger(__name__)

_Steps = Generator[WarmUpStep, str | None, None]
"""Names a step, and is told afterwards why it is given up (None: it is kept)."""

ChooseFirst = Callable[[Catalog, StepLimits], Sequence[Bucket]]


class WarmedEncoder(Protocol):
    """An encoder of images or sounds that the warm-up can run.

    Attributes:
        sizes: sizes of forward passes, ascending, in units.
    """

    sizes: tuple[int, ...]

    @property
    def reads(self) -> str:
        """The kind of items that the encoder reads, for messages."""
        ...

    @property
    def unit(self) -> str:
        """The name of the unit of sizes, for messages."""
        ...

    def warm_up(self, size: int) -> None:
        """Run a forward pass of padding."""
        ...

    def give_up(self, size: int, reason: str) -> None:
        """Disable a size."""
        ...

    def capture(self, size: int) -> None:
        """Capture the HPU graph of a size."""
        ...

    def release(self, size: int) -> None:
        """Discard the HPU graph of a size, if it has one."""
        ...


class WarmUp:
    """Warms up one runner at the start.

    Args:
        config: config of the engine.
        bridge: the card.
        runner: has its KV cache.
        catalog: buckets to warm up.
        limits: limits of a forward pass.
        ledger: has the memory budgets of forward passes and of graphs.
        forecast: knows the memory of the forward passes of the profiling run; None: there was none.
        encoder: encoder of images; None: the model reads text only.
        choose_first: chooses from all wanted buckets and the limits the buckets to warm up; the
            others are left for later. None: all of them.
        on_disk: buckets whose recipes need not be compiled.

    Attributes:
        wanted: all buckets except the ones that were given up.
        catalog: the part of them that is warmed up.
        limits: limits of a forward pass, as memory allows.
        on_disk: the argument.
        batches: padded batch sizes whose sampling has run.
        estimate: knows how long each kind of forward pass takes.
    """

    def __init__(
        self,
        config: VllmConfig,
        bridge: HabanaBridge,
        runner: PaddedRunner,
        catalog: Catalog,
        limits: StepLimits,
        ledger: MemoryLedger,
        forecast: MemoryForecast | None = None,
        encoder: WarmedEncoder | None = None,
        choose_first: ChooseFirst | None = None,
        on_disk: Collection[Bucket] = (),
    ) -> None:
        self._config = config
        self._bridge = bridge
        self._runner = runner
        self._launches = runner.launches
        self._choose_first = choose_first
        self.on_disk = on_disk
        self.wanted, self.limits = catalog, limits
        self.catalog = self._choose_catalog()
        self._ledger = ledger
        self._held_bytes = held_bytes(config)
        self._forecast = MemoryForecast() if forecast is None else forecast
        self._encoder = encoder
        self._encoder_sizes = [] if encoder is None else list(encoder.sizes)
        """Sizes of the forward passes of the encoder that have not run, ascending."""
        self._given_up: list[Bucket] = []
        self.batches: set[int] = set()
        self._compiled: set[Bucket] = set()
        # Without recipes (operator by operator), running a launch is also what compiles it.
        self._compiles_first = runner.launches.execution.has_recipes and bridge.can_compile_only
        self._captured: set[Bucket] = set()
        """Buckets that have their graphs."""
        self.estimate = WarmUpEstimate()
        self._eta_s: float | None = None
        """Predicted seconds of the step that was named last."""
        self._steps = self._all_steps()
        self._launch: Callable[[], str | None] | None = None
        """Runs the step that was named last."""
        self._needed_bytes = 0
        """Memory that launches need at a time, the last one included."""
        self._passing_bytes = 0
        """Memory of a launch in addition to the workspace."""
        self._kept_bytes = 0
        """Bytes of the workspace that remain in use between forward passes."""
        self._used_bytes: int | None = None
        """Memory that the last graph has taken; None: it was not captured."""

    def next_warm_up(self, update: WarmUpUpdate) -> WarmUpStep | None:
        """Finish the last step, and return the next one; see `Worker.next_warm_up`.

        Raises:
            ConfigError: the memory does not hold even the smallest shapes.
        """
        self.estimate.end(has_run=self._launch is None, seconds=update.seconds)
        try:
            step = self._steps.send(update.given_up)
        except StopIteration:
            return None
        return msgspec.structs.replace(step, eta_seconds=self._eta_s)

    def warm_up(self) -> str | None:
        """Run the forward pass of the step; return why it has to be given up, or None."""
        assert self._launch is not None, "no step has been named"
        launch, self._launch = self._launch, None
        with torch.inference_mode():
            return launch()

    def _all_steps(self) -> _Steps:
        started, free_before = time.perf_counter(), self._bridge.memory_info().free_bytes
        self._launches.allow_buckets(len(self.wanted))
        self._book_workspace(0)
        self.estimate.plan(self._work_left())
        if self._encoder is not None:
            yield from self._encode(self._encoder)
        # Decodes that read longer slices of the cache than the profiling run did. The smallest one
        # runs first, because the larger ones are predicted from it.
        yield from self._launch_each("decode slices", self._long_slices)
        if self._compiles_first:
            for phase in Phase:
                yield from self._compile(phase)
        self._compiles_first = False
        self.batches.clear()
        for phase in Phase:
            yield from self._launch_once(phase)
        if self._has_graphs:
            yield from self._capture()
            if self._encoder is not None:
                yield from self._capture_encoder(self._encoder)
        seconds = time.perf_counter() - started
        allocated = free_before - self._bridge.memory_info().free_bytes
        logger.info(warmup_finished_line(seconds, allocated))
        self._launches.finish_warmup()

    # ---- what is left ---------------------------------------------------------------------

    @property
    def _has_graphs(self) -> bool:
        return isinstance(self._launches.execution, GraphExecution)

    def _work_left(self) -> Iterator[Work]:
        """Yield every forward pass that is left of the warm-up, if nothing more is given up."""
        for size in self._encoder_sizes:
            yield _encoder_work(size)
        batches, slices = set(self.batches), self._long_slices()
        yield from self._work_of("compile", slices, batches)
        done = self._compiled.union(slices)
        if self._compiles_first:
            for phase in Phase:
                pending = [b for b in self._pending(phase) if b not in done]
                yield from self._work_of("compile", pending[::-1], batches)
            batches.clear()
        done = set(slices)
        for phase in Phase:
            pending = [b for b in self._pending(phase) if b not in done]
            for bucket in reversed(pending):
                yield from self._work_of(self._stage_of(bucket), [bucket], batches)
        if self._has_graphs:
            yield from self._graphs_left(self.catalog.prefill)
            yield from self._graphs_left(self.catalog.decode)
            if self._encoder is not None:
                yield from (_encoder_work(size, "capture") for size in self._encoder.sizes)

    def _work_of(
        self, stage: Stage, buckets: Sequence[Bucket], batches: set[int]
    ) -> Iterator[Work]:
        """Yield the forward passes of buckets in this order, and note the batch sizes that sample.

        `batches` is updated.
        """
        for bucket in buckets:
            for shape in self._shapes(bucket):
                yield self._work(stage, shape, samples=shape.num_rows not in batches)
                batches.add(shape.num_rows)

    def _graphs_left(self, buckets: Sequence[Bucket]) -> Iterator[Work]:
        for bucket in buckets:
            if bucket not in self._captured:
                yield from self._capture_work(bucket)

    def _capture_work(self, bucket: Bucket) -> list[Work]:
        return [self._work("capture", shape, samples=False) for shape in self._shapes(bucket)]

    def _work(self, stage: Stage, shape: PaddedShape, *, samples: bool) -> Work:
        if stage == "compile" and shape.bucket in self.on_disk:
            stage = "load"
        return Work(Kind(stage, shape.bucket.phase, samples), shape.cost)

    def _stage_of(self, bucket: Bucket) -> Stage:
        """Return whether the next forward pass of a bucket compiles it ("compile") or not
        ("run").
        """
        will_be = self._compiles_first and not self._is_long_slice(bucket)
        return "run" if will_be or bucket in self._compiled else "compile"

    # ---- the encoder of images ------------------------------------------------------------

    def _encode(self, encoder: WarmedEncoder) -> _Steps:
        """Run the encoder in each size, the largest first, as a smaller one needs no more
        memory.
        """
        total = len(self._encoder_sizes)
        for index, size in enumerate(reversed(encoder.sizes), start=1):
            self._eta_s = self.estimate.begin([_encoder_work(size)])
            name = f"{size} {encoder.unit}"
            line = encoder_line(index, total, name, self._free_bytes())
            self._launch = partial(_logged, line, partial(self._encode_padding, encoder, size))
            given_up = yield WarmUpStep(
                phase=f"warm-up: encoder of {encoder.reads}", name=name, index=index, total=total
            )
            self._encoder_sizes.remove(size)
            if given_up is not None:
                encoder.give_up(size, given_up)
        self._book_workspace(0)

    def _encode_padding(self, encoder: WarmedEncoder, size: int) -> str | None:
        """Run a forward pass of the encoder; return the reason to give it up, or None."""
        with self._bridge.dry_run():
            attempted = attempt(
                self._bridge, partial(encoder.warm_up, size), self._resident_bytes()
            )
        if attempted.refused_bytes is None:
            return None
        return f"it needs at least {format_bytes(attempted.needed_bytes)}, but less is left"

    # ---- phase 1 --------------------------------------------------------------------------

    def _compile(self, phase: Phase) -> _Steps:
        """Compile every bucket of a phase. The set of buckets may change while this runs."""
        done = 0
        with progress_bar(phase) as bar:
            while pending := [b for b in self._pending(phase) if b not in self._compiled]:
                bucket, total = pending[-1], done + len(pending)
                step = _step(f"warm-up: {phase!s} buckets", bucket, done + 1, total)
                line = self._line(bucket, done + 1, total)
                given_up = yield from self._run_bucket(
                    bucket, step, line, "compile", self._compile_shape
                )
                self._compiled.add(bucket)
                if given_up is not None:
                    self._give_up(bucket)
                done += 1
                bar.total = total
                bar.update()

    def _launch_once(self, phase: Phase) -> _Steps:
        """Run every bucket of a phase, the largest first.

        This compiles the buckets that are not compiled yet.
        """
        yield from self._launch_each(f"{phase!s} launches", lambda: self._pending(phase)[::-1])

    def _launch_each(self, what: str, pending_buckets: Callable[[], list[Bucket]]) -> _Steps:
        """Run the first of the pending buckets until none is left."""
        done = 0
        while pending := pending_buckets():
            bucket, total = pending[0], done + len(pending)
            step = _step(f"warm-up: {what}", bucket, done + 1, total)
            is_new = bucket not in self._compiled
            line = self._line(bucket, done + 1, total) if is_new else None
            stage = self._stage_of(bucket)
            given_up = yield from self._run_bucket(bucket, step, line, stage, self._launch_shape)
            if given_up is None:
                self.catalog.mark_warmed([bucket])
                self._launches.report.mark_warmed(
                    bucket.phase, bucket.batch, bucket.query_len, bucket.blocks
                )
            else:
                self._give_up(bucket)
            done += 1

    def _long_slices(self) -> list[Bucket]:
        """Return the pending decodes that read long slices of the cache, ascending."""
        pending = [b for b in self._pending(Phase.DECODE) if self._is_long_slice(b)]
        return sorted(pending, key=lambda bucket: (padded_cost(bucket), bucket))

    def _is_long_slice(self, bucket: Bucket) -> bool:
        """Return whether a decode reads more blocks than the decodes of the profiling run.

        The result is the same on all ranks, as it depends only on the config.
        """
        most = self._forecast.max_blocks
        is_long = most is not None and bucket.blocks > most
        return is_long and self.limits.contiguous_pa and bucket.phase is Phase.DECODE

    def _line(self, bucket: Bucket, index: int, total: int) -> str:
        return warmup_line(bucket.phase, index, total, bucket, self._free_bytes())

    def _run_bucket(
        self,
        bucket: Bucket,
        step: WarmUpStep,
        line: str | None,
        stage: Stage,
        run: Callable[[PaddedShape], str | None],
    ) -> Generator[WarmUpStep, str | None, str | None]:
        """Run all forward passes of a bucket; return why they are given up, or None."""
        for shape in self._shapes(bucket):
            self._needed_bytes = 0
            samples = shape.num_rows not in self.batches
            self._eta_s = self.estimate.begin([self._work(stage, shape, samples=samples)])
            step = msgspec.structs.replace(step, given_up=self._predict(shape))
            self._launch = partial(_logged, line, partial(run, shape))
            given_up = yield step
            self._book_workspace(0 if given_up else self._needed_bytes)
            if given_up is not None:
                logger.warning("The bucket %s is not used: %s", _name(bucket), given_up)
                return given_up
            self.batches.add(shape.num_rows)
            line = None
        return None

    def _compile_shape(self, shape: PaddedShape) -> str | None:
        """Compile a shape; return why it is given up, or None.

        It is given up if there is no memory even for its outputs.
        """
        with self._bridge.compile_only():
            attempted = self._attempt(shape)
        return self._refusal(attempted) if attempted.refused_bytes is not None else None

    def _launch_shape(self, shape: PaddedShape) -> str | None:
        """Run a shape; return why it is given up, or None.

        It is given up if it needs more memory than there will be.
        """
        with self._bridge.dry_run():
            attempted = self._attempt(shape)
        passing = max(self._passing_bytes, attempted.passing_bytes)
        self._needed_bytes = attempted.kept_bytes + passing + self._held_bytes
        if attempted.refused_bytes is not None or self._needed_bytes > self._launch_bytes():
            return self._refusal(attempted)
        self._passing_bytes = passing
        self._forecast.add(shape, attempted)
        return None

    def _predict(self, shape: PaddedShape) -> str | None:
        """Return the reason not to try a shape, predicted from smaller ones; None: it may fit."""
        max_bytes = self._launch_bytes()
        needed_bytes = self._forecast.exceeds(shape, max_bytes - self._held_bytes)
        if needed_bytes is None:
            return None
        needed = format_bytes(needed_bytes + self._held_bytes)
        return (
            f"a forward pass takes at least {needed}, as predicted from smaller ones, but only "
            f"{format_bytes(max_bytes)} are reserved for forward passes"
        )

    def _attempt(self, shape: PaddedShape) -> Attempt:
        sampling: Sampling = "none" if shape.num_rows in self.batches else "warm_up"
        launch = partial(self._runner.warm_up, shape, sampling=sampling)
        return attempt(self._bridge, launch, self._resident_bytes(), self._launches.peers)

    def _refusal(self, attempted: Attempt) -> str:
        at_least = "at least " if attempted.refused_bytes is not None else ""
        own = attempted.needed_bytes + self._held_bytes
        needed = format_bytes(max(own, self._needed_bytes))
        there_is = format_bytes(self._launch_bytes())
        return (
            f"a forward pass takes {at_least}{needed}, but only {there_is} are reserved for "
            "forward passes"
        )

    def _pending(self, phase: Phase) -> list[Bucket]:
        """Return the buckets that have not run yet, ascending."""
        buckets = self.catalog.prefill if phase is Phase.PREFILL else self.catalog.decode
        return [bucket for bucket in buckets if not self.catalog.is_warmed(bucket)]

    def _book_workspace(self, needed_bytes: int) -> None:
        """Reserve memory for forward passes that need more than in the profiling run.

        The memory is taken from graphs, and also from the margin if a card has allocated more and
        does not free it.
        """
        ledger, workspace = self._ledger, MemoryClass.WORKSPACE
        self._kept_bytes = max(0, used_bytes(self._bridge) - self._resident_bytes())
        if self._kept_bytes:
            own = self._kept_bytes + self._passing_bytes + self._held_bytes
            needed_bytes = max(needed_bytes, own)
        more = needed_bytes - ledger.booked(workspace)
        if more <= 0:
            return
        for cls in GRAPHS:
            lacking = max(0, more - ledger.unassigned_bytes)
            ledger.assign(cls, ledger.budget(cls) - min(lacking, ledger.left(cls)))
        margin = min(max(0, more - ledger.unassigned_bytes), ledger.booked(MemoryClass.MARGIN))
        ledger.release(MemoryClass.MARGIN, margin)
        ledger.assign(MemoryClass.MARGIN, ledger.budget(MemoryClass.MARGIN) - margin)
        more = min(more, ledger.unassigned_bytes)
        ledger.assign(workspace, ledger.budget(workspace) + more)
        ledger.book(workspace, more)

    def _resident_bytes(self) -> int:
        """Return the bytes that are in use independent of forward passes."""
        held = (MemoryClass.WEIGHTS, MemoryClass.KV_CACHE, *GRAPHS)
        return sum(self._ledger.booked(cls) for cls in held)

    def _launch_bytes(self) -> int:
        """Return the bytes that forward passes can have at most, if no graph is captured."""
        ledger = self._ledger
        graphs = sum(ledger.left(cls) for cls in GRAPHS)
        return ledger.booked(MemoryClass.WORKSPACE) + ledger.unassigned_bytes + graphs

    def _give_up(self, bucket: Bucket) -> None:
        """Drop a bucket; steps that need it use smaller forward passes."""
        self._given_up.append(bucket)
        was_sliced = self.limits.contiguous_pa
        found = shrink_launches(self.wanted.without([bucket]), self.limits, self._given_up)
        if found is None:
            raise ConfigError(
                f"out of device memory: no {bucket.phase!s} bucket fits, not even the last one "
                f"tried, {_name(bucket)}. Lower --gpu-memory-utilization "
                f"({self._config.cache.gpu_memory_utilization}), which sizes the KV cache, or "
                f"--max-model-len ({self._config.scheduler.max_model_len})"
            )
        self.wanted, self.limits = found
        warmed = self.catalog.warmed
        if was_sliced and not self.limits.contiguous_pa:
            # No decode has run in its other shape yet, so all of them are warmed up again.
            decodes = self.wanted.decode
            self.wanted = self.wanted.without(decodes).with_buckets(decodes)
            warmed = frozenset(b for b in warmed if b.phase is Phase.PREFILL)
        self.catalog = self._choose_catalog()
        self.catalog.mark_warmed(b for b in warmed if b in self.catalog)
        self._launches.allow_buckets(len(self.wanted) + len(self._given_up))
        self._launches.use_catalog(self.catalog, self.limits)
        self.estimate.plan(self._work_left())

    def _choose_catalog(self) -> Catalog:
        """Return the catalog of the buckets that are warmed up now."""
        if self._choose_first is None:
            return self.wanted
        first = set(self._choose_first(self.wanted, self.limits))
        self.wanted = self.wanted.with_buckets(first)
        every = (*self.wanted.prefill, *self.wanted.decode)
        return self.wanted.without(bucket for bucket in every if bucket not in first)

    # ---- phase 2 --------------------------------------------------------------------------

    def _capture(self) -> _Steps:
        hpu, ledger = self._config.hpu, self._ledger
        prompt, decode = self._assign_graphs()
        logger.info(
            graph_memory_line(
                prompt + decode, self._free_bytes(), prompt, decode, hpu.graph_prompt_ratio
            )
        )
        plan = capture_graphs(
            self.catalog.prefill,
            self.catalog.decode,
            ledger,
            prefill_order=hpu.graph_prompt_strategy,
            decode_order=hpu.graph_decode_strategy,
        )
        capture: Capture | None = None
        last_index = dict.fromkeys(Phase, 0)
        while True:
            try:
                step = next(plan) if capture is None else plan.send(capture)
            except StopIteration as end:
                graphs: dict[Phase, PhaseGraphs] = end.value
                break
            if step.index <= last_index[step.phase]:
                # A second pass starts: buckets that did not fit may have memory now.
                catalog, phase = self.catalog, step.phase
                buckets = catalog.prefill if phase is Phase.PREFILL else catalog.decode
                self.estimate.add(self._graphs_left(buckets))
            last_index[step.phase] = step.index
            capture = yield from self._capture_one(step)
        for phase, result in graphs.items():
            _log_graphs(phase, result)

    def _assign_graphs(self) -> tuple[int, int]:
        """Assign all remaining memory except the margin to graphs: (bytes for prompts, for
        decodes).
        """
        left = self._free_bytes() - self._ledger.booked(MemoryClass.MARGIN)
        return assign_graphs(self._ledger, self._config.hpu.graph_prompt_ratio, left)

    def _capture_one(self, step: CaptureStep) -> Generator[WarmUpStep, str | None, Capture]:
        """Capture the graphs of a bucket, unless it has to be given up first."""
        self._used_bytes = None
        self._eta_s = self.estimate.begin(self._capture_work(step.bucket))
        self._launch = partial(self._capture_bucket, step)
        given_up = yield WarmUpStep(
            phase=f"warm-up: {step.phase!s} graphs",
            name=_name(step.bucket),
            index=step.index,
            total=step.total,
            given_up=step.refusal,
        )
        if given_up is not None:
            for shape in self._shapes(step.bucket):
                self._launches.release(shape)
        else:
            self._captured.add(step.bucket)
        return Capture(self._used_bytes, given_up)

    def _capture_bucket(self, step: CaptureStep) -> str | None:
        """Capture the graphs of a bucket; return why they need too much memory, or None."""
        free_bytes, in_use = self._free_bytes(), used_bytes(self._bridge)
        logger.info(
            warmup_line(step.phase, step.index, step.total, step.bucket, free_bytes, graph=True)
        )
        for shape in self._shapes(step.bucket):
            capture = partial(self._capture_shape, shape)
            with self._bridge.dry_run():
                captured = attempt(self._bridge, capture, in_use, self._launches.peers)
            if captured.refused_bytes is not None:
                self._used_bytes = max(captured.needed_bytes, step.left_bytes + 1)
                return step.refusal_of(self._used_bytes)
        self._used_bytes = max(0, used_bytes(self._bridge) - in_use)
        return step.refusal_of(self._used_bytes)

    def _capture_encoder(self, encoder: WarmedEncoder) -> _Steps:
        """Capture the graphs of the encoder, the smallest first, in memory left over by other
        graphs.

        It is the memory left over by prompts, and by decodes if all of their graphs exist. Small
        forward passes come first because most of their time is work of the host, which a graph
        saves.
        """
        ledger, cls, decodes = self._ledger, MemoryClass.PREFILL_GRAPHS, MemoryClass.DECODE_GRAPHS
        if self._captured.issuperset(self.wanted.decode):
            ledger.move(decodes, cls, ledger.left(decodes))
        captured: list[int] = []
        used_before = ledger.booked(cls)
        for index, size in enumerate(encoder.sizes, start=1):
            used, left = ledger.booked(cls) - used_before, ledger.left(cls)
            expected = used * size // max(1, sum(captured))
            self._used_bytes = None
            self._eta_s = self.estimate.begin([_encoder_work(size, "capture")])
            self._launch = partial(self._capture_size, encoder, size, left)
            given_up = yield WarmUpStep(
                phase=f"warm-up: graphs of the encoder of {encoder.reads}",
                name=f"{size} {encoder.unit}",
                index=index,
                total=len(encoder.sizes),
                given_up=_refusal(expected, left) if left <= expected else None,
            )
            if given_up is not None:
                encoder.release(size)
                break
            assert self._used_bytes is not None and ledger.book(cls, self._used_bytes)
            captured.append(size)
        used = ledger.booked(cls) - used_before
        logger.info(encoder_graphs_line(captured, len(encoder.sizes), encoder.unit, used))

    def _capture_size(self, encoder: WarmedEncoder, size: int, left_bytes: int) -> str | None:
        """Capture a graph of the encoder; return why it needs too much memory, or None."""
        in_use = used_bytes(self._bridge)
        with self._bridge.dry_run():
            captured = attempt(self._bridge, partial(encoder.capture, size), in_use)
        self._used_bytes = max(0, used_bytes(self._bridge) - in_use)
        if captured.refused_bytes is not None:
            self._used_bytes = max(captured.needed_bytes, left_bytes + 1)
        return _refusal(self._used_bytes, left_bytes) if self._used_bytes > left_bytes else None

    def _capture_shape(self, shape: PaddedShape) -> None:
        self._launches.capture(shape)
        self._runner.warm_up(shape, sampling="none")

    def _shapes(self, bucket: Bucket) -> list[PaddedShape]:
        return self._launches.launch_shapes(bucket)

    def _free_bytes(self) -> int:
        """Return the free memory while the forward pass that needs the most of it runs."""
        to_come = self._ledger.booked(MemoryClass.WORKSPACE) - self._kept_bytes
        return self._bridge.memory_info().free_bytes - max(0, to_come)


def _logged(line: str | None, launch: Callable[[], str | None]) -> str | None:
    if line is not None:
        logger.info(line)
    return launch()


def _encoder_work(size: int, stage: Stage = "compile") -> Work:
    return Work(Kind(stage, "encoder", samples=False), size)


def _refusal(needed_bytes: int, left_bytes: int) -> str:
    return f"it takes {format_bytes(needed_bytes)}, but only {format_bytes(left_bytes)} are left"


def _step(phase: str, bucket: Bucket, index: int, total: int) -> WarmUpStep:
    return WarmUpStep(phase=phase, name=_name(bucket), index=index, total=total)


def _name(bucket: Bucket) -> str:
    return f"{bucket.phase!s} {(bucket.batch, bucket.query_len, bucket.blocks)}"


def progress_bar(phase: Phase) -> "tqdm[Bucket]":
    """Make a progress bar, which is shown only on a terminal."""
    name = "Prompt" if phase is Phase.PREFILL else "Decode"
    bar: Callable[..., tqdm[Bucket]] = tqdm
    return bar(
        desc=f"{name} warm-up",
        total=0,
        unit="bucket",
        disable=None,
        leave=False,
        # No time estimate in the bar itself: the log has one estimate for the whole start.
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}]",
    )


def _log_graphs(phase: Phase, result: PhaseGraphs) -> None:
    for omitted in result.omitted:
        logger.info("%s", omitted)
    logger.info(captured_line(phase, result.captured, result.total, result.used_bytes))
