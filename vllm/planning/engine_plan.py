"""Plans the start of an engine on cards that are not in this machine.

The result has the config, buckets and memory of the engine, and the operators of each of its
forward passes. It runs the worker of a card in this process, on a simulated card that computes
nothing. It knows no model, format or size, and returns only values that the worker has found.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from vllm.bucketing import Bucket, MemoryClass, MemoryLedger, Phase, StepLimits
from vllm.bucketing.catalog.catalog import Catalog
from vllm.config import VllmConfig
from vllm.config.quantization.quant_method import quant_method
from vllm.cost_model.cards import CARDS, CardSpec
from vllm.cost_model.work import Work
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.planning.worker import PlannedWorker, on_planned_card
from vllm.platforms import Platform
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.platforms.hpu import PlannedPlatform
from vllm.worker.hpu.launches.planner import PaddedShape
from vllm.worker.hpu.memory.memory_profile import used_bytes
from vllm.worker.interface import MemoryReport
from vllm.worker.parts.memory_use import MemoryUse

Result = TypeVar("Result")

_UNLIMITED_BYTES = 1 << 50


@dataclass(frozen=True)
class LaunchWork:
    """The operators of a forward pass of one shape, on each card.

    Attributes:
        operators: operators in the order in which they run; operators without work are left out.
        num_ops: number of operators, views included.
        num_launches: number of recipes that are launched, counted for each layer; these are
            captured.
        seconds: seconds that the operators take one after another, collectives included.
        recipes: recipes to compile: a key of each -> its number of operators. Two shapes that share
            a recipe have the same key.
    """

    operators: tuple[Work, ...]
    num_ops: int
    num_launches: int
    seconds: float
    recipes: Mapping[Hashable, int]

    @classmethod
    def of(cls, launched: Sequence[Sequence[Any]]) -> "LaunchWork":
        """Return the work of recipes that a card has launched."""
        works = (operator.work for recipe in launched for operator in recipe)
        return cls(
            tuple(work for work in works if work != Work()),
            sum(map(len, launched)),
            len(launched),
            sum(operator.compute_s for recipe in launched for operator in recipe),
            {tuple(recipe): len(recipe) for recipe in launched},
        )

    def followed_by(self, work: "LaunchWork") -> "LaunchWork":
        """Return the work of both, one after the other."""
        return LaunchWork(
            (*self.operators, *work.operators),
            self.num_ops + work.num_ops,
            self.num_launches + work.num_launches,
            self.seconds + work.seconds,
            {**self.recipes, **work.recipes},
        )


@dataclass(frozen=True)
class StageRoom:
    """The memory of a pipeline stage, on each of its cards."""

    first_layer: int
    end_layer: int
    """Index after the last one."""
    weight_bytes: int
    launch_bytes: int
    """Bytes of the forward passes."""
    num_blocks: int
    """KV blocks that the stage has room for; the engine has as many as the stage with the
    fewest."""


class EnginePlan:
    """An engine planned for one kind of card, from the view of one of its ranks.

    Args:
        config: config of the engine.
        platform: has the card.
        rank: rank of the engine.

    Attributes:
        config: config of the engine.
        spec: description of its cards.
        stages: pipeline stages of the engine in order; one without a pipeline.
        report: results of the profiling run, and how the memory is divided.
        ledger: memory of the card by class, with its KV cache.

    Raises:
        ConfigError: the model does not fit the cards.
    """

    report: MemoryReport

    def __init__(
        self,
        config: VllmConfig,
        platform: PlannedPlatform,
        spec: CardSpec,
        rank: int = 0,
    ) -> None:
        self.config, self.spec = config, spec
        self._platform = platform
        with on_planned_card(platform):
            self.worker = worker = PlannedWorker(config, platform)
            worker.start(rank)
            self.report = worker.measure()
            worker.allocate(self.report.num_blocks)
        self.stages: tuple[StageRoom, ...] = (self._room(),)

    def _room(self) -> StageRoom:
        stage, report = self.worker.stage, self.report
        return StageRoom(
            first_layer=stage.first_layer,
            end_layer=stage.end_layer,
            weight_bytes=self.ledger.budget(MemoryClass.WEIGHTS),
            launch_bytes=report.launch_bytes,
            num_blocks=report.num_blocks,
        )

    @property
    def catalog(self) -> Catalog:
        """The buckets of the engine."""
        return self.worker.runner.launches.planner.catalog

    @property
    def limits(self) -> StepLimits:
        """The limits of a forward pass."""
        return self.worker.runner.launches.planner.limits

    def first_buckets(self) -> list[Bucket]:
        """Return the buckets that are warm when the server starts.

        Some may be needed only then. There are none if the warm-up is left out.
        """
        if self.config.hpu.skip_warmup:
            return []
        return self.worker.first_buckets(self.catalog, self.limits)

    @property
    def ledger(self) -> MemoryLedger:
        """The memory by class."""
        return self.worker.ledger

    @property
    def memory_uses(self) -> list[MemoryUse]:
        """The uses of memory other than forward passes and the KV cache."""
        return self.worker.memory_uses

    @cached_property
    def shapes(self) -> tuple[PaddedShape, ...]:
        """Every shape in which a forward pass can run."""
        buckets = (*self.catalog.prefill, *self.catalog.decode)
        return tuple(shape for each in buckets for shape in self.shapes_of(each))

    def shapes_of(self, bucket: Bucket) -> list[PaddedShape]:
        """Return the shapes in which forward passes of a bucket can run."""
        return self.worker.runner.launches.launch_shapes(bucket)

    def buckets_of(self, phase: Phase) -> Sequence[Bucket]:
        """Return the buckets of a phase."""
        return self.catalog.prefill if phase is Phase.PREFILL else self.catalog.decode

    @property
    def bridge(self) -> HabanaBridge:
        """The simulated card."""
        return self._platform.bridge

    def record(self, run: Callable[[], Result]) -> tuple[Result, LaunchWork]:
        """Call a function that launches operators, without computing their values.

        Returns:
            The result of the function, and the work of everything that it has launched.
        """
        with on_planned_card(self._platform), self._platform.recipes_launched() as launched:
            result = run()
        return result, LaunchWork.of(launched)


def mode_setting(*, is_lazy: bool) -> str:
    """Return the environment variable that lets an engine run in a mode, with its value."""
    return f"PT_HPU_LAZY_MODE={int(is_lazy)}"


def make_engine_plan(args: EngineArgs, device: str, num_cards: int = 1) -> EnginePlan:
    """Plan the start of an engine on cards.

    Args:
        args: arguments of the engine; its `device` is ignored. Weights are not read.
        device: a key of `cost_model.cards.CARDS`.
        num_cards: number of cards that share each layer.

    Returns:
        The plan of the first rank; with a pipeline, of the stage that holds the fewest KV blocks.

    Raises:
        ConfigError: the engine cannot start with these arguments, or the model does not fit.
    """
    if device not in CARDS:
        raise ConfigError(f"device={device!r} is not known; accepted: {', '.join(CARDS)}")
    platform, spec = PlannedPlatform(device), CARDS[device]
    config = planned_config(args, platform, num_cards)
    num_stages = config.parallel.pipeline_parallel_size
    if num_stages == 1:
        return EnginePlan(config, platform, spec)
    size = config.parallel.tensor_parallel_size
    found = [
        EnginePlan(config, PlannedPlatform(device), spec, rank)
        for rank in range(0, num_stages * size, size)
    ]
    stages = tuple(plan.stages[0] for plan in found)
    least = min(range(num_stages), key=lambda index: stages[index].num_blocks)
    # Only the stage that was started last has its ranks, so the deciding stage is started again
    # unless it was the last one.
    decides = (
        EnginePlan(config, platform, spec, least * size) if least < num_stages - 1 else found[-1]
    )
    decides.stages = stages
    return decides


def weights_bytes(
    args: EngineArgs, device: str, num_cards: int, quantization: str | None = None
) -> tuple[VllmConfig, int]:
    """Return the config of an engine, and the bytes of its weights on a card, even if they do not
    fit.

    Args:
        args: arguments; see `make_engine_plan`.
        device: device; see `make_engine_plan`.
        num_cards: number of cards; see `make_engine_plan`.
        quantization: replaces the quantization in `args`; None: unchanged.

    Raises:
        ConfigError: the engine cannot start with these arguments.
    """
    platform = PlannedPlatform(device, _UNLIMITED_BYTES)
    more = {} if quantization is None else {"quantization": quantization}
    config = planned_config(args, platform, num_cards, **more)
    bridge = platform.bridge
    with on_planned_card(platform):
        before = used_bytes(bridge)
        worker = PlannedWorker(config, platform)
        worker.load(0)
        return config, used_bytes(bridge) - before


def planned_config(
    args: EngineArgs, platform: Platform, num_cards: int, **more: object
) -> VllmConfig:
    """Return the config of an engine; its weights need not exist.

    Args:
        args: arguments of the engine.
        platform: platform of its device.
        num_cards: number of ranks that share each layer.
        more: replace values of `args`.

    Raises:
        ConfigError: the engine cannot start with these arguments.
    """
    settings = {name: value for name, value in vars(args).items() if value is not None}
    settings |= {"device": platform.name, "tensor_parallel_size": num_cards, **more}
    if not _is_gguf(args.model):  # the header of a GGUF file has the format of each layer
        settings["load_format"] = "dummy"
    config = EngineArgs(**settings).create_engine_config(platform)
    if config.model.inc is not None:
        inc = replace(config.model.inc, assumes_measurements=True)
        config = replace(config, model=replace(config.model, inc=inc))
    # Plan all buckets, including the ones that a server would warm up later.
    return replace(config, hpu=replace(config.hpu, ready_when="all"))


def weight_format(config: VllmConfig) -> str | None:
    """Return the name of the quantization that was asked for or, else, of the checkpoint."""
    return config.model.quantization or quant_method(config.model.resolved_arch)


def _is_gguf(model: str | None) -> bool:
    path = Path(model or "")
    return path.suffix == ".gguf" or any(path.glob("*.gguf"))
