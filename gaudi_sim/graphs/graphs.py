"""HPU graphs of the simulated card: one capture per input signature, then replays.

It behaves like newer bridges, which distinguish graphs by dtype as well as by shape. Inputs are
bound again at each replay (`disable_tensor_cache=True`); outputs are static buffers.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from gaudi_sim.card.card import Capture, SimulatedCard, SimulationError
from gaudi_sim.card.device import HpuTensor, active_card, set_tape
from gaudi_sim.card.graph_recorder import GraphRecorder
from gaudi_sim.card.memory import Allocation
from vllm.cost_model.start import graph_bytes


class CapturedGraph:
    """One captured graph, its static outputs, and the memory it holds."""

    def __init__(
        self,
        card: SimulatedCard,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        inputs = _device_tensors((args, kwargs))
        tape = GraphRecorder([x.raw for x in inputs])
        self._is_recorded = card.records_graphs
        with card.capturing() as capture:
            set_tape(tape if self._is_recorded or card.keeps_graph_tensors else None)
            try:
                outputs = forward(*args, **kwargs)
            finally:
                set_tape(None)
        self.outputs = outputs
        self._static = _device_tensors(outputs)
        owned = {x.raw.untyped_storage()._cdata for x in inputs}
        # Results that were written into an input are in place already; the old input must not be
        # written.
        self._is_alias = [x.raw.untyped_storage()._cdata in owned for x in self._static]
        outputs_of = [x.raw for x in self._static]
        num_bytes = graph_bytes(capture.num_ops)
        if card.keeps_graph_tensors:
            num_bytes += _storage_bytes(tape.made) - _storage_bytes(outputs_of)
            num_bytes += _storage_bytes([x.raw for x in inputs])
        tape.end(outputs_of)
        self._card = card
        self._tape = tape
        self._capture = capture
        self._lease = Allocation(card.memory, max(0, num_bytes))

    @property
    def num_bytes(self) -> int:
        """Memory that stays allocated: the graph itself and its outputs."""
        return self._lease.num_bytes + _storage_bytes([x.raw for x in self._static])

    def replay(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph on new inputs of the same shapes, and return the static outputs,
        overwritten.

        Raises:
            RuntimeError: a shape or a dtype differs from the capture.
        """
        inputs = [x.raw for x in _device_tensors((args, kwargs))]
        self._tape.check(inputs)
        if self._card.computes:
            self._compute(inputs)
        self._card.replay(self._capture)
        return self.outputs

    @torch.inference_mode()
    def _compute(self, inputs: list[torch.Tensor]) -> None:
        if not self._is_recorded:
            raise SimulationError(
                "a graph cannot be replayed, because its operators were not recorded"
            )
        results = self._tape.replay(inputs)
        for output, result, is_alias in zip(self._static, results, self._is_alias, strict=True):
            if result is not None and not is_alias:
                output.raw.copy_(result)


class HPUGraph:
    """A graph that its user captures and replays explicitly.

    Everything that the capture creates is kept, and a replay overwrites it. Tensors from before the
    capture are the static inputs: write new data into them.
    """

    def __init__(self) -> None:
        self._card = active_card()
        self._block: AbstractContextManager[None] | None = None
        self._tape: GraphRecorder | None = None
        self._capture: Capture | None = None
        self._static: list[torch.Tensor] = []
        self._leases: list[Allocation] = []

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture the operators in this context; if it raises, nothing is kept."""
        self.reset()
        tape = GraphRecorder(())
        with self._card.capturing() as capture:
            set_tape(tape)
            try:
                yield
            finally:
                set_tape(None)
        self._static = tape.end_with_all()
        self._tape, self._capture = tape, capture
        memory = self._card.memory
        self._leases = [memory.lease_of(raw) for raw in self._static]
        self._leases.append(Allocation(memory, graph_bytes(capture.num_ops)))

    def capture_begin(self, dry_run: bool = False) -> None:
        self._block = self.capturing()
        self._block.__enter__()

    def capture_end(self) -> None:
        """End the capture.

        Raises:
            RuntimeError: no capture has begun.
        """
        if self._block is None:
            raise RuntimeError("capture_end without capture_begin")
        block, self._block = self._block, None
        block.__exit__(None, None, None)

    def replay(self, asynchronous: bool = False) -> None:
        """Run the captured operators again.

        Raises:
            RuntimeError: nothing was captured.
        """
        if self._tape is None or self._capture is None:
            raise RuntimeError("replay of a graph that was not captured")
        if self._card.computes:
            self._compute(self._tape)
        self._card.replay(self._capture)

    @torch.inference_mode()
    def _compute(self, tape: GraphRecorder) -> None:
        for static, result in zip(self._static, tape.replay(()), strict=True):
            assert result is not None
            static.copy_(result)

    def reset(self) -> None:
        """Drop the graph and its memory."""
        self._tape = self._capture = None
        self._static, self._leases = [], []


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of all storages of these tensors, each counted once."""
    return sum({s._cdata: s.nbytes() for s in (x.untyped_storage() for x in tensors)}.values())


