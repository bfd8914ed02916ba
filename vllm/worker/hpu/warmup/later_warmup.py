"""Warms up the buckets that the start has left out, one at a time, while the engine serves.

The engine asks for a step when no step of requests is in flight. A bucket is compiled, run and,
with HPU graphs, captured; only then is it used. Until then batches are padded to other buckets. The
next one is the bucket that saves the most device time for each second of warm-up, judged by the
traffic so far and by the times of similar forward passes. All ranks choose the same: they have seen
the same steps, and the engine tells them how long each part took.

Later the engine may want other buckets, for the traffic of the last hour. They are warmed up in the
same way; when all of them are in use, the buckets that they replace are disabled.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch

from vllm.bucketing import Bucket, MemoryLedger, Phase, format_bytes
from vllm.bucketing.catalog.capture_plan import GRAPH_CLASSES
from vllm.bucketing.catalog.catalog import Catalog
from vllm.bucketing.catalog.closure import prove, replacement
from vllm.bucketing.catalog.first_set import even_shapes, padded_share, savings
from vllm.bucketing.catalog.from_traffic import bucket_cost, seconds_of
from vllm.bucketing.traffic import TrafficTable
from vllm.logger import init_logger
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.worker.hpu.launches.execution import GraphExecution
from vllm.worker.hpu.launches.launches import PaddedRunner, Sampling
from vllm.worker.hpu.launches.planner import PaddedShape
from vllm.worker.hpu.memory.memory_forecast import MemoryForecast
from vllm.worker.hpu.memory.memory_profile import attempt, used_bytes
from vllm.worker.hpu.warmup.warmup import WarmUp
from vllm.worker.hpu.warmup.warmup_estimate import Kind, Stage, Work
from vllm.worker.interface import WarmUpStep, WarmUpUpdate

logger = init_logger(__name__)


_MIN_S = 1e-9
_RECOUNTED_AFTER = 16
"""Steps after which savings are counted again if no bucket was completed."""


class _Part(NamedTuple):
    """A forward pass that a bucket still needs, to compile, run or capture it."""

    stage: Stage
    shape: PaddedShape


class LaterWarmUp:
    """Warms up the remaining buckets of one runner while it serves.

    Args:
        bridge: the card.
        runner: the runner, after the warm-up at the start.
        start: the warm-up at the start.
        ledger: has the memory budgets of forward passes and of graphs.
        forecast: knows the memory of past forward passes.
        held_bytes: memory of results that are still to be read.
        traffic: traffic of the runner; it grows.
        on_warm: called with each bucket that is used from now on.
    """

    def __init__(
        self,
        bridge: HabanaBridge,
        runner: PaddedRunner,
        start: WarmUp,
        ledger: MemoryLedger,
        forecast: MemoryForecast,
        held_bytes: int,
        traffic: TrafficTable,
        on_warm: Callable[[Bucket], None] = lambda bucket: None,
    ) -> None:
        self._bridge = bridge
        self._runner = runner
        self._launches = runner.launches
        self._ledger = ledger
        self._forecast = forecast
        self._held_bytes = held_bytes
        self._traffic = traffic
        self._on_warm = on_warm
        self._estimate = start.estimate
        self._batches = start.batches
        self._on_disk = start.on_disk
        self._catalog = start.catalog
        self._limits = start.limits
        self._num_wanted = len(start.wanted)
        self._even = even_shapes(start.limits)
        self._cost = seconds_of(start.limits)
        execution = runner.launches.execution
        self._compiles_first = execution.has_recipes and bridge.can_compile_only
        self._left = {
            bucket: self._parts_of(bucket)
            for bucket in (*start.wanted.prefill, *start.wanted.decode)
            if bucket not in start.catalog
        }
        """Launches that each bucket still needs, in their order."""
        self._savings: dict[Bucket, float] = {}
        """Seconds that each bucket would save of the traffic."""
        self._padded_share: float | None = None
        self._num_named = _RECOUNTED_AFTER
        """Steps since savings were counted."""
        self._running: Bucket | None = None
        """Bucket of the step that was named last."""
        self._launch: Callable[[], str | None] | None = None
        self._used_bytes = 0
        """Memory that the last graph has taken."""
        self._graph_bytes: dict[PaddedShape, int] = {}
        """Memory of each graph of a bucket that is not in use yet."""
        self._every = {*start.wanted.prefill, *start.wanted.decode}
        """Buckets that have been wanted so far."""
        self._replaced: frozenset[Bucket] = frozenset()
        """Buckets in use that are not in the new set."""
        self._replacing: list[Bucket] = []
        """The new set of buckets, which may include present ones; empty: nothing is being
        replaced."""

    @property
    def left(self) -> list[Bucket]:
        """The buckets that are not in use yet."""
        return list(self._left)

    def replace(self, wanted: Iterable[Bucket], *, keeps_prompts: bool) -> bool:
        """Begin to warm up other buckets, which replace the present ones once all are warm.

        Args:
            wanted: buckets for the traffic. Present buckets that are needed for closure are kept.
            keeps_prompts: keep the present buckets of prompts.

        Returns:
            Whether any of them is not in use yet.
        """
        assert not self._left, "buckets are still being warmed up"
        present = self._catalog
        self._replacing = replacement(wanted, present, self._limits, keeps_prompts=keeps_prompts)
        self._left = {b: self._parts_of(b) for b in self._replacing if b not in present}
        if not self._left:
            self._replacing = []
            return False
        held = {*present.prefill, *present.decode}
        self._replaced = frozenset(held.difference(self._replacing))
        self._every.update(self._left)
        self._launches.allow_buckets(len(self._every))
        # Compare buckets by predicted seconds, the cost by which the wanted ones were chosen.
        self._catalog = Catalog(
            present.prefill, present.decode, bucket_cost(self._limits.block_size)
        )
        self._catalog.mark_warmed(present.warmed)
        self._launches.use_catalog(self._catalog, self._limits)
        self._launches.traffic = self._traffic
        self._num_wanted = len(self._replacing)
        self._num_named = _RECOUNTED_AFTER
        return True

    # ---- steps ----------------------------------------------------------------------------

    def next_warm_up(self, update: WarmUpUpdate) -> WarmUpStep | None:
        """Finish the last step, and return the next one; see `Worker.next_warm_up`."""
        if self._running is not None:
            has_run = self._launch is None
            self._estimate.end(has_run=has_run, seconds=update.seconds)
            if has_run or update.given_up is not None:
                self._finish(self._running, update.given_up)
            self._running = self._launch = None
        if not self._left:
            self._take_out_replaced()
            self._launches.traffic = None
            return None
        self._num_named += 1
        if self._num_named >= _RECOUNTED_AFTER:
            self._count_savings()
        expected = {
            bucket: [self._estimate.expect(self._work(part)) for part in parts]
            for bucket, parts in self._left.items()
        }
        needed = {bucket: sum(each) for bucket, each in expected.items()}
        limit_s = math.inf if update.longest_s is None else update.longest_s
        short = [b for b, each in expected.items() if each[0] <= limit_s]
        bucket = max(short or needed, key=lambda b: self._savings[b] / max(needed[b], _MIN_S))
        part, num_warm = self._left[bucket][0], self._num_wanted - len(self._left)
        step = WarmUpStep(
            phase=f"warm-up while serving: {bucket.phase!s} {part.stage}",
            name=f"{bucket.phase!s} {(bucket.batch, bucket.query_len, bucket.blocks)}",
            index=num_warm + 1,
            total=self._num_wanted,
            given_up=self._refuse(part) if short else None,
            eta_seconds=sum(needed.values()),
            expected_s=expected[bucket][0],
            must_wait=not short,
            num_warm=num_warm,
            num_wanted=self._num_wanted,
            padded_share=self._padded_share,
        )
        if short:
            self._running, self._launch = bucket, partial(self._run, part)
            self._estimate.begin([self._work(part)])
        return step

    def warm_up(self) -> str | None:
        """Run the forward pass of the step; return why it has to be given up, or None."""
        assert self._launch is not None, "no step has been named"
        launch, self._launch = self._launch, None
        with torch.inference_mode(), self._launches.report.warming_up():
            return launch()

    def _finish(self, bucket: Bucket, given_up: str | None) -> None:
        part = self._left[bucket].pop(0)
        if part.stage == "capture":
            if given_up is not None:
                self._launches.release(part.shape)
                if self._release_replaced(bucket.phase):
                    self._left[bucket].insert(0, part)  # try again: memory was released
                # If no memory was released, the bucket runs without a graph.
            else:
                self._ledger.book(GRAPH_CLASSES[bucket.phase], self._used_bytes)
                self._graph_bytes[part.shape] = self._used_bytes
        elif given_up is not None:
            self._give_up(bucket, given_up)
            return
        elif part.stage == "run":
            self._batches.add(part.shape.num_rows)
        if not self._left[bucket]:
            self._use(bucket)

    def _use(self, bucket: Bucket) -> None:
        """Use a bucket from now on, after all of its forward passes have run."""
        del self._left[bucket]
        for part in self._parts_of(bucket):
            self._graph_bytes.pop(part.shape, None)
        self._catalog = self._catalog.with_buckets([bucket])
        self._catalog.mark_warmed([bucket])
        self._launches.use_catalog(self._catalog, self._limits)
        self._launches.report.mark_warmed(
            bucket.phase, bucket.batch, bucket.query_len, bucket.blocks
        )
        self._count_savings()
        self._on_warm(bucket)
        if not self._left and not self._replacing:
            logger.info("All %d buckets are warmed up", len(self._catalog))

    def _give_up(self, bucket: Bucket, reason: str) -> None:
        """Give up a bucket and all larger ones."""
        lost = [other for other in self._left if other.covers(bucket)]
        self._num_wanted -= len(lost)
        for other in lost:
            for part in self._parts_of(other):
                if part.stage == "capture":
                    self._launches.release(part.shape)
                    booked = self._graph_bytes.pop(part.shape, 0)
                    self._ledger.release(GRAPH_CLASSES[other.phase], booked)
            del self._left[other]
        logger.warning(
            "%d buckets that are not warm yet are given up: %s. Smaller batches run instead. A "
            "lower --gpu-memory-utilization leaves more memory for forward passes",
            *(len(lost), reason),
        )

    # ---- buckets that are replaced --------------------------------------------------------

    def _release_replaced(self, phase: Phase) -> bool:
        """Discard a graph of a bucket that is to be replaced, to free memory for a new graph.

        Return whether there was one. All ranks discard the same graph.
        """
        graphs = [
            shape
            for shape in self._graph_shapes
            if shape.bucket in self._replaced and shape.bucket.phase is phase
        ]
        if graphs:
            # The graph that was captured last is needed least.
            self._release_graph(graphs[-1])
        return bool(graphs)

    def _release_graph(self, shape: PaddedShape) -> None:
        """Discard a graph, and release its memory in the ledger."""
        in_use, cls = used_bytes(self._bridge), GRAPH_CLASSES[shape.bucket.phase]
        self._launches.release(shape)
        freed = max(0, in_use - used_bytes(self._bridge))
        self._ledger.release(cls, min(freed, self._ledger.booked(cls)))

    def _take_out_replaced(self) -> None:
        """Disable the buckets that others have replaced."""
        if not self._replacing:
            return
        present, before = self._catalog, len(self._replaced)
        # Some of the buckets that replace others may have been given up.
        warm = [bucket for bucket in self._replacing if bucket in present]
        kept = replacement(warm, present, self._limits)
        self._replaced = self._replaced.difference(kept)
        catalog = present.without(self._replaced)
        report = prove(catalog, self._limits)
        assert report.is_covered, str(report)
        self._catalog = catalog
        self._launches.use_catalog(catalog, self._limits)
        for shape in self._graph_shapes:
            if shape.bucket in self._replaced:
                self._release_graph(shape)
        logger.info(
            "buckets: %d are in use now; %d of the %d earlier buckets are no longer used",
            *(len(catalog), len(self._replaced), before),
        )
        self._replaced, self._replacing = frozenset(), []

    # ---- what comes next ------------------------------------------------------------------

    def _parts_of(self, bucket: Bucket) -> list[_Part]:
        stages: list[Stage] = ["run"]
        if self._compiles_first:
            stages.insert(0, "compile")
        if self._has_graphs:
            stages.append("capture")
        shapes = self._launches.launch_shapes(bucket)
        return [_Part(stage, shape) for shape in shapes for stage in stages]

    def _work(self, part: _Part) -> Work:
        stage, shape = part
        samples = stage != "capture" and shape.num_rows not in self._batches
        # Without a compile-only mode, the first launch is what compiles.
        if stage == "run" and not self._compiles_first:
            stage = "compile"
        if stage == "compile" and shape.bucket in self._on_disk:
            stage = "load"
        return Work(Kind(stage, shape.bucket.phase, samples), shape.cost)

    def _count_savings(self) -> None:
        candidates = list(self._left)
        asked = [self._traffic.shapes_within(self._limits, phase) for phase in Phase]
        demand = [
            each if len(each[0]) else even for each, even in zip(asked, self._even, strict=True)
        ]
        found = savings(candidates, self._catalog, demand, self._cost)
        self._savings = dict(zip(candidates, found, strict=True))
        self._padded_share = padded_share(self._catalog, asked, self._cost)
        self._num_named = 0

    # ---- launches -------------------------------------------------------------------------

    @property
    def _has_graphs(self) -> bool:
        return isinstance(self._launches.execution, GraphExecution)

    def _refuse(self, part: _Part) -> str | None:
        """Return the reason not to try a forward pass; None: there may be enough memory."""
        if part.stage == "capture":
            cls = GRAPH_CLASSES[part.shape.bucket.phase]
            left = self._ledger.left(cls)
            graphs = sum(s.bucket.phase is part.shape.bucket.phase for s in self._graph_shapes)
            needed = self._ledger.booked(cls) // max(1, graphs)
            if needed < left or not graphs:
                return None
            return (
                f"a graph takes about {format_bytes(needed)}, but only {format_bytes(left)} are "
                "left"
            )
        max_bytes = self._ledger.launch_bytes
        needed_bytes = self._forecast.exceeds(part.shape, max_bytes - self._held_bytes)
        if needed_bytes is None:
            return None
        return self._too_much(needed_bytes, max_bytes)

    @property
    def _graph_shapes(self) -> list[PaddedShape]:
        """The shapes that have a graph, in the order of their capture."""
        execution = self._launches.execution
        return execution.shapes if isinstance(execution, GraphExecution) else []

    def _run(self, part: _Part) -> str | None:
        """Compile, run or capture a forward pass, as its stage says. Return the reason why it
        cannot be used, or None.
        """
        if part.stage == "capture":
            return self._capture(part.shape)
        mode = self._bridge.compile_only if part.stage == "compile" else self._bridge.dry_run
        sampling: Sampling = "none" if part.shape.num_rows in self._batches else "warm_up"
        with mode():
            attempted = attempt(
                self._bridge,
                partial(self._runner.warm_up, part.shape, sampling=sampling),
                self._ledger.resident_bytes,
                self._launches.peers,
            )
        needed_bytes = attempted.needed_bytes + self._held_bytes
        # A launch that fits into the workspace of earlier launches needs no further memory.
        is_above = attempted.has_grown and needed_bytes > self._ledger.launch_bytes
        if attempted.refused_bytes is None and not is_above:
            return None
        return self._too_much(needed_bytes, self._ledger.launch_bytes)

    def _capture(self, shape: PaddedShape) -> str | None:
        in_use = used_bytes(self._bridge)
        self._used_bytes = 0
        with self._bridge.dry_run():
            captured = attempt(
                self._bridge, partial(self._capture_shape, shape), in_use, self._launches.peers
            )
        self._used_bytes = max(0, used_bytes(self._bridge) - in_use)
        left = self._ledger.left(GRAPH_CLASSES[shape.bucket.phase])
        if captured.refused_bytes is None and self._used_bytes <= left:
            return None
        needed = format_bytes(max(self._used_bytes, captured.needed_bytes))
        return f"a graph takes {needed}, but only {format_bytes(left)} are left"

    def _capture_shape(self, shape: PaddedShape) -> None:
        self._launches.capture(shape)
        self._runner.warm_up(shape, sampling="none")

    @staticmethod
    def _too_much(needed_bytes: int, max_bytes: int) -> str:
        needed, most = format_bytes(needed_bytes), format_bytes(max_bytes)
        return f"a forward pass takes {needed}, but only {most} are reserved for forward passes"
