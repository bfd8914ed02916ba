"""The warm-up of a card from its start to its end: three parts, one after the other.

WarmUp          buckets, before the engine serves
LaterWarmUp     buckets that the start has left out, while the engine serves
IdleWarmUp      sampling that the start has left out, while no requests run
"""

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from vllm.bucketing import Bucket, MemoryLedger, Phase, StepLimits
from vllm.bucketing.catalog.bucket_plan import plan_buckets
from vllm.bucketing.catalog.catalog import Catalog
from vllm.bucketing.catalog.first_set import choose_first
from vllm.bucketing.catalog.from_traffic import seconds_of
from vllm.bucketing.traffic import TrafficTable, even_traffic
from vllm.config import VllmConfig
from vllm.distributed import Rendezvous
from vllm.logger import init_logger
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.worker.hpu.encoder import CardEncoder
from vllm.worker.hpu.idle_warmup import IdleWarmUp
from vllm.worker.hpu.launches.launch_profile import profile_launch
from vllm.worker.hpu.memory.memory_forecast import MemoryForecast
from vllm.worker.hpu.model_runner import HPUModelRunner
from vllm.worker.hpu.pooling_runner import HPUPoolingRunner
from vllm.worker.hpu.warmup.later_warmup import LaterWarmUp
from vllm.worker.hpu.warmup.profile import held_bytes
from vllm.worker.hpu.warmup.recipe_manifest import RecipeManifest
from vllm.worker.hpu.warmup.warmup import WarmUp
from vllm.worker.hpu.warmup.warmup_estimate import Kind, Work
from vllm.worker.interface import WarmUpStep, WarmUpUpdate

logger = init_logger(__name__)

_SAMPLING = Work(Kind("compile", Phase.DECODE, samples=True), 0.0)
"""A forward pass that represents each forward pass that compiles sampling."""


