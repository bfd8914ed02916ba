"""A simulated card: counts what it would compile, launch, copy and wait for.

It knows operators only by name, signature and cost; the tensors are in `device`. Data flow between
operators is not part of a recipe's key, so two graphs that differ only in it count as one.
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

from gaudi_sim.card.clock import Clock
from gaudi_sim.card.memory import Allocation, MemoryPool
from gaudi_sim.card.recipes import RecipeCache
from vllm.cost_model import constants
from vllm.cost_model.cards import CardSpec
from vllm.cost_model.work import Work
from vllm.platforms.habana.bridge import DeviceCounters


class SimulationError(RuntimeError):
    """The engine did something that a card does not allow, or that a warmed step must not do."""


class Signature:
    """An operator with the shapes, dtypes and numbers it is called with: a node of a recipe.

    A card has one object for each signature, so recipes are compared by identity.
    """

    __slots__ = ("compute_s", "host_need", "is_launched", "text", "work")

    def __init__(
        self,
        text: str,
        compute_s: float,
        host_need: str | None,
        *,
        is_launched: bool,
        work: Work | None = None,
    ) -> None:
        """Create a signature.

        Args:
            text: the signature as text.
            compute_s: seconds that the operator computes.
            host_need: the result of `operators.needs_host`.
            is_launched: False for an allocation and for operators without a tensor as result.
            work: FLOPs and bytes of HBM; None: it has neither.
        """
        self.text = text
        self.compute_s = compute_s
        self.host_need = host_need
        self.is_launched = is_launched
        self.work = Work() if work is None else work


Recipe = tuple[Signature, ...]


class Capture:
    """The state of a graph capture so far."""

    def __init__(self) -> None:
        self.num_ops = 0
        self.num_subgraphs = 0
        self.compute_s = 0.0
        self.copied_bytes = 0
        self.num_cache_copies = 0


class SimulatedCard:
    """The state of the one card of this process."""

    def __init__(
        self,
        spec: CardSpec,
        *,
        is_lazy: bool,
        is_strict: bool,
        has_lazy_collectives: bool = False,
        keeps_graph_tensors: bool = False,
        records_graphs: bool = True,
        recipe_cache: RecipeCache | None = None,
    ) -> None:
        """Create a card.

        Args:
            spec: description of the card.
            is_lazy: operators are recorded until a mark.
            is_strict: everything that stalls a card raises in a warmed section.
            has_lazy_collectives: in lazy mode, collectives are recorded like any operator.
            keeps_graph_tensors: a graph keeps all tensors of its capture, not only its outputs.
            records_graphs: graphs can be replayed with values. Recording the operators takes longer
                than running them in a dry run.
            recipe_cache: where recipes are kept; None: nowhere.
        """
        self.spec = spec
        self.has_lazy_collectives = is_lazy and has_lazy_collectives
        self.keeps_graph_tensors = keeps_graph_tensors
        self.records_graphs = records_graphs
        self._cache = recipe_cache
        self.is_lazy = is_lazy
        self.is_strict = is_strict
        self.clock = Clock(spec)
        self.memory = MemoryPool(spec.pool_bytes, narrow_int64=is_lazy)
        self.memory.is_recording = is_lazy
        self.capture: Capture | None = None
        self.is_compile_only = False
        """Recipes are compiled but not launched. On a card the results are then garbage;
        here it is zeros."""
        self.is_dry_run = False
        """Recipes are launched, and take time and memory, but the results are zeros: nobody reads
        them."""
        self.signatures: dict[Hashable, Signature] = {}
        """Results of operators of the simulated device so far, by operator and kinds of
        operands."""
        self._step: list[Signature] = []  # operations recorded since the last flush
        self._recipes_seen: list[Recipe] | None = None
        self._recipes: set[Hashable] = set()
        self._regions = 0  # depth of running compiled functions
        self._warmed = 0
        self._num_compilations = 0
        self._compile_s = 0.0
        self._compiled: list[tuple[str, int]] = []
        self._cpu_fallbacks: Counter[str] = Counter()
        self.caches: WeakSet[Allocation] = WeakSet()
        """Memory that is meant to be written in place."""
        self._copied_bytes = 0
        self._num_cache_copies = 0
        self.num_launches = 0
        self._num_captures = 0
        self._num_replays = 0
        self._num_host_syncs = 0
        self._h2d_bytes = 0
        self._num_blocking_h2d = 0
        self._d2h_bytes = 0

    def counters(self) -> DeviceCounters:
        return DeviceCounters(
            compilations=self._num_compilations,
            compile_s=self._compile_s,
            cpu_fallbacks=dict(self._cpu_fallbacks),
            launches=self.num_launches,
            graph_captures=self._num_captures,
            graph_replays=self._num_replays,
            host_syncs=self._num_host_syncs,
            h2d_bytes=self._h2d_bytes,
            d2h_bytes=self._d2h_bytes,
            blocking_h2d=self._num_blocking_h2d,
            copied_bytes=self._copied_bytes,
            cache_copies=self._num_cache_copies,
            recipes=tuple(self._compiled),
        )

    @property
    def computes(self) -> bool:
        """Whether operators compute values."""
        return not (self.is_compile_only or self.is_dry_run)

    @property
    def is_recording(self) -> bool:
        """Whether operators are recorded into one recipe, instead of running one by one."""
        return self.is_lazy or self._regions > 0

    def run(self, signature: Signature) -> None:
        """Run one operator: record it, or in eager mode launch it at once."""
        if self.is_lazy or self._regions:
            self.clock.host_s += constants.RECORD_OP_S
            self._step.append(signature)
            return
        if self._recipes_seen is not None:
            self._recipes_seen.append((signature,))
        if signature not in self._recipes:
            self._compile_operator(signature)
        self._launch(constants.LAUNCH_EAGER_OP_S, signature.compute_s)

    def flush(self) -> None:
        """Compile the recorded operators if they are a new recipe, and launch the recipe."""
        step, self._step = self._step, []
        compute_s = sum([signature.compute_s for signature in step])
        self.memory.end_recipe(is_launched=compute_s > 0 and not self.is_compile_only)
        if not compute_s:  # an empty result, or a view that was not used
            return
        if self._recipes_seen is not None:
            self._recipes_seen.append(tuple(step))
        self._compile(tuple(step))
        if self.capture is not None:
            self.capture.num_ops += len(step)
            self.capture.num_subgraphs += 1
            self.capture.compute_s += compute_s
        self._launch(constants.LAUNCH_STEP_S, compute_s)

    @contextmanager
    def recipes_launched(self) -> Iterator[list[Recipe]]:
        """Yield a list to which each recipe that is launched in this context is appended."""
        self.flush()
        seen: list[Recipe] = []
        self._recipes_seen = seen
        try:
            yield seen
            self.flush()
        finally:
            self._recipes_seen = None

    def mark_step(self) -> None:
        """Flush in lazy mode; do nothing in eager mode."""
        if self.is_lazy:
            self.flush()

    def synchronize(self) -> None:
        """Wait like `torch.hpu.synchronize`; explicit waits are not counted as host syncs."""
        self._refuse_in_capture("synchronize")
        self.flush()
        self.clock.sync()

    def host_sync(self, cause: str) -> None:
        """Count a host sync: the host reads a value and waits for everything that was launched."""
        self._refuse_in_capture(cause)
        self._refuse_when_warmed(f"host sync by {cause}")
        self._num_host_syncs += 1
        self.flush()
        self.clock.sync()

    def dynamic_shape(self, cause: str) -> None:
        """Count a dynamic shape: the host must read data to know the shape of a result."""
        self._refuse_when_warmed(f"dynamic shape of {cause}")
        self.host_sync(cause)

    def cpu_fallback(self, op_name: str, num_bytes: int) -> None:
        """Add the time of an operator without a kernel, which is computed on the host."""
        if self.capture is not None:
            raise SimulationError(
                f"cpu fallback is not supported during hpu graph capturing: {op_name}"
            )
        self._refuse_when_warmed(f"cpu fallback of {op_name}")
        self._cpu_fallbacks[op_name] += 1
        self.flush()
        self.clock.copy(2 * num_bytes)
        self.clock.sync()

    def copy_whole(self, lease: Allocation, num_bytes: int) -> None:
        """Count the copy of a whole tensor that was written through a view.

        Args:
            lease: allocation that holds the tensor.
            num_bytes: size of the tensor.
        """
        num_caches = int(lease in self.caches)
        if self.capture is not None:
            self.capture.copied_bytes += num_bytes
            self.capture.num_cache_copies += num_caches
        self._count_copies(num_bytes, num_caches)

    def _count_copies(self, num_bytes: int, num_caches: int) -> None:
        self._copied_bytes += num_bytes
        self._num_cache_copies += num_caches

    def copy_to_device(self, num_bytes: int, *, waits: bool) -> None:
        self._h2d_bytes += num_bytes
        self._num_blocking_h2d += waits
        self.clock.copy(num_bytes)

    def copy_to_host(self, num_bytes: int, *, waits: bool) -> None:
        """Add the time of a copy to the host.

        If it does not wait it is not a sync, but ends the recorded graph.
        """
        cause = "a copy to the host"
        if waits:
            self.host_sync(cause)
        else:
            self._refuse_in_capture(cause)
            self.flush()
        self._d2h_bytes += num_bytes
        self.clock.copy(num_bytes)
        if waits:
            self.clock.sync()

    def collective(self, compute_s: float) -> None:
        """Add the time of an exchange with other cards that is not part of a recipe.

        The exchange ends the recorded graph.

        Args:
            compute_s: seconds in which the links move the data.
        """
        if self.capture is not None:
            raise SimulationError(
                "collective nonSFG is not supported during hpu graph capturing: "
                "it needs PT_HPU_ENABLE_LAZY_COLLECTIVES=true"
            )
        self.flush()
        self._launch(constants.LAUNCH_EAGER_OP_S, compute_s)

    def check_recorded_collective(self, name: str) -> None:
        """Check that nothing is recorded before a collective that becomes part of a recipe.

        Raises:
            SimulationError: in strict mode, if operators have been recorded since the last step.
                Some builds of the bridge compute wrong results then.
        """
        if self.is_strict and self._step:
            raise SimulationError(
                f"{name} must not follow recorded operators in the same step, got "
                f"{len(self._step)}: call mark_step before it"
            )

    @contextmanager
    def compiled_region(self) -> Iterator[None]:
        """Make the operators in this context one recipe, like a callable of `torch.compile`."""
        self._regions += 1
        self.memory.is_recording = True
        try:
            yield
        except BaseException:
            self._step = []  # a function that failed is not launched
            self.memory.end_recipe(is_launched=False)
            raise
        finally:
            self._regions -= 1
            self.memory.is_recording = self.is_recording
        if not self._regions:
            self.flush()

    @contextmanager
    def capturing(self) -> Iterator[Capture]:
        """Capture a graph of the operators in this context."""
        if self.capture is not None:
            raise SimulationError("a capture cannot begin inside another one")
        self._refuse_when_warmed("graph capture")
        self.flush()
        self.capture = capture = Capture()
        try:
            yield capture
            self.flush()
        finally:
            self._step = []  # drops what a failed capture has recorded
            self.capture = None
        self._num_captures += 1
        self.clock.capture(capture.num_subgraphs)

    def replay(self, capture: Capture) -> None:
        """Launch a captured graph again."""
        self._refuse_in_capture("replay")
        self.flush()
        self._num_replays += 1
        self._count_copies(capture.copied_bytes, capture.num_cache_copies)
        further = max(0, capture.num_subgraphs - 1) * constants.REPLAY_SUBGRAPH_S
        self._launch(constants.REPLAY_GRAPH_S + further, capture.compute_s)

    @contextmanager
    def warmed_section(self) -> Iterator[None]:
        """Raise in strict mode on everything that stalls a card in this context.

        The recorded graph ends first.
        """
        self.flush()  # earlier operations do not belong to the section
        self._warmed += 1
        try:
            yield
            self.flush()
        finally:
            self._warmed -= 1

    def _launch(self, host_s: float, compute_s: float) -> None:
        if not self.is_compile_only:
            self.num_launches += 1
            self.clock.launch(host_s, compute_s)

    def _compile(self, step: tuple[Signature, ...]) -> None:
        """Compile one recipe, unless it is known or in the cache on disk."""
        if step in self._recipes:
            return
        text = "\n".join([self.spec.name, *[signature.text for signature in step]])
        if self._cache is None or text not in self._cache:
            self._refuse_when_warmed(f"compilation of a graph of {len(step)} operators")
            self._num_compilations += 1
            seconds = self.clock.compile(len(step))
            self._compile_s += seconds
            name = f"recipe_{self._num_compilations}_of_{len(step)}_operators"
            self._compiled.append((name, round(seconds * 1e6)))
            if self._cache is not None:
                self._cache.add(text)
        self._recipes.add(step)

    def _compile_operator(self, signature: Signature) -> None:
        """Compile the recipe of one operator, which is not counted in eager mode."""
        self._refuse_when_warmed(f"compilation of operator {signature.text}")
        self.clock.compile(1)
        self._recipes.add(signature)

    def _refuse_in_capture(self, what: str) -> None:
        if self.capture is not None:
            raise SimulationError(f"{what} is not possible during hpu graph capturing")

    def _refuse_when_warmed(self, what: str) -> None:
        if self._warmed and self.is_strict:
            raise SimulationError(f"{what} inside a warmed section")
