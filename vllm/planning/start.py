"""Predicts the start time of an engine on cards, and the HPU graphs that it keeps.

Shapes of one kind launch the same operators, so the smallest and the largest of each kind are run,
and the values between are interpolated.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

from vllm.bucketing import Bucket, Phase
from vllm.bucketing.catalog.capture_plan import Capture, PhaseGraphs, capture_graphs
from vllm.bucketing.ledger import assign_graphs
from vllm.cost_model.start import capture_seconds, compile_seconds
from vllm.planning.engine_plan import EnginePlan, LaunchWork
from vllm.worker.hpu.launches.execution import GraphExecution
from vllm.worker.hpu.launches.planner import PaddedShape
from vllm.worker.hpu.memory.memory_profile import used_bytes

_Kind = tuple[Hashable, ...]


@dataclass(frozen=True)
class PhaseStart:
    """The recipes and graphs of one phase: their numbers, and their predicted times and memory."""

    num_buckets: int
    num_shapes: int
    compile_s: float
    run_s: float
    num_graphs: int
    """Buckets that have HPU graphs."""
    capture_s: float
    graph_bytes: int
    num_sizes: dict[str, int]
    """Different sizes of the buckets in each dimension, by field of `Bucket`."""

    @property
    def seconds(self) -> float:
        """Seconds to compile, run and capture the shapes of the phase."""
        return self.compile_s + self.run_s + self.capture_s


@dataclass(frozen=True)
class StartPlan:
    """The predicted warm-up in seconds; reading the weights is not included."""

    prefill: PhaseStart
    decode: PhaseStart
    sampling_s: float
    """Seconds of compiling the sampling recipes, once for each padded batch size."""
    num_first_buckets: int
    """Number of buckets with which a server begins; 0: the warm-up is left out."""
    first_compile_s: float
    """Seconds to compile the first buckets, without recipes on disk."""
    first_run_s: float
    """Seconds to run the first buckets, and to capture as many of their graphs as the memory
    holds."""

    def with_slower_compilations(self, factor: float) -> "StartPlan":
        """Return the plan for a card whose compilations take this factor longer."""
        prefill, decode = (
            replace(phase, compile_s=factor * phase.compile_s) for phase in self.phases
        )
        return replace(
            self,
            prefill=prefill,
            decode=decode,
            sampling_s=factor * self.sampling_s,
            first_compile_s=factor * self.first_compile_s,
        )

    @property
    def phases(self) -> tuple[PhaseStart, PhaseStart]:
        """The plans for prompts and for decodes."""
        return self.prefill, self.decode

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the differences from a usual warm-up."""
        notes = []
        num_without = sum(phase.num_buckets - phase.num_graphs for phase in self.phases)
        if num_without and any(phase.num_graphs for phase in self.phases):
            notes.append(
                f"{num_without} buckets have no HPU graph, because the memory for graphs "
                "(VLLM_GRAPH_RESERVED_MEM) is full: their steps take longer"
            )
        if not self.num_first_buckets:
            notes.append(
                "Nothing is warmed up at the start (VLLM_SKIP_WARMUP=true): each shape is compiled "
                "when a request needs it. A warm-up would take the times shown here"
            )
        return tuple(notes)

    @property
    def compile_s(self) -> float:
        """Seconds of all compilations."""
        return self.sampling_s + sum(phase.compile_s for phase in self.phases)

    @property
    def first_s(self) -> float:
        """Seconds until a server answers, without recipes on disk."""
        return self.first_compile_s + self.first_run_s

    @property
    def cached_s(self) -> float:
        """Seconds until all buckets are warm, with all recipes on disk."""
        return sum(phase.run_s + phase.capture_s for phase in self.phases)

    @property
    def cold_s(self) -> float:
        """Seconds until all buckets are warm, without recipes on disk."""
        return self.compile_s + self.cached_s


@dataclass(frozen=True)
class _Sample:
    """A shape that has been run, with its costs."""

    shape: PaddedShape
    warm_up: LaunchWork
    """Work of one forward pass in the warm-up, with sampling and copies after it."""
    warm_up_s: float
    forward: LaunchWork
    row_bytes: int
    token_bytes: int
    """Bytes that a graph returns for each of its logits and of its tokens."""
    extra_bytes: int
    """Bytes of a graph in addition to its outputs."""


