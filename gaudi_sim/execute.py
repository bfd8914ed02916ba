"""Runs the operators of the simulated device.

The module refuses what a card refuses, adds the operator's cost to the time of the card, and
computes on the CPU unless the card only compiles. Results that depend only on the operator and on
shapes, dtypes and other values are cached, since this module's overhead slows down every test in
simulation.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses import FakeTensor

from gaudi_sim.card.args import leaves_of, map_leaves
from gaudi_sim.card.card import Signature, SimulatedCard
from gaudi_sim.card.device import DEVICE, HpuTensor, active_card, active_tape
from gaudi_sim.card.memory import Allocation
from gaudi_sim.card.unlaunched import Results, results_of
from gaudi_sim.kernels.semantics import SEMANTICS, collective
from gaudi_sim.operators import needs_host, signature_of
from vllm.cost_model.links import empty_all_reduce_seconds, moving_seconds
from vllm.cost_model.work import work_of

_ALLOCATIONS = ("aten::empty.memory_format", "aten::empty_strided")
_COPIES = ("aten::_to_copy", "aten::copy_")
_INT32 = torch.iinfo(torch.int32)
_CPU = torch.device("cpu")
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def execute(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operator like the card would, on the underlying CPU tensors."""
    operator = _OPERATORS.get(id(op))
    if operator is None:
        operator = _OPERATORS[id(op)] = _Operator(op)
    # In inference mode, composite operators such as `linear` are not decomposed.
    if operator.is_composite:
        return op._op_dk(_COMPOSITE, *args, **kwargs)
    call = _Call(operator, args, kwargs)
    if call.is_traced:
        return call.trace()
    card = active_card()
    if operator.is_copy and (copy := _copy_of(operator, args, kwargs)):
        return copy(call, card)
    if call.has_host_operand and call.wrappers:
        raise RuntimeError(
            f"{operator.name}: expected all tensors on one device, found {DEVICE}:0 and cpu"
        )
    if operator.is_collective:
        if not card.has_lazy_collectives:
            return call.exchange(card)
        card.check_recorded_collective(operator.name)
    return call.compute(card)


def _group_size(args: list[Any]) -> int:
    """Return the number of cards of the process group among the arguments of a collective; 1 if
    there is none.
    """
    for x in args:
        kind: Any = x._type() if isinstance(x, torch.ScriptObject) else None
        if kind is not None and kind.name() == "ProcessGroup":
            return int(torch.distributed.ProcessGroup.unbox(x).size())
    return 1


class _Operator:
    """The properties of an operator that are the same in all of its calls."""

    __slots__ = (
        "can_be_skipped",
        "is_allocation",
        "is_collective",
        "is_composite",
        "is_copy",
        "is_unbind",
        "is_view",
        "is_write",
        "name",
        "op",
        "reads_values",
        "run",
    )

    def __init__(self, op: Any) -> None:
        self.op = op
        self.name: str = op.name()
        self.is_collective = self.name.startswith("c10d::")
        self.run = collective(op) if self.is_collective else SEMANTICS.get(self.name, op)
        self.is_view: bool = op.is_view
        self.is_unbind = self.name == "aten::unbind.int"
        self.is_write: bool = op._schema.is_mutable
        self.is_allocation = self.name in _ALLOCATIONS
        self.is_copy = self.name in _COPIES
        self.reads_values = torch.Tag.data_dependent_output in op.tags
        # Exchanges are never skipped, because the other cards wait for this one.
        self.can_be_skipped = not (self.is_view or self.is_collective or self.reads_values)
        has_kernel_for = torch._C._dispatch_has_kernel_for_dispatch_key
        self.is_composite: bool = has_kernel_for(self.name, _COMPOSITE)


_OPERATORS: dict[int, _Operator] = {}
"""Operators by id: a method in Python would compute the hash of the object itself."""
_RESULTS: dict[Hashable, Results | None] = {}
"""Results of operators in compile-only mode, by operator, operands and default dtype; None: they
must be computed. All cards of a process share them.
"""
_UNKNOWN = object()
_NUMBERS_AND_NAMES = frozenset({bool, float, str, torch.dtype, torch.layout, torch.memory_format})


def _copy_of(
    operator: _Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> "Callable[[_Call, SimulatedCard], Any] | None":
    """Return how to copy between host and card; None if both tensors are on the card."""
    if operator.name == "aten::_to_copy":
        target = kwargs.get("device")
        if target is None or target.type == DEVICE:
            return None
        waits = not kwargs.get("non_blocking")
        return lambda call, card: call.to_host(card, args[0], waits=waits)
    target, source = args[:2]
    if not isinstance(target, HpuTensor):
        waits = not (len(args) > 2 and args[2])
        return lambda call, card: call.to_host(card, source, waits=waits, into=target)
    if not isinstance(source, HpuTensor):
        waits = not (len(args) > 2 and args[2])
        return lambda call, card: call.to_device(card, target, source, waits=waits)
    return None


def _on_cpu(x: Any) -> Any:
    """Convert a fake tensor on the card to one on the host; return all other values unchanged."""
    if type(x) is not FakeTensor or x.device.type != DEVICE:
        return x
    with x.fake_mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=_CPU)


