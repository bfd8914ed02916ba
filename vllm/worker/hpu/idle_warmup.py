"""Compiles sampling graphs that the start has left out, one at a time, while no requests run.

Steps have the same format as the steps of the warm-up; the engine asks for one when it is idle.
"""

import time
from collections.abc import Iterator

from msgspec.structs import replace

from vllm.bucketing import MemoryLedger, format_bytes
from vllm.logger import init_logger
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.sample.metadata import SamplingMetadata
from vllm.worker.hpu.launches.planner import PaddedShape
from vllm.worker.hpu.memory.memory_profile import attempt
from vllm.worker.hpu.model_runner import HPUModelRunner
from vllm.worker.interface import WarmUpStep, WarmUpUpdate

logger = init_logger(__name__)


class IdleWarmUp:
    """Warms up the sampling of one runner while the engine is idle.

    Args:
        bridge: the card.
        runner: the runner, after its warm-up.
        ledger: has the memory budget of forward passes.
        held_bytes: memory of results that are still to be read.
        expected_s: expected seconds of a step.
    """

    def __init__(
        self,
        bridge: HabanaBridge,
        runner: HPUModelRunner,
        ledger: MemoryLedger,
        held_bytes: int,
        expected_s: float = 0.0,
    ) -> None:
        self._bridge = bridge
        self._runner = runner
        self._ledger = ledger
        self._held_bytes = held_bytes
        self._given_up = False
        self._launch: tuple[PaddedShape, SamplingMetadata] | None = None
        """Shape and sampling metadata of the step that was named last."""
        self._named: WarmUpStep | None = None
        """Step that was named and has not run yet."""
        self._longest_s = expected_s
        """Seconds of the longest step so far."""
        self._steps = self._all_steps()

    def next_warm_up(self, update: WarmUpUpdate) -> WarmUpStep | None:
        """Finish the last step, and return the next one; see `Worker.next_warm_up`."""
        if self._launch is None and update.seconds is not None:
            self._longest_s = max(self._longest_s, update.seconds)
        if update.given_up is not None and not self._given_up:
            self._given_up = True
            logger.warning(
                "stopped compiling sampling graphs while idle: %s. The others are compiled when a "
                "request first needs them",
                update.given_up,
            )
        if self._given_up:
            return None
        if self._named is None:
            self._named = next(self._steps, None)
        step = self._named
        if step is None:
            return None
        must_wait = update.longest_s is not None and self._longest_s > update.longest_s
        return replace(step, expected_s=self._longest_s, must_wait=must_wait)

    def warm_up(self) -> str | None:
        """Run the forward pass of the step; return why it has to be given up, or None."""
        assert self._launch is not None, "no step has been named"
        (shape, metadata), self._launch = self._launch, None
        self._named = None
        with self._bridge.dry_run():
            attempted = attempt(
                self._bridge,
                lambda: self._runner.warm_up_sampling(shape, metadata),
                self._ledger.resident_bytes,
                self._runner.launches.peers,
            )
        needed_bytes = attempted.needed_bytes + self._held_bytes
        budget = self._ledger.launch_bytes
        if attempted.refused_bytes is None and needed_bytes <= budget:
            return None
        return (
            f"a forward pass takes {format_bytes(needed_bytes)}, but only {format_bytes(budget)} "
            "are reserved for forward passes"
        )

    def _all_steps(self) -> Iterator[WarmUpStep]:
        shapes = self._shapes()
        logger.info("Idle: compiling the remaining sampling graphs for %d batch sizes", len(shapes))
        started, num_launches = time.perf_counter(), 0
        for index, shape in enumerate(shapes, 1):
            for metadata in self._runner.card_sampling.uncompiled(shape.num_rows):
                self._launch = shape, metadata
                num_launches += 1
                yield WarmUpStep(
                    phase="warm-up: sampling while idle",
                    name=f"sampling for {shape.num_rows} requests",
                    index=index,
                    total=len(shapes),
                )
        logger.info(
            "All sampling graphs are compiled: %d while idle, over %.1f s",
            num_launches,
            time.perf_counter() - started,
        )

    def _shapes(self) -> list[PaddedShape]:
        """Return the smallest shape of each padded batch size, ascending."""
        launches = self._runner.launches
        catalog = launches.planner.catalog
        found: dict[int, PaddedShape] = {}
        for bucket in (*catalog.decode, *catalog.prefill):
            for shape in launches.launch_shapes(bucket):
                found.setdefault(shape.num_rows, shape)
        return [found[num_rows] for num_rows in sorted(found)]
