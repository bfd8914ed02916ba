"""The torch device `hpu` of the simulation: tensors of it are CPU tensors under another name.

`install` registers the device in this process, once; without it nothing of torch is touched.
Every operator on such tensors passes `execute`, which refuses what a card refuses, tells the
card what it costs, and computes on the CPU. Random numbers are the CPU generator's.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import backend_registration

from vllm.errors import ConfigError
from vllm.platforms.habana.bridge import COMPILE_BACKEND
from vllm.platforms.habana.sim_args import leaves_of, map_leaves
from vllm.platforms.habana.sim_card import SimulatedCard
from vllm.platforms.habana.sim_cost import needs_host, signature_of, work_of
from vllm.platforms.habana.sim_memory import Lease
from vllm.platforms.habana.sim_tape import Tape

DEVICE = "hpu"

_ALLOCATIONS = ("aten::empty.memory_format", "aten::empty_strided")
_INT32 = torch.iinfo(torch.int32)


class _Installed:
    """What is registered in this process, and the card that serves it now."""

    library: torch.library.Library | None = None
    card: SimulatedCard | None = None
    tape: Tape | None = None


def active_card() -> SimulatedCard:
    """The card that the device `hpu` stands for."""
    assert _Installed.card is not None, "no simulated card is installed"
    return _Installed.card


def set_tape(tape: Tape | None) -> None:
    """From here on, operators are recorded on `tape` too."""
    _Installed.tape = tape


class HpuTensor(torch.Tensor):
    """A tensor on `hpu:0` whose bytes are those of the CPU tensor `raw`."""

    raw: torch.Tensor
    lease: Lease
    """Of the memory; shared by all views of it."""

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> "HpuTensor":
        tensor: HpuTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(DEVICE, 0),
        )
        tensor.raw = raw
        tensor.lease = active_card().memory.lease_of(raw)
        return tensor

    # Dynamo and AOTAutograd look through the wrapper with these two.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["raw"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], meta: None, size: Any, stride: Any
    ) -> "HpuTensor":
        return HpuTensor(inner["raw"])

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return execute(op, args, kwargs or {})

    # Printing and listing read the values, which is a copy to the host.
    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self.cpu()!r} on {self.device}"

    def __format__(self, format_spec: str) -> str:
        return format(self.cpu(), format_spec)


def execute(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operator as the card would, on the CPU tensors underneath."""
    composite = op.decompose(*args, **kwargs)  # `linear`, `to`, ... arrive whole in inference mode
    if composite is not NotImplemented:
        return composite
    call = _Call(op, args, kwargs)
    name = op.name()
    card = active_card()
    target = kwargs.get("device")
    if name == "aten::_to_copy" and target is not None and target.type != DEVICE:
        return call.to_host(card, args[0], waits=not kwargs.get("non_blocking"))
    if name == "aten::copy_" and not isinstance(args[0], HpuTensor):
        waits = not (len(args) > 2 and args[2])
        return call.to_host(card, args[1], waits=waits, into=args[0])
    if name == "aten::copy_" and not isinstance(args[1], HpuTensor):
        return call.to_device(card, args[0], args[1])
    if call.host_operand and call.wrappers:
        raise RuntimeError(f"{name}: expected all tensors on one device, found {DEVICE}:0 and cpu")
    return call.compute(card)


