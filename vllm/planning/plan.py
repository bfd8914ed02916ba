"""The answer of `vllm plan` as plain values: memory, buckets, start time, throughput."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from vllm.bucketing import Bucket, format_bytes
from vllm.bucketing.catalog.bucket_plan import plan_buckets
from vllm.bucketing.ledger import GRAPHS, MemoryClass
from vllm.config import VllmConfig
from vllm.cost_model.measured import Measured
from vllm.engine.arg_utils import EngineArgs
from vllm.planning.engine_plan import EnginePlan, StageRoom, mode_setting, weight_format
from vllm.planning.engine_throughput import is_speed_known, serving_cost, throughput_grid
from vllm.planning.fit import planned_or_nearest
from vllm.planning.host import start_on_host
from vllm.planning.start import StartPlan, plan_start
from vllm.planning.throughput.prediction import Prediction
from vllm.planning.throughput.table import as_objects
from vllm.planning.traffic import bucket_row, bucket_seconds, shape_seconds
from vllm.platforms.cpu import machine_memory_bytes
from vllm.worker.hpu.launches.execution import GraphExecution
from vllm.worker.hpu.model_runner import HPUModelRunner
from vllm.worker.hpu.warmup.profile import held_bytes
from vllm.worker.interface import MemoryReport

_MAX_NAMED = 4
"""Buckets that a line names."""

JSON_VERSION = 1
"""Version of the format of `Plan.as_json`. Keys may be added without a new version."""


@dataclass(frozen=True)
class MemorySection:
    """Division of the memory of each card."""

    total_bytes: int
    uses: tuple[tuple[str, int], ...]
    """Names of uses with their bytes; together they are the total."""
    block_bytes: int
    """Bytes of a KV block in all layers."""
    block_size: int
    """Tokens of a KV block."""
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    num_sequences: float
    """Sequences of max_model_len tokens that fit the cache at a time."""
    longest_context: int
    """Tokens of the longest sequence that the model and the memory allow."""


@dataclass(frozen=True)
class Plan:
    """The plan of an engine on a device, which this machine may lack.

    Each section is formatted separately.
    """

    model: str
    dtype: str
    quantization: str | None
    """Format of the weights; None: they are in `dtype`."""
    device: str
    num_cards: int
    """Cards of one engine."""
    num_engines: int
    """Engines that share the requests; each has as many cards."""
    memory: MemorySection
    start: StartPlan | None
    """None: the device compiles nothing."""
    throughput: tuple[Prediction, ...] = ()
    """Predicted speed for prompts of several lengths; empty if the cost model does not know the
    device or does not support it."""
    not_in_speed: str = ""
    """Note about features that the predicted speed leaves out, as one sentence; empty: none."""
    measured: str = ""
    """Constants that were measured, as one line; empty: none."""
    buckets: tuple[Bucket, ...] = ()
    """Buckets that the engine has without a traffic; empty for a CPU."""
    mode: str = ""
    """The mode of execution that is planned, as one sentence; empty for a CPU."""
    stages: tuple[StageRoom, ...] = ()
    """Stages of a pipeline. `memory` and `start` are for the stage with room for the fewest KV
    blocks."""
    bucket_s: tuple[float, ...] = ()
    """Predicted seconds of a forward pass in each bucket; empty with pipeline stages."""
    completed: str = ""
    """Buckets that the file of VLLM_BUCKETING_FROM_FILE lacks, as one sentence; empty: none."""
    text_only: str = ""
    """Note about a part for images or sounds that is not planned, as one sentence; empty: none."""
    reserved: str = ""
    """Advice about memory that is reserved for graphs although the mode has none; empty: none."""

    @property
    def about(self) -> str:
        """The data types of the model and the devices, as a sentence without the subject."""
        weights = f"{self.quantization} weights, " if self.quantization else ""
        if self.device == "cpu":
            where = "a CPU" if self.num_cards == 1 else f"a CPU, by {self.num_cards} processes"
        else:
            where = f"{self.num_cards} {self.device} card{'s'[: self.num_cards > 1]}"
        engines = f" for each of {self.num_engines} engines" if self.num_engines > 1 else ""
        return f"{weights}{self.dtype}, on {where}{engines}. Planned, not measured."

    def as_json(self) -> dict[str, Any]:
        """Return the plan as an object for JSON."""
        start = None
        if self.start is not None:
            derived = ("cold_s", "cached_s", "first_s", "notes")
            start = asdict(self.start) | {name: getattr(self.start, name) for name in derived}
        throughput = as_objects(self.throughput)
        return {
            "version": JSON_VERSION,
            "about": self.about,
            **asdict(replace(self, throughput=(), buckets=())),
            "start": start,
            "throughput": throughput,
            "buckets": [bucket_row(bucket) for bucket in self.buckets],
        }


def make_plan(
    args: EngineArgs,
    device: str,
    num_cards: int = 1,
    host_bytes: int | None = None,
) -> Plan:
    """Plan an engine on cards or on a CPU.

    Args:
        args: arguments; see `make_engine_plan`.
        device: device; see `make_engine_plan`, or cpu.
        num_cards: number of cards; see `make_engine_plan`.
        host_bytes: memory of the machine, for cpu; None: the memory of this machine.

    Raises:
        ConfigError: the engine cannot start with these arguments, or the model does not fit.
    """
    if device == "cpu":
        return _host_plan(args, num_cards, host_bytes)
    return describe(planned_or_nearest(args, device, num_cards), device)


def describe(engine: EnginePlan, device: str, measured: Measured | None = None) -> Plan:
    """Describe a planned engine as plain values.

    Args:
        engine: plan of an engine on a card.
        device: the card.
        measured: measured rates of a card of this kind.
    """
    config, start = engine.config, plan_start(engine)
    if measured is not None:
        start = start.with_slower_compilations(measured.slowness("compile_s"))
    throughput: list[Prediction] = []
    buckets = (*engine.catalog.prefill, *engine.catalog.decode)
    bucket_s: tuple[float, ...] = ()
    if is_speed_known(engine):
        cost = serving_cost(engine, None if measured is None else measured.fitted)
        throughput = throughput_grid(engine, cost)
        bucket_s = bucket_seconds(buckets, shape_seconds(cost, config.cache.block_size))
    return Plan(
        model=config.model.model or "",
        dtype=config.model.dtype_name,
        quantization=weight_format(config),
        device=device,
        num_cards=config.parallel.world_size,
        num_engines=config.parallel.data_parallel_size,
        memory=plan_memory(engine),
        start=start,
        throughput=tuple(throughput),
        not_in_speed=_not_in_speed(engine) if throughput else "",
        measured="" if measured is None else measured.describe(),
        buckets=buckets,
        mode=_mode(engine),
        stages=engine.stages if len(engine.stages) > 1 else (),
        bucket_s=bucket_s,
        completed=_completed(engine),
        text_only=_text_only(config),
        reserved=_reserved(engine),
    )


def _text_only(config: VllmConfig) -> str:
    """Return a note about the part of a model for images or sounds that is not planned."""
    reason = config.model.resolved_arch.text_only
    return f"Planned for text input only, because {reason}" if reason else ""


def _not_in_speed(engine: EnginePlan) -> str:
    """Return a note about features whose effect on the speed is not predicted."""
    config, runner = engine.config, engine.worker.runner
    parts = {
        "drafts (--speculative-config)": config.speculative.drafts is not None,
        "adapters (--enable-lora)": config.lora.enable_lora,
        "images, videos or sounds": isinstance(runner, HPUModelRunner)
        and runner.encoder is not None,
    }
    found = [name for name, is_used in parts.items() if is_used]
    return f"Predicted for requests without {' and without '.join(found)}" if found else ""


def _reserved(engine: EnginePlan) -> str:
    """Return advice about memory that is reserved for HPU graphs in a mode without them."""
    launches = engine.worker.runner.launches
    num_bytes = sum(engine.ledger.budget(cls) for cls in GRAPHS)
    if isinstance(launches.execution, GraphExecution) or not num_bytes:
        return ""
    return (
        f"{format_bytes(num_bytes)} are reserved for graphs, and {launches.execution.name} has no "
        "HPU graphs: with VLLM_GRAPH_RESERVED_MEM=0 the KV cache gets this memory"
    )


def _completed(engine: EnginePlan) -> str:
    """Return a note about buckets that were added to the buckets of the file."""
    path = engine.config.hpu.bucketing_file
    if path is None:
        return ""
    added = plan_buckets(engine.config, engine.report.num_blocks).added
    if not added:
        return ""
    one = len(added) == 1
    named = ", ".join(str(bucket_row(bucket)[1:]) for bucket in added[:_MAX_NAMED])
    more = f" and {len(added) - _MAX_NAMED} more" if len(added) > _MAX_NAMED else ""
    return (
        f"{path} (VLLM_BUCKETING_FROM_FILE) has no bucket for some steps. Added {len(added)} "
        f"bucket{'' if one else 's'} [batch, tokens, blocks]: {named}{more}"
    )


_MODES = {
    (True, False): "lazy mode with HPU graphs",
    (True, True): "lazy mode without HPU graphs (--enforce-eager)",
    (False, False): "torch.compile",
    (False, True): "eager mode (--enforce-eager)",
}
"""Names by (lazy, enforce_eager)."""


def _mode(engine: EnginePlan) -> str:
    """Return the name of the execution mode that is planned."""
    is_lazy = engine.bridge.is_lazy
    name = _MODES[is_lazy, engine.config.model.enforce_eager]
    return f"Planned for {name}: serve with {mode_setting(is_lazy=is_lazy)}"


def plan_memory(engine: EnginePlan) -> MemorySection:
    """Return the memory of a card by the classes of its ledger.

    Weights and workspace are divided further.
    """
    config, ledger, report = engine.config, engine.ledger, engine.report
    held = min(held_bytes(config), ledger.budget(MemoryClass.WORKSPACE))
    uses = [
        *((use.what, use.num_bytes) for use in engine.memory_uses),
        (str(MemoryClass.WORKSPACE), ledger.budget(MemoryClass.WORKSPACE) - held),
        ("results held", held),
        *_graph_uses(engine),
        (str(MemoryClass.KV_CACHE), ledger.budget(MemoryClass.KV_CACHE)),
        (str(MemoryClass.MARGIN), ledger.budget(MemoryClass.MARGIN)),
        ("not used", ledger.unassigned_bytes),
    ]
    return _memory_section(config, report, ledger.total_bytes, uses)


def _graph_uses(engine: EnginePlan) -> list[tuple[str, int]]:
    """Return the memory for HPU graphs of each phase, or of all if there is only one phase."""
    ledger = engine.ledger
    if engine.catalog.decode:
        return [(str(cls), ledger.budget(cls)) for cls in GRAPHS]
    return [("HPU graphs", sum(ledger.budget(cls) for cls in GRAPHS))]


def _memory_section(
    config: VllmConfig, report: MemoryReport, total_bytes: int, uses: Sequence[tuple[str, int]]
) -> MemorySection:
    size, max_model_len = config.cache.block_size, config.scheduler.max_model_len
    num_groups = len(report.windows)
    num_usable = (report.num_blocks - 1) // num_groups
    longest = config.model.resolved_arch.derived_max_model_len
    return MemorySection(
        total_bytes=total_bytes,
        uses=tuple((what, num_bytes) for what, num_bytes in uses if num_bytes),
        block_bytes=report.block_bytes,
        block_size=size,
        num_blocks=report.num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        num_sequences=num_usable / config.max_blocks_per_request,
        longest_context=min(num_usable * size, longest),
    )


def _host_plan(args: EngineArgs, num_ranks: int, host_bytes: int | None) -> Plan:
    """Plan an engine on a CPU, which compiles nothing."""
    total_bytes = machine_memory_bytes() if host_bytes is None else host_bytes
    worker = start_on_host(args, num_ranks, total_bytes)
    config, report = worker.config, worker.report
    cache_bytes = report.num_blocks * report.block_bytes
    uses = [(use.what, num_ranks * use.num_bytes) for use in worker.memory_uses]
    uses.append((str(MemoryClass.KV_CACHE), num_ranks * cache_bytes))
    uses.append(
        ("for steps and other programs", total_bytes - sum(num_bytes for _, num_bytes in uses))
    )
    return Plan(
        model=config.model.model or "",
        dtype=config.model.dtype_name,
        quantization=weight_format(config),
        device="cpu",
        num_cards=config.parallel.world_size,
        num_engines=config.parallel.data_parallel_size,
        memory=_memory_section(config, report, total_bytes, uses),
        start=None,
        text_only=_text_only(config),
    )
