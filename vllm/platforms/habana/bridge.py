"""Define the interface of a Gaudi card, real or simulated.

The facts in the docstrings are about the published bridge (builds 1.19 and later). Independent of
models, buckets and the scheduler.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vllm.cost_model.cards import CARDS

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from vllm.platforms.habana.kernels import FusedKernels

COMPILE_BACKEND = "hpu_backend"
"""Backend of `torch.compile`; only in eager mode."""

KNOWN_CARDS = tuple(card.name for card in CARDS.values())
"""Names of the cards for which this engine was written."""

OUT_OF_MEMORY_TEXT = "Allocation failed for size::"
"""Text in the RuntimeError of a failed allocation; there is no type of its own."""


@dataclass(frozen=True)
class MemoryInfo:
    """State of this process's memory pool. The memory that other processes use on the card is not
    visible.
    """

    free_bytes: int
    total_bytes: int
    """Less than the HBM of the card: driver and firmware come first."""


@dataclass(frozen=True)
class DeviceCounters:
    """Counters since the process opened the device. None: a real card does not report the value."""

    compilations: int
    """Synapse compilations; a recipe out of a cache is none, nor is a single eager operator."""
    compile_s: float
    cpu_fallbacks: Mapping[str, int]
    """Operator -> number of times that it ran on the host: flush, copy out, compute, copy back."""
    launches: int | None = None
    """Number of launches of recipes and graphs; none in compile-only mode."""
    graph_captures: int | None = None
    graph_replays: int | None = None
    host_syncs: int | None = None
    h2d_bytes: int | None = None
    d2h_bytes: int | None = None
    blocking_h2d: int | None = None
    """Copies to the device that the host waits for."""
    copied_bytes: int | None = None
    """Bytes of tensors that were copied whole because they were written through a view."""
    cache_copies: int | None = None
    """Number of copies of whole tensors that were of a tensor of `HabanaBridge.zeros`."""
    recipes: tuple[tuple[str, int], ...] = ()
    """Name and microseconds of each compilation; a card reports them with
    PT_HPU_METRICS_GC_DETAILS=1 only."""


class DeviceEvent(Protocol):
    """An event (mark) in the queue of the card."""

    def query(self) -> bool:
        """Return whether the card has reached the event. Does not wait."""


class HabanaBridge(Protocol):
    """The interface of one card. A process has exactly one, and its index is always 0."""

    @property
    def device(self) -> "torch.device":
        """The device `hpu:0`."""

    @property
    def device_name(self) -> str:
        """Name of the device: one of `KNOWN_CARDS`, or what the bridge calls another one."""

    @property
    def fp8_max(self) -> float:
        """The largest e4m3 value on this card."""

    @property
    def is_lazy(self) -> bool:
        """Whether operators are recorded until `mark_step` (lazy mode, HPU graphs). Otherwise they
        run eagerly or with torch.compile.
        """

    @property
    def is_recording(self) -> bool:
        """Whether operators become part of a recipe here: always in lazy mode, and in eager mode
        inside of a compiled function. Compilers can trace it."""

    @property
    def collectives_backend(self) -> str:
        """Backend name for `torch.distributed.init_process_group`. It is registered with torch when
        this returns.
        """

    @property
    def kernels(self) -> "FusedKernels":
        """The fused kernels of the card."""

    def memory_info(self) -> MemoryInfo:
        """Return the state of the memory pool after all recorded operators have run.

        Memory in use consists of live tensors, graphs, and the workspace. The workspace holds
        temporary tensors of recipes. It is as large as the largest recipe needed, and is never
        released.
        """

    def peak_bytes(self) -> int:
        """Return the largest use of the pool since `reset_peak`, after all recorded operators have
        run.
        """

    def reset_peak(self) -> None:
        """Reset the peak to the present use, after all recorded operators have run."""

    def zeros(self, shape: tuple[int, ...], dtype: "torch.dtype") -> "Tensor":
        """Allocate a zeroed tensor on the device.

        Raises:
            MemoryError: the pool has too little free memory.
        """

    def pinned(self, num_elements: int) -> "Tensor":
        """Allocate int32 on the host, in pinned memory if possible, which the card can read
        directly.
        """

    def record_event(self) -> DeviceEvent:
        """Record an event after all copies and launches so far."""

    def synchronize(self) -> None:
        """Launch all recorded operators and wait for the device."""

    def now_s(self) -> float:
        """Return the seconds of the device's clock, to time work on the device.

        This is the host's clock, or the predicted time of a simulated card.
        """

    def mark_step(self) -> None:
        """End the recorded graph and launch it. Does nothing in eager mode."""

    def wrap_in_hpu_graph(self, module: "nn.Module") -> "nn.Module":
        """Make `module` capture one graph per input signature and replay it. Only in lazy mode.

        Changes `module.forward` in place and adds `module.clear_cache()`. A call accepts
        `warmup_mode=True` (a known graph is not replayed: the outputs are stale) and
        `bypass_hpu_graphs=True`. Outputs are static: the next replay overwrites them. Tensors are
        part of the signature by shape, everything else by value, so changing numbers must be in
        tensors. Only tensors that are reachable from the returned object stay allocated.
        """

    def compile(self, function: "Callable[..., Any]", **options: object) -> "Callable[..., Any]":
        """Return a function whose calls run as compiled recipes; eager mode only.

        Args:
            function: a function or a module; it does not change.
            options: options of `torch.compile`, without the backend.
        """

    def compile_module(self, module: "nn.Module", **options: object) -> None:
        """Let calls of a module run as compiled recipes from now on; see `compile`."""

    def disable_compiler(self) -> None:
        """Let `torch.compile` return functions unchanged, since its backend needs eager mode."""

    def counters(self) -> DeviceCounters: ...

    def warmed_section(self) -> AbstractContextManager[None]:
        """Declare that everything inside was warmed up. A strict simulation fails where a card
        would stall to compile.
        """

    @property
    def can_compile_only(self) -> bool:
        """Whether this build of the bridge can compile without launching. If not, this is
        logged.
        """

    def compile_only(self) -> AbstractContextManager[None]:
        """Compile recipes inside the context without launching them: the results of operators are
        garbage.

        It is not documented whether a card allocates memory for recipes that are not launched; the
        workspace of a simulated card does not grow.
        """

    def dry_run(self) -> AbstractContextManager[None]:
        """Declare that the results of operators inside the context are not used.

        A real card computes as usual; a simulated one takes the same memory and counts the same
        time, but computes nothing.
        """

    def manual_seed(self, seed: int) -> None:
        """Seed the device's random generator. Its numbers differ from the CPU's for the same
        seed.
        """