class _Call:
    """One operator with its operands unwrapped."""

    def __init__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.op = op
        self.wrappers: dict[int, HpuTensor] = {}
        self.host_operand = False
        self.args, self.kwargs = map_leaves(self._unwrap, (args, kwargs))

    def _unwrap(self, x: Any) -> Any:
        if isinstance(x, HpuTensor):
            self.wrappers[id(x.raw)] = x
            return x.raw
        if isinstance(x, torch.Tensor) and x.dim() > 0:  # a host scalar may join, as on a card
            self.host_operand = True
        if isinstance(x, torch.device) and x.type == DEVICE:
            if x.index not in (None, 0):
                raise RuntimeError(
                    f"Invalid device id {x.index}: a process has one card, {DEVICE}:0"
                )
            return torch.device("cpu")
        return x

    def _wrap(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        known = self.wrappers.get(id(x))  # an in-place operator returns what it was given
        return HpuTensor(x) if known is None else known

    def to_device(
        self, card: SimulatedCard, target: HpuTensor, source: torch.Tensor
    ) -> torch.Tensor:
        if source.dtype == torch.int64 and card.is_lazy and source.numel():
            low, high = source.aminmax()
            if low < _INT32.min or high > _INT32.max:
                raise RuntimeError(
                    "Error when trying to cast Long to Int, Input values range exceeds Int range"
                )
        card.copy_to_device(card.memory.device_bytes(source.nbytes, source.dtype))
        raw = self.op(*self.args, **self.kwargs)
        if _Installed.tape is not None:  # a replay copies the data of the capture again
            _Installed.tape.record(self.op, self.args, self.kwargs, raw)
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
        card.copy_to_host(num_bytes, "a copy to the host", waits=waits)
        result = self.op(*self.args, **self.kwargs)
        return result if into is None else into

    def compute(self, card: SimulatedCard) -> Any:
        name = self.op.name()
        if is_allocation := name in _ALLOCATIONS:
            self._check_room(card)  # before the host commits its memory
        operands = [x for x in leaves_of(self.args) if isinstance(x, torch.Tensor)]
        if torch.Tag.data_dependent_output in self.op.tags:
            card.host_sync(name)
        elif reason := needs_host(self.op, self.args, self.kwargs, is_lazy=card.is_lazy):
            if reason == "shape":
                card.dynamic_shape(name)
            else:
                card.cpu_fallback(name, sum(x.nbytes for x in operands))
        raw = self.op(*self.args, **self.kwargs)
        results = [x for x in leaves_of(raw) if isinstance(x, torch.Tensor)]
        # A recipe has no node for an allocation; outside of a recipe a view launches nothing.
        if results and not is_allocation and (card.is_recording or not self.op.is_view):
            signature = signature_of(self.op, self.args, self.kwargs)
            card.run(signature, work_of(self.op, operands, results))
        if _Installed.tape is not None:
            _Installed.tape.record(self.op, self.args, self.kwargs, raw)
        return map_leaves(self._wrap, raw)

    def _check_room(self, card: SimulatedCard) -> None:
        dtype = self.kwargs.get("dtype") or torch.get_default_dtype()
        num_elements = 1
        for size in self.args[0]:
            num_elements *= size
        num_bytes = num_elements * dtype.itemsize
        card.memory.check(card.memory.device_bytes(num_bytes, dtype))


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    return execute(op, args, kwargs)


def compile_for_card(graph: Any, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """The `torch.compile` backend: what Dynamo hands over runs as one recipe per set of shapes.

    Raises:
        RuntimeError: the card is in lazy mode, where HPU graphs take the place of this.
    """
    if active_card().is_lazy:
        raise RuntimeError(f"{COMPILE_BACKEND} needs eager mode (PT_HPU_LAZY_MODE=0)")

    def compiled(*inputs: Any) -> Any:
        with active_card().compiled_region():
            return graph.forward(*inputs)

    return compiled


class _Stream:
    """The one queue of the simulated card; an event that follows it is always done."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        active_card().host_sync("Stream.synchronize")


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.device_s = 0.0

    def record(self, stream: object = None) -> None:
        card = active_card()
        card.flush()
        self.device_s = max(card.clock.device_s, card.clock.host_s)

    def wait(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return active_card().clock.host_s >= self.device_s

    def elapsed_time(self, end: "_Event") -> float:
        return (end.device_s - self.device_s) * 1e3

    def synchronize(self) -> None:
        active_card().host_sync("Event.synchronize")


def _device_module() -> SimpleNamespace:
    """What `torch.hpu` answers."""

    def mem_get_info(device: object = None) -> tuple[int, int]:
        pool = active_card().memory
        return pool.limit_bytes - pool.in_use_bytes, pool.limit_bytes

    stream = _Stream()
    return SimpleNamespace(
        Stream=_Stream,
        Event=_Event,
        is_initialized=lambda: True,
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        get_device_name=lambda device=None: active_card().spec.name,
        current_stream=lambda device=None: stream,
        synchronize=lambda device=None: active_card().synchronize(),
        mem_get_info=mem_get_info,
        memory_stats=lambda device=None: active_card().memory.stats(),
        memory_allocated=lambda device=None: active_card().memory.in_use_bytes,
        max_memory_allocated=lambda device=None: active_card().memory.max_in_use_bytes,
        reset_peak_memory_stats=lambda device=None: active_card().memory.reset_peak(),
        manual_seed_all=lambda seed: None,  # the CPU generator serves, and torch seeds that one
        _is_in_bad_fork=lambda: False,
    )


def install(card: SimulatedCard) -> None:
    """Let the device `hpu` stand for `card`; the first call registers the device.

    Raises:
        ConfigError: this torch cannot register a device from Python.
    """
    if _Installed.library is None:
        setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
        if setup is None:
            raise ConfigError(
                f"torch {torch.__version__} cannot register a device from Python, which the "
                f"simulated Gaudi needs; install a newer torch or unset VLLM_HPU_SIM"
            )
        from torch._dynamo import register_backend

        setup(DEVICE, backend_module=_device_module())
        library = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
        library.fallback(_fallback, "PrivateUse1")  # type: ignore[no-untyped-call]
        register_backend(compile_for_card, name=COMPILE_BACKEND)
        _Installed.library = library
    _Installed.card = card
    _Installed.tape = None