class WarmUpQueue:
    """Runs the parts of the warm-up of one card in their order.

    Args:
        config: config of the engine.
        bridge: the card.
        runner: runner of the model; it has its KV cache.
        ledger: has the memory budgets of forward passes and of graphs.
        forecast: knows the memory of the forward passes of the profiling run.
        encoder: encoder of images; None: the model reads text only.
        rendezvous: rendezvous of the ranks; None: this card is the only one.

    Attributes:
        has_started: whether the warm-up before the first request has ended.
    """

    def __init__(
        self,
        config: VllmConfig,
        bridge: HabanaBridge,
        runner: HPUModelRunner | HPUPoolingRunner,
        ledger: MemoryLedger,
        forecast: MemoryForecast,
        *,
        encoder: CardEncoder | None,
        rendezvous: Rendezvous | None,
    ) -> None:
        self._config = config
        self._bridge = bridge
        self._runner = runner
        self._launches = runner.launches
        self._ledger = ledger
        self._forecast = forecast
        self._encoder = encoder
        self._rendezvous = rendezvous
        self._rank = 0 if rendezvous is None else rendezvous.rank
        self._start: WarmUp | None = None
        """The warm-up before the first request; None: it has ended, or there is none."""
        self._later: deque[LaterWarmUp | IdleWarmUp] = deque()
        """The rest of the warm-up after the start."""
        self._later_buckets: LaterWarmUp | None = None
        """Warms up buckets after the start; None: nothing does."""
        self._on_disk: list[Bucket] = []
        """Buckets whose recipes need not be compiled."""
        self._num_choices = 0
        self.has_started = False

    # ---- the start ------------------------------------------------------------------------

    def plan(self, num_blocks: int) -> None:
        """Choose the padded shapes, and prepare their warm-up unless it is to be skipped.

        Args:
            num_blocks: number of KV blocks, the null block included.
        """
        plan = plan_buckets(self._config, num_blocks)
        for line in plan.warnings:
            logger.warning(line)
        for line in plan.info:
            logger.info(line)
        catalog = plan.catalog
        if Phase.DECODE not in self._launches.phases:
            catalog = Catalog(catalog.prefill, ())
        self._launches.use_catalog(catalog, plan.limits)
        if self._config.hpu.profiled_launch is not None:
            profile_launch(self._config, self._bridge, self._runner, num_blocks)
        if self._config.hpu.skip_warmup:
            logger.info("Skipping warmup...")
            # From here on, compilations delay requests and are reported.
            self._launches.report.finish_warmup()
            return
        mode, card = self._launches.execution.name, self._bridge.device_name
        self._manifest = RecipeManifest.of(self._config, mode, num_blocks, self._rank, card)
        self._on_disk = self._of_rank_0("recipes on disk", sorted(self._manifest.found))
        self._start = WarmUp(
            self._config,
            self._bridge,
            self._runner,
            catalog,
            plan.limits,
            self._ledger,
            self._forecast,
            self._encoder,
            self.choose_first if self._serves_while_warming else None,
            self._on_disk,
        )
        self._launches.use_catalog(self._start.catalog, plan.limits)

    @property
    def _serves_while_warming(self) -> bool:
        """Whether buckets are left for later. Not while measuring: layers would measure padding."""
        return self._config.hpu.serves_while_warming and not self._config.model.is_measured

    def choose_first(self, wanted: Catalog, limits: StepLimits) -> list[Bucket]:
        """Choose the buckets that are warmed up at the start."""
        hpu, traffic = self._config.hpu, even_traffic(limits)
        if hpu.traffic is not None and not self._rank:  # rank 0 chooses for all ranks
            traffic = TrafficTable.load(Path(hpu.traffic))
        first = choose_first(
            wanted,
            limits,
            hpu.first_buckets,
            traffic,
            seconds_of(limits),
            memory_sizes=self._forecast.memory_sizes,
            preferred=self._on_disk,
        )
        self._num_choices += 1
        first = self._of_rank_0(f"first buckets {self._num_choices}", first)
        num_wanted = len({*wanted.prefill, *wanted.decode, *first})
        if len(first) < num_wanted:
            logger.info(
                "Ready after warming up %d of %d buckets; the others are warmed up while the "
                "engine serves requests",
                *(len(first), num_wanted),
            )
        else:
            logger.info(
                "Ready after warming up all %d buckets (--first-buckets is %d)",
                num_wanted,
                hpu.first_buckets,
            )
        return first

    def _of_rank_0(self, name: str, buckets: list[Bucket]) -> list[Bucket]:
        """Return the buckets of rank 0, so that all ranks warm up the same."""
        if self._rendezvous is None:
            return buckets
        values = self._rendezvous.exchange(name, msgspec.json.encode(buckets))
        return msgspec.json.decode(values[0], type=list[Bucket])

    # ---- steps ----------------------------------------------------------------------------

    def next_warm_up(self, update: WarmUpUpdate) -> WarmUpStep | None:
        """Finish the last step, and return the next one; see `Worker.next_warm_up`."""
        while self._later:
            step = self._later[0].next_warm_up(update)
            if step is not None:
                return step
            self._later.popleft()
            update = WarmUpUpdate(longest_s=update.longest_s)  # the next part has run no step
        if self.has_started:
            return None
        step = None if self._start is None else self._start.next_warm_up(update)
        if step is None:
            self._finish_start()
        return step

    def warm_up(self) -> str | None:
        """Run the forward pass of the step; return why it has to be given up, or None."""
        running = self._later[0] if self._later else self._start
        assert running is not None, "no step has been named"
        return running.warm_up()

    def _finish_start(self) -> None:
        hpu, start = self._config.hpu, self._start
        self.has_started, self._start = True, None
        if start is None:
            return
        self._manifest.add(start.catalog.warmed)
        has_rest = len(start.catalog) < len(start.wanted)
        if has_rest or hpu.adapt_buckets:
            traffic = TrafficTable(self._config.cache.block_size)
            self._later_buckets = LaterWarmUp(
                self._bridge,
                self._runner,
                start,
                self._ledger,
                self._forecast,
                held_bytes(self._config),
                traffic,
                lambda bucket: self._manifest.add([bucket]),
            )
            if has_rest:
                self._launches.traffic = traffic
                self._later.append(self._later_buckets)
        if hpu.full_warmup:
            self._launches.execution.forbid_recompilation()
        else:
            self._append_sampling(start.estimate.expect(_SAMPLING))

    def _append_sampling(self, expected_s: float) -> None:
        """Add the compilation of missing sampling graphs as the last part of the warm-up.

        Args:
            expected_s: expected seconds of a forward pass.
        """
        config, runner = self._config, self._runner
        is_wanted = config.hpu.sampling_warmup == "basic" and not config.model.is_measured
        if is_wanted and isinstance(runner, HPUModelRunner):
            held = held_bytes(config)
            self._later.append(IdleWarmUp(self._bridge, runner, self._ledger, held, expected_s))

    # ---- other buckets --------------------------------------------------------------------

    def list_buckets(self) -> list[tuple[int, int, int, int, bool]]:
        """Return the sizes of each bucket and whether it is warmed up, future buckets included."""
        catalog = self._launches.planner.catalog
        later = () if self._later_buckets is None else self._later_buckets.left
        buckets = sorted({*catalog.prefill, *catalog.decode, *later})
        return [
            (int(b.phase), b.batch, b.query_len, b.blocks, catalog.is_warmed(b)) for b in buckets
        ]

    def replace_buckets(self, buckets: Sequence[Sequence[int]]) -> bool:
        """Begin to warm up other buckets; return whether there are any.

        See `Worker.replace_buckets`.
        """
        later = self._later_buckets
        if later is None or later in self._later:
            return False
        wanted = [Bucket(Phase(phase), *sizes) for phase, *sizes in buckets]
        if not later.replace(wanted, keeps_prompts=self._config.hpu.merged_prefill):
            return False
        self._later.appendleft(later)
        self._append_sampling(0.0)  # for batch sizes that are new
        return True
