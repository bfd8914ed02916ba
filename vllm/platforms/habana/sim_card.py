"""A simulated card: what it compiles, launches, copies and waits for, as it would be counted.

Knows operators only by name, signature and cost; the tensors are `sim_device`'s. Which result
feeds which operator is not part of a recipe's key, so two graphs that differ in nothing else
count as one.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.platforms.habana import sim_spec
from vllm.platforms.habana.bridge import DeviceCounters
from vllm.platforms.habana.sim_clock import Clock, Work
from vllm.platforms.habana.sim_memory import MemoryPool
from vllm.platforms.habana.sim_spec import CardSpec


class SimulationError(RuntimeError):
    """The engine did what a card does not allow, or what a warmed step must not do."""


class _Step:
    """Operators recorded up to the next flush: the key and the cost of one recipe."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self.num_ops = 0
        self.compute_s = 0.0

    def add(self, signature: str, compute_s: float) -> None:
        self._digest.update(signature.encode())
        self._digest.update(b"\0")
        self.num_ops += 1
        self.compute_s += compute_s

    @property
    def key(self) -> bytes:
        return self._digest.digest()


class Capture:
    """What a graph capture has seen so far."""

    def __init__(self) -> None:
        self.num_ops = 0
        self.num_subgraphs = 0
        self.compute_s = 0.0


