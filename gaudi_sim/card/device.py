"""The torch device `hpu` of the simulation: its tensors are CPU tensors under another name.

`install` registers the device in this process, once; otherwise torch is not changed. `execute` runs
the operators on such tensors. Random values come from the CPU generator.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import backend_registration

from gaudi_sim.card.card import SimulatedCard
from gaudi_sim.card.graph_recorder import GraphRecorder
from gaudi_sim.card.memory import Allocation
from vllm.errors import ConfigError
from vllm.platforms.habana.bridge import COMPILE_BACKEND

DEVICE = "hpu"


class _Installed:
    """The devices that are registered in this process, and the card that is active now."""

    library: torch.library.Library | None = None
    # Until the device is registered, torch uses the name `hpu` for something else.
    device = torch.device("meta")
    card: SimulatedCard | None = None
    tape: GraphRecorder | None = None
    execute: Callable[..., Any]
    has_compiler = False


def active_card() -> SimulatedCard:
    """Return the card that is the device `hpu` now."""
    assert _Installed.card is not None, "no simulated card is installed"
    return _Installed.card


@contextmanager
def activated(card: SimulatedCard | None) -> Iterator[None]:
    """Let the device `hpu` be this card in this context, and restore the previous one
    afterwards.
    """
    before, _Installed.card = _Installed.card, card
    try:
        yield
    finally:
        _Installed.card = before


def active_tape() -> GraphRecorder | None:
    """Return the recorder to which operators are recorded now; None: none."""
    return _Installed.tape


def set_tape(tape: GraphRecorder | None) -> None:
    """Record operators to `tape` as well from now on; None: stop."""
    _Installed.tape = tape


class HpuTensor(torch.Tensor):
    """A tensor on `hpu:0` whose data are in the CPU tensor `raw`."""

    raw: torch.Tensor
    lease: Allocation
    """Allocation that holds the memory; shared by all views of it."""
    is_view: bool
    """Made by an operator that returns a view."""
    parts: tuple[Any, list["HpuTensor"] | None] = None, None
    """Key of the last call of `unbind` whose results had no values, and these results."""

    @staticmethod
    def __new__(
        cls, raw: torch.Tensor, lease: Allocation | None = None, *, is_view: bool = False
    ) -> "HpuTensor":
        tensor: HpuTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=_Installed.device,
            # Not 0 bytes: Dynamo would resize such a storage, which a Python device does not
            # support.
            storage_size=None if raw.numel() else raw.itemsize,
        )
        tensor.raw = raw
        tensor.is_view = is_view
        tensor.lease = active_card().memory.lease_of(raw) if lease is None else lease
        return tensor

    # Dynamo and AOTAutograd use these two methods to look through the wrapper.
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
        return _Installed.execute(op, args, kwargs or {})

    # Printing and `tolist` read values, so they copy to the host.
    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self.cpu()!r} on {self.device}"

    def __format__(self, format_spec: str) -> str:
        return format(self.cpu(), format_spec)


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    return _Installed.execute(op, args, kwargs)


def install(
    card: SimulatedCard,
    *,
    execute: Callable[..., Any],
    device_module: object,
) -> None:
    """Let the device `hpu` be `card`; the first call registers the device.

    Args:
        execute: runs an operator, its positional arguments and its keyword arguments; only the
            first call sets it.
        device_module: becomes `torch.hpu`; only the first call sets it.

    Raises:
        ConfigError: this torch cannot register a device from Python.
    """
    if _Installed.library is None:
        setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
        if setup is None:
            raise ConfigError(
                f"torch {torch.__version__} cannot register a device from Python, which the "
                f"simulated Gaudi needs; install torch 2.10 or newer, or unset VLLM_HPU_SIM"
            )
        setup(DEVICE, backend_module=device_module)
        library = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
        library.fallback(_fallback, "PrivateUse1")  # type: ignore[no-untyped-call]
        _Installed.library = library
        _Installed.device = torch.device(DEVICE, 0)
        _Installed.execute = execute
    _Installed.card = card
    _Installed.tape = None


def register_compiler(compile_for_card: Callable[..., Any]) -> None:
    """Let `torch.compile` compile for the device, which must be installed. Loads the compiler of
    torch, which takes seconds. Later calls do nothing.

    Args:
        compile_for_card: the backend of `torch.compile`.
    """
    if _Installed.has_compiler:
        return
    from torch._dynamo import disable, register_backend

    register_backend(compile_for_card, name=COMPILE_BACKEND)
    # The compiler must not trace the code of the simulation.
    _Installed.execute = disable(_Installed.execute)  # type: ignore[no-untyped-call]
    _Installed.has_compiler = True