class _Call:
    """One call of an operator with its operands unwrapped.

    Its key is the operator with what a recipe knows of the operands: shapes, dtypes and numbers.
    """

    __slots__ = ("args", "has_host_operand", "is_traced", "key", "kwargs", "operator", "wrappers")

    def __init__(self, operator: _Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.operator = operator
        self.wrappers: list[HpuTensor] = []
        self.has_host_operand = False
        self.is_traced = False
        self.key: list[Any] = [operator]
        unwrap = self._unwrap
        self.args = [unwrap(x) for x in args]
        self.kwargs: dict[str, Any] = {}
        for name, x in kwargs.items():
            self.key.append(name)
            self.kwargs[name] = unwrap(x)

    def _unwrap(self, x: Any) -> Any:
        kind = type(x)
        if kind is HpuTensor:
            raw = x.raw
            self.wrappers.append(x)
            self.key += (raw.shape, raw.dtype)
            if type(raw) is FakeTensor:
                self.is_traced = True
            return raw
        if kind is int or x is None:
            self.key.append(x)
            return x
        if kind is list or kind is tuple:
            self.key.append(len(x))
            return [self._unwrap(item) for item in x]
        return self._unwrap_other(x)

    def _unwrap_other(self, x: Any) -> Any:
        if type(x) in _NUMBERS_AND_NAMES:
            self.key.append(repr(x))  # repr distinguishes True and 1.0 from the equal integer
        elif isinstance(x, list | tuple):
            self.key.append(len(x))
            return [self._unwrap(item) for item in x]
        elif isinstance(x, torch.Tensor):
            # Scalars on the host are allowed, as on a real card.
            self.has_host_operand |= x.dim() > 0
            self.key += (x.shape, x.dtype)
        elif isinstance(x, torch.device) and x.type == DEVICE:
            if x.index not in (None, 0):
                raise RuntimeError(
                    f"Invalid device id {x.index}: a process has one card, {DEVICE}:0"
                )
            x = _CPU
        elif isinstance(x, torch.Generator | torch.ScriptObject):
            self.key.append(type(x).__name__)
        else:
            self.key.append(repr(x))
        return x

    def _wrap(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        for wrapper in self.wrappers:
            if wrapper.raw is x:  # an in-place operator returns its input
                return wrapper
        if not self.operator.is_view or not self.wrappers:
            return HpuTensor(x)
        base = self.wrappers[0]
        if torch.is_inference_mode_enabled() and not base.is_inference():
            with torch.inference_mode(False):  # a view has the same mode as its base
                return HpuTensor(x, base.lease, is_view=True)
        return HpuTensor(x, base.lease, is_view=True)

    def trace(self) -> Any:
        """Return results with only shapes and dtypes, which Dynamo needs while it traces."""
        args, kwargs = map_leaves(_on_cpu, (self.args, self.kwargs))
        raw = self.operator.op(*args, **kwargs)
        return map_leaves(self._wrap, raw)

    def to_device(
        self, card: SimulatedCard, target: HpuTensor, source: torch.Tensor, *, waits: bool
    ) -> torch.Tensor:
        if source.dtype == torch.int64 and card.is_lazy and source.numel():
            low, high = source.aminmax()
            if low < _INT32.min or high > _INT32.max:
                raise RuntimeError(
                    "Error when trying to cast Long to Int, Input values range exceeds Int range"
                )
        num_bytes = card.memory.device_bytes(source.nbytes, source.dtype)
        card.copy_to_device(num_bytes, waits=waits)
        run = self.operator.run
        raw = run(*self.args, **self.kwargs)
        if tape := active_tape():  # a replay copies the data that was there during the capture
            tape.record(run, self.args, self.kwargs, raw)
        return target

    def to_host(
        self,
        card: SimulatedCard,
        source: torch.Tensor,
        *,
        waits: bool,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_bytes = card.memory.device_bytes(source.nbytes, source.dtype)
        card.copy_to_host(num_bytes, waits=waits)
        result = self.operator.op(*self.args, **self.kwargs)
        return result if into is None else into

    def compute(self, card: SimulatedCard) -> Any:
        operator = self.operator
        if operator.is_allocation:
            self._check_room(card)  # checked before the host allocates memory
        copied: list[tuple[Allocation, int]] = []
        if operator.is_write and card.is_lazy and any(x.is_view for x in self.wrappers):
            copied = self._copied_bases()
            self.key += [num_bytes for _, num_bytes in copied]
        key = tuple(self.key)
        signature = card.signatures.get(key)
        if signature is None:
            need = needs_host(operator.op, self.args, self.kwargs, is_lazy=card.is_lazy)
        else:
            need = signature.host_need
        if operator.reads_values:
            card.host_sync(operator.name)
        elif need == "shape":
            card.dynamic_shape(operator.name)
        elif need is not None:
            card.cpu_fallback(operator.name, self._num_bytes())
        parts = None
        # Views without values are kept: making the views of all experts of a layer takes long.
        is_kept = operator.is_unbind and not card.computes and self.wrappers[0].is_inference()
        if is_kept:
            seen, parts = self.wrappers[0].parts
            parts = parts if seen == key else None
        raw: Any
        if parts is not None:
            raw = [part.raw for part in parts]
        else:
            known = self._known_results(key, need) if not card.computes else None
            run = operator.run if known is None else known.make
            raw = run(*self.args, **self.kwargs)
        if signature is None:
            copied_bytes = sum(num_bytes for _, num_bytes in copied)
            signature = card.signatures[key] = self._signature(card, need, raw, copied_bytes)
        for lease, num_bytes in copied:
            card.copy_whole(lease, num_bytes)
            Allocation(card.memory, num_bytes)  # memory that is in use during the copy
        # Outside of a recipe, a view launches nothing.
        if signature.is_launched and (card.is_recording or not operator.is_view):
            card.run(signature)
        if tape := active_tape():
            tape.record(operator.run, self.args, self.kwargs, raw, is_view=operator.is_view)
        if parts is not None:
            return parts
        wrapped = self._wrap(raw) if type(raw) is torch.Tensor else map_leaves(self._wrap, raw)
        if is_kept:
            self.wrappers[0].parts = key, wrapped
        return wrapped

    def _known_results(self, key: tuple[Any, ...], need: str | None) -> Results | None:
        """Return the results as far as they are known without computing; None: they must be
        computed.
        """
        operator = self.operator
        has_data_shape = need == "shape" and not operator.op._schema.is_mutable
        if not operator.can_be_skipped or has_data_shape or self.has_host_operand:
            return None
        strides = tuple([x.raw.stride() for x in self.wrappers])
        layout = (key, strides, torch.get_default_dtype())
        found: Any = _RESULTS.get(layout, _UNKNOWN)
        if found is _UNKNOWN:
            found = _RESULTS[layout] = results_of(operator.op, self.args, self.kwargs)
        known: Results | None = found
        return known

    def _copied_bases(self) -> list[tuple[Allocation, int]]:
        """Return the memory, with its bytes, that a write in lazy mode copies as a whole.

        It is the memory under the views that are written, because the bridge inserts these into a
        new tensor.
        """
        schema = self.operator.op._schema
        written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
        names = [a.name for a in schema.arguments]
        given = dict(zip(names, self.args, strict=False)) | self.kwargs
        targets = {id(x) for name in written for x in leaves_of(given.get(name))}
        return [
            (x.lease, x.raw.untyped_storage().nbytes())
            for x in self.wrappers
            if x.is_view and id(x.raw) in targets
        ]

    def exchange(self, card: SimulatedCard) -> Any:
        """Run a collective that is not part of a recipe."""
        card.collective(self._exchange_s(card))
        return map_leaves(self._wrap, self.operator.run(*self.args, **self.kwargs))

    def _num_bytes(self) -> int:
        return sum(x.raw.nbytes for x in self.wrappers)

    def _exchange_s(self, card: SimulatedCard) -> float:
        """Return the seconds in which a collective moves its data."""
        name, num_cards = self.operator.name, _group_size(self.args)
        num_bytes = float(self._num_bytes())
        if "gather" in name:  # half of its result, see `links.all_reduce_bytes`
            num_bytes *= num_cards / (num_cards + 1) / 2
        elif "reduce" not in name:  # all of it crosses the links to one other card once
            num_bytes, num_cards = num_bytes / 2, 2
        moving_s = float(moving_seconds(card.spec, num_bytes, max(num_cards, 2)))
        return moving_s + empty_all_reduce_seconds(card.spec)

    def _signature(
        self, card: SimulatedCard, need: str | None, raw: Any, copied_bytes: int
    ) -> Signature:
        """Return the signature of this call, after its result is known."""
        op = self.operator.op
        results = [x for x in leaves_of(raw) if isinstance(x, torch.Tensor)]
        operands = [x for x in leaves_of(self.args) if isinstance(x, torch.Tensor)]
        # An allocation is not an operation of a recipe.
        is_launched = bool(results) and not self.operator.is_allocation
        seconds, work = 0.0, None
        if self.operator.is_collective:
            seconds = self._exchange_s(card)
        elif is_launched:
            work = work_of(op, operands, results)
            work = replace(work, num_bytes=work.num_bytes + 2 * copied_bytes)
            seconds = work.seconds(card.spec)
        text = signature_of(op, self.args, self.kwargs)
        return Signature(text, seconds, need, is_launched=is_launched, work=work)

    def _check_room(self, card: SimulatedCard) -> None:
        dtype = self.kwargs.get("dtype") or torch.get_default_dtype()
        num_elements = 1
        for size in self.args[0]:
            num_elements *= size
        num_bytes = num_elements * dtype.itemsize
        card.memory.check(card.memory.device_bytes(num_bytes, dtype))