class SimulatedCard:
    """The state of the one card of this process."""

    def __init__(self, spec: CardSpec, *, is_lazy: bool, is_strict: bool) -> None:
        self.spec = spec
        self.is_lazy = is_lazy
        self.is_strict = is_strict
        self.clock = Clock(spec)
        self.memory = MemoryPool(spec.pool_bytes, narrow_int64=is_lazy)
        self.capture: Capture | None = None
        self._step = _Step()
        self._recipes: set[bytes] = set()
        self._regions = 0  # compiled callables that are running, one inside the other
        self._warmed = 0
        self._num_compilations = 0
        self._compile_s = 0.0
        self._cpu_fallbacks: Counter[str] = Counter()
        self._num_captures = 0
        self._num_replays = 0
        self._num_host_syncs = 0
        self._h2d_bytes = 0
        self._d2h_bytes = 0

    def counters(self) -> DeviceCounters:
        return DeviceCounters(
            compilations=self._num_compilations,
            compile_s=self._compile_s,
            cpu_fallbacks=dict(self._cpu_fallbacks),
            graph_captures=self._num_captures,
            graph_replays=self._num_replays,
            host_syncs=self._num_host_syncs,
            h2d_bytes=self._h2d_bytes,
            d2h_bytes=self._d2h_bytes,
        )

    @property
    def is_recording(self) -> bool:
        """Whether operators become part of one recipe, instead of running one by one."""
        return self.is_lazy or self._regions > 0

    def run(self, signature: str, work: Work) -> None:
        """One operator: recorded, or in eager mode launched at once."""
        if self.is_recording:
            self.clock.host_s += sim_spec.RECORD_OP_S
            self._step.add(signature, work.seconds(self.spec))
            return
        key = hashlib.blake2b(signature.encode(), digest_size=16).digest()
        self._compile(key, 1, f"operator {signature}", counts=False)
        self.clock.launch(sim_spec.LAUNCH_EAGER_OP_S, work.seconds(self.spec))

    def flush(self) -> None:
        """Compile what is recorded if it is new, and launch it."""
        step, self._step = self._step, _Step()
        if not step.compute_s:  # empty, or views that nothing has used
            return
        self._compile(step.key, step.num_ops, f"a graph of {step.num_ops} operators")
        if self.capture is not None:
            self.capture.num_ops += step.num_ops
            self.capture.num_subgraphs += 1
            self.capture.compute_s += step.compute_s
        self.clock.launch(sim_spec.LAUNCH_STEP_S, step.compute_s)

    def mark_step(self) -> None:
        """Flush in lazy mode; in eager mode there is nothing to end."""
        if self.is_lazy:
            self.flush()

    def synchronize(self) -> None:
        """`torch.hpu.synchronize`: asked for, so not counted as a host sync."""
        self._refuse_in_capture("synchronize")
        self.flush()
        self.clock.sync()

    def host_sync(self, cause: str) -> None:
        """The host reads something back and waits for all that was launched."""
        self._refuse_in_capture(cause)
        self._refuse_when_warmed(f"host sync by {cause}")
        self._num_host_syncs += 1
        self.flush()
        self.clock.sync()

    def dynamic_shape(self, cause: str) -> None:
        """The shape of a result depends on data: the host has to look at it."""
        self._refuse_when_warmed(f"dynamic shape of {cause}")
        self.host_sync(cause)

    def cpu_fallback(self, op_name: str, num_bytes: int) -> None:
        """The device has no such kernel: flush, copy out, compute on the host, copy back."""
        if self.capture is not None:
            raise SimulationError(
                f"cpu fallback is not supported during hpu graph capturing: {op_name}"
            )
        self._refuse_when_warmed(f"cpu fallback of {op_name}")
        self._cpu_fallbacks[op_name] += 1
        self.flush()
        self.clock.copy(2 * num_bytes)
        self.clock.sync()

    def copy_to_device(self, num_bytes: int) -> None:
        self._h2d_bytes += num_bytes
        self.clock.copy(num_bytes)

    def copy_to_host(self, num_bytes: int, cause: str, *, waits: bool) -> None:
        """A copy out. One that does not wait is no sync, but it ends the recorded graph."""
        if waits:
            self.host_sync(cause)
        else:
            self._refuse_in_capture(cause)
            self.flush()
        self._d2h_bytes += num_bytes
        self.clock.copy(num_bytes)
        if waits:
            self.clock.sync()

    @contextmanager
    def compiled_region(self) -> Iterator[None]:
        """Operators inside are one recipe: a callable of `torch.compile`."""
        self._regions += 1
        try:
            yield
        except BaseException:
            self._step = _Step()  # a callable that failed is not launched
            raise
        finally:
            self._regions -= 1
        if not self._regions:
            self.flush()

    @contextmanager
    def capturing(self) -> Iterator[Capture]:
        """Record a graph from here to the end of the block."""
        if self.capture is not None:
            raise SimulationError("a capture cannot begin inside another one")
        self._refuse_when_warmed("graph capture")
        self.flush()
        self.capture = capture = Capture()
        try:
            yield capture
            self.flush()
        finally:
            self._step = _Step()  # of a capture that failed
            self.capture = None
        self._num_captures += 1
        self.clock.capture(capture.num_ops)

    def replay(self, capture: Capture) -> None:
        """Launch a captured graph again."""
        self._refuse_in_capture("replay")
        self.flush()
        self._num_replays += 1
        further = max(0, capture.num_subgraphs - 1) * sim_spec.REPLAY_SUBGRAPH_S
        self.clock.launch(sim_spec.REPLAY_GRAPH_S + further, capture.compute_s)

    @contextmanager
    def warmed_section(self) -> Iterator[None]:
        """In strict mode, whatever stalls a card raises inside; what is recorded ends here."""
        self.flush()  # what came before does not belong to the section
        self._warmed += 1
        try:
            yield
            self.flush()
        finally:
            self._warmed -= 1

    def _compile(self, key: bytes, num_ops: int, what: str, *, counts: bool = True) -> None:
        if key in self._recipes:
            return
        self._refuse_when_warmed(f"compilation of {what}")
        self._recipes.add(key)
        seconds = self.clock.compile(num_ops)
        if counts:
            self._num_compilations += 1
            self._compile_s += seconds

    def _refuse_in_capture(self, what: str) -> None:
        if self.capture is not None:
            raise SimulationError(f"{what} is not possible during hpu graph capturing")

    def _refuse_when_warmed(self, what: str) -> None:
        if self._warmed and self.is_strict:
            raise SimulationError(f"{what} inside a warmed section")