def wrap_in_hpu_graph(
    module: nn.Module, card: SimulatedCard, *, max_graphs: int | None = None
) -> nn.Module:
    """Give `module` a forward that captures and replays, and a `clear_cache`.

    Args:
        module: module to wrap.
        card: card that captures.
        max_graphs: limit of captured signatures; others run without a graph, none is evicted.
    """
    graphs: dict[int, CapturedGraph] = {}
    inputs = _KnownInputs()
    forward = module.forward

    @functools.wraps(forward)
    def replaying(
        *args: Any, warmup_mode: bool = False, bypass_hpu_graphs: bool = False, **kwargs: Any
    ) -> Any:
        if bypass_hpu_graphs:
            return forward(*args, **kwargs)
        key = input_hash((args, kwargs))
        graph = graphs.get(key)
        if card.is_strict:
            inputs.check(key, (args, kwargs))
        if graph is None:
            if max_graphs is not None and len(graphs) >= max_graphs:
                return forward(*args, **kwargs)
            graph = graphs[key] = CapturedGraph(card, forward, args, kwargs)
            return graph.outputs
        if warmup_mode:
            card.mark_step()
            return graph.outputs
        return graph.replay(*args, **kwargs)

    module.forward = replaying
    module.clear_cache = graphs.clear  # type: ignore[assignment]
    module.clear_inputs = lambda: None  # type: ignore[assignment]  # none are kept
    return module


class _KnownInputs:
    """Remembers the inputs of a module, to find graphs that a card would confuse."""

    def __init__(self) -> None:
        self._forms: dict[int, Any] = {}
        self._keys: dict[int, int] = {}

    def check(self, key: int, value: Any) -> None:
        """Check that a card would not replay the graph of other inputs for this value.

        Raises:
            SimulationError: it would, since the hashes of the inputs are equal, in this build or in
                an older one, which ignores dtypes.
        """
        form = _form_of(value)
        known = self._forms.setdefault(key, form)
        if known != form:
            raise SimulationError(
                f"the card would replay the graph of {known} for {form}, because the hashes of "
                "both inputs are equal"
            )
        if self._keys.setdefault(_hash(value, with_types=False), key) != key:
            raise SimulationError(
                f"the inputs of two graphs must differ in more than a dtype, got {form}"
            )


def _form_of(value: Any) -> Any:
    """Return all properties of a value that a graph may depend on, as a comparable value."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype)
    if isinstance(value, dict):
        return {name: _form_of(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_form_of(x) for x in value)
    if is_dataclass(value) and not isinstance(value, type):
        return tuple(_form_of(getattr(value, f.name)) for f in fields(value))
    return type(value).__name__, value


def input_hash(value: Any) -> int:
    """Return the hash by which a graph is found: shape, dtype and layout of tensors, else `hash`.

    As in the bridge, equal hashes count as equal inputs: True, 1 and 1.0 are one graph.
    """
    return _hash(value, with_types=True)


def _hash(value: Any, *, with_types: bool) -> int:
    if isinstance(value, torch.Tensor):
        layout = (tuple(value.shape), value.stride(), value.storage_offset())
        return hash((layout, value.dtype) if with_types else layout)
    if isinstance(value, dict):
        pairs = value.items()
        return hash(tuple((hash(k), _hash(x, with_types=with_types)) for k, x in pairs))
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, f.name) for f in fields(value)]
    if isinstance(value, list | tuple):
        return hash(tuple(_hash(x, with_types=with_types) for x in value))
    return hash(value)


def _device_tensors(value: Any) -> list[HpuTensor]:
    return list(_walk(value))


def _walk(value: Any) -> Iterator[HpuTensor]:
    if isinstance(value, HpuTensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _walk(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _walk(item)
    elif hasattr(value, "__dict__") and not isinstance(value, torch.Tensor | type):
        yield from _walk(vars(value))