class ShapeCosts:
    """Predicts seconds and bytes of the shapes of an engine.

    Args:
        plan: plan of the engine.
    """

    def __init__(self, plan: EnginePlan) -> None:
        self._plan = plan
        self._samples: dict[_Kind, tuple[_Sample, _Sample]] = {}
        kinds: dict[_Kind, list[PaddedShape]] = defaultdict(list)
        for shape in plan.shapes:
            kinds[_kind_of(shape)].append(shape)
        for kind, shapes in kinds.items():
            ends = min(shapes, key=_size), max(shapes, key=_size)
            first = self._run(ends[0])
            self._samples[kind] = first, first if ends[0] == ends[1] else self._run(ends[1])
        seen = Counter(
            recipe for sample in self._all_samples() for recipe in sample.warm_up.recipes
        )
        self._shared = {recipe for recipe, count in seen.items() if count > 1}
        self._own_s = {id(x): _seconds(self._own_recipes(x)) for x in self._all_samples()}

    def _all_samples(self) -> Iterable[_Sample]:
        return {id(sample): sample for both in self._samples.values() for sample in both}.values()

    def _run(self, shape: PaddedShape) -> _Sample:
        runner = self._plan.worker.runner
        launches, extra_bytes = runner.launches, 0
        run = partial(launches.run_padding, shape)
        warm_up = partial(runner.warm_up, shape, sampling="none")
        if isinstance(launches.execution, GraphExecution):
            before = used_bytes(self._plan.bridge)
            _, forward = self._plan.record(partial(launches.capture, shape))
            (_, result, hidden), _ = self._plan.record(run)
            extra_bytes = used_bytes(self._plan.bridge) - before - result.nbytes - hidden.nbytes
            _, behind = self._plan.record(warm_up)  # without the forward pass, which is replayed
            launches.release(shape)
            warmed = forward.followed_by(behind)
        else:
            (_, result, hidden), forward = self._plan.record(run)
            _, warmed = self._plan.record(warm_up)
        row_bytes, token_bytes = result.nbytes // len(result), hidden.nbytes // len(hidden)
        return _Sample(
            *(shape, warmed, warmed.seconds, forward), *(row_bytes, token_bytes, extra_bytes)
        )

    # ---- of one shape ---------------------------------------------------------------------

    def compile_s(self, shape: PaddedShape) -> float:
        """Return the seconds of compiling the recipes that no other shape needs."""
        return self._between(shape, lambda sample: self._own_s[id(sample)])

    @property
    def shared_s(self) -> float:
        """Seconds of compiling the recipes that several shapes share."""
        recipes = {r: n for x in self._all_samples() for r, n in x.warm_up.recipes.items()}
        return _seconds({r: n for r, n in recipes.items() if r in self._shared})

    def run_s(self, shape: PaddedShape) -> float:
        """Return the seconds of one forward pass of the shape."""
        return self._between(shape, lambda sample: sample.warm_up_s)

    def capture_s(self, shape: PaddedShape) -> float:
        """Return the seconds of capturing the shape's HPU graph."""
        return self._between(shape, lambda sample: capture_seconds(sample.forward.num_launches))

    def graph_bytes(self, shape: PaddedShape) -> int:
        """Return the memory that the shape's HPU graph keeps."""
        sample = self._samples_of(shape)[0]
        outputs = shape.num_rows * sample.row_bytes + shape.bucket.num_tokens * sample.token_bytes
        return outputs + round(self._between(shape, lambda sample: sample.extra_bytes))

    # ---- of one bucket --------------------------------------------------------------------

    def warm_up_s(self, bucket: Bucket) -> float:
        """Return the seconds of compiling, running and capturing the shapes of a bucket."""
        return sum(
            self.compile_s(shape)
            + self.run_s(shape)
            + (self.capture_s(shape) if self.has_graphs else 0.0)
            for shape in self._shapes_of(bucket)
        )

    def bucket_graph_bytes(self, bucket: Bucket) -> int:
        """Return the memory that the HPU graphs of a bucket keep."""
        return sum(map(self.graph_bytes, self._shapes_of(bucket)))

    @property
    def has_graphs(self) -> bool:
        """Whether the execution mode has HPU graphs."""
        return isinstance(self._plan.worker.runner.launches.execution, GraphExecution)

    def _shapes_of(self, bucket: Bucket) -> list[PaddedShape]:
        """Return the shapes of a bucket; none if the engine has no bucket of its phase."""
        is_used = any(kind[0] is bucket.phase for kind in self._samples)
        return self._plan.shapes_of(bucket) if is_used else []

    def _samples_of(self, shape: PaddedShape) -> tuple[_Sample, _Sample]:
        """Return the smallest and largest sample of the shape's kind.

        If only a first bucket has such a shape, they are samples of another kind in its phase.
        """
        found = self._samples.get(_kind_of(shape))
        if found is not None:
            return found
        phase = shape.bucket.phase
        return next(both for kind, both in self._samples.items() if kind[0] is phase)

    def _own_recipes(self, sample: _Sample) -> Mapping[Hashable, int]:
        return {r: n for r, n in sample.warm_up.recipes.items() if r not in self._shared}

    def _between(self, shape: PaddedShape, value: Callable[[_Sample], float]) -> float:
        low, high = self._samples_of(shape)
        start, end = _size(low.shape), _size(high.shape)
        share = (_size(shape) - start) / (end - start) if end > start else 0.0
        return value(low) + share * (value(high) - value(low))

    def sampling_s(self) -> float:
        """Return the seconds of compiling the sampling graphs for one padded batch size."""
        sample = next(iter(self._samples.values()))[0]
        run = partial(self._plan.worker.runner.warm_up, sample.shape, sampling="warm_up")
        _, work = self._plan.record(run)
        known = {recipe for each in self._all_samples() for recipe in each.warm_up.recipes}
        return _seconds({r: n for r, n in work.recipes.items() if r not in known})


def plan_start(plan: EnginePlan) -> StartPlan:
    """Predict how long the warm-up of an engine takes."""
    costs = ShapeCosts(plan)
    graphs = _plan_graphs(plan, costs)

    def of(phase: Phase) -> PhaseStart:
        buckets = plan.buckets_of(phase)
        shapes = [shape for bucket in buckets for shape in plan.shapes_of(bucket)]
        found = graphs.get(phase)
        captured = () if found is None else found.captured
        with_graphs = [shape for bucket in captured for shape in plan.shapes_of(bucket)]
        return PhaseStart(
            num_buckets=len(buckets),
            num_shapes=len(shapes),
            compile_s=sum(map(costs.compile_s, shapes)),
            run_s=sum(map(costs.run_s, shapes)),
            num_graphs=len(captured),
            capture_s=sum(map(costs.capture_s, with_graphs)),
            graph_bytes=0 if found is None else found.used_bytes,
            num_sizes={
                name: len({getattr(bucket, name) for bucket in buckets})
                for name in ("batch", "query_len", "blocks")
            },
        )

    first = plan.first_buckets()
    first_shapes = [shape for bucket in first for shape in plan.shapes_of(bucket)]
    shared_s = costs.shared_s if first else 0.0
    size_s, prefill, decode = costs.sampling_s(), of(Phase.PREFILL), of(Phase.DECODE)
    capture_s = min(sum(map(costs.capture_s, first_shapes)), prefill.capture_s + decode.capture_s)
    return StartPlan(
        prefill=prefill,
        decode=decode,
        sampling_s=_num_sizes(plan.shapes) * size_s + costs.shared_s,
        num_first_buckets=len(first),
        first_compile_s=sum(map(costs.compile_s, first_shapes))
        + (_num_sizes(first_shapes) * size_s + shared_s),
        first_run_s=sum(map(costs.run_s, first_shapes)) + capture_s,
    )


def _num_sizes(shapes: Iterable[PaddedShape]) -> int:
    """Return the number of padded batch sizes whose sampling is compiled."""
    return len({shape.num_rows for shape in shapes})


def _plan_graphs(plan: EnginePlan, costs: ShapeCosts) -> Mapping[Phase, PhaseGraphs]:
    """Return the graphs that fit in memory; none if the execution mode has no graphs."""
    if not isinstance(plan.worker.runner.launches.execution, GraphExecution):
        return {}
    hpu, ledger = plan.config.hpu, deepcopy(plan.ledger)
    assign_graphs(ledger, hpu.graph_prompt_ratio)
    steps = capture_graphs(
        plan.catalog.prefill,
        plan.catalog.decode,
        ledger,
        prefill_order=hpu.graph_prompt_strategy,
        decode_order=hpu.graph_decode_strategy,
    )
    try:
        step = next(steps)
        while True:
            if step.refusal is not None:
                step = steps.send(Capture(None, step.refusal))
                continue
            needed = sum(map(costs.graph_bytes, plan.shapes_of(step.bucket)))
            step = steps.send(Capture(needed, step.refusal_of(needed)))
    except StopIteration as end:
        graphs: Mapping[Phase, PhaseGraphs] = end.value
        return graphs


def _kind_of(shape: PaddedShape) -> _Kind:
    """Return the properties of a shape that decide its operators, without its sizes."""
    bucket = shape.bucket
    if bucket.phase is Phase.PREFILL:
        return bucket.phase, bucket.blocks > 0, shape.merged_prompts > 0
    return bucket.phase, bucket.query_len > 1, shape.is_contiguous, shape.num_shared > 0


def _size(shape: PaddedShape) -> int:
    return shape.cost


def _seconds(recipes: Mapping[Hashable, int]) -> float:
    return sum(map(compile_seconds, recipes.values()))
