"""Simulates `habana_frameworks.torch.hpu`, which is `torch.hpu`: device, memory and streams.

The one queue of the simulated card runs in order, so all streams are the same, and waiting for one
does nothing. Only device 0 exists, as in every process of a real card.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from gaudi_sim.card.device import active_card
from gaudi_sim.vendor.graphs import HPUGraph, graph, is_current_stream_capturing, wrap_in_hpu_graph

__all__ = [
    "Event",
    "HPUGraph",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device_count",
    "get_device_name",
    "graph",
    "init",
    "is_available",
    "is_bf16_supported",
    "is_current_stream_capturing",
    "is_initialized",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_peak_memory_stats",
    "set_device",
    "set_stream",
    "stream",
    "synchronize",
    "wrap_in_hpu_graph",
]

Device = torch.device | int | str | None


def _check(device: Device) -> None:
    index = torch.device(device).index if isinstance(device, str) else device
    if isinstance(index, torch.device):
        index = index.index
    if index not in (None, 0):
        raise AssertionError("Invalid device id")


def init() -> None:
    active_card()


def is_initialized() -> bool:
    return True


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Device) -> None:
    _check(device)


def get_device_name(device: Device = None) -> str:
    """Return the name of the card: GAUDI2 or GAUDI3."""
    _check(device)
    return active_card().spec.name


def is_bf16_supported() -> bool:
    return True


def synchronize() -> None:
    """Launch the recorded operators, and wait for the device."""
    active_card().synchronize()


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return the free and total bytes of the memory pool of this process."""
    _check(device)
    pool = active_card().memory
    return pool.limit_bytes - pool.in_use_bytes, pool.limit_bytes


def memory_stats(device: Device = None) -> dict[str, int]:
    _check(device)
    return active_card().memory.stats()


def memory_allocated(device: Device = None) -> int:
    return memory_stats(device)["InUse"]


def max_memory_allocated(device: Device = None) -> int:
    """Return the peak of memory in use since the last `reset_peak_memory_stats`."""
    return memory_stats(device)["MaxInUse"]


def memory_reserved(device: Device = None) -> int:
    """Return the bytes of the whole pool, which is reserved when the card is opened."""
    return memory_stats(device)["Limit"]


max_memory_reserved = memory_reserved


def reset_peak_memory_stats(device: Device = None) -> None:
    _check(device)
    active_card().memory.reset_peak()


class Stream:
    """The only queue of the card."""

    def __init__(self, device: Device = None, priority: int = 0, **kwargs: object) -> None:
        _check(device)

    def wait_stream(self, stream: "Stream") -> None:
        """Do nothing: the queue runs in order."""

    def wait_event(self, event: "Event") -> None:
        """Do nothing: the queue runs in order."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Return whether the queue is empty."""
        clock = active_card().clock
        return clock.host_s >= clock.device_s

    def synchronize(self) -> None:
        active_card().host_sync("Stream.synchronize")


class Event:
    """A mark in the queue, with the predicted time at which the card reaches it."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._device_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        card = active_card()
        card.flush()
        self._device_s = max(card.clock.device_s, card.clock.host_s)

    def wait(self, stream: Stream | None = None) -> None:
        """Do nothing: the queue runs in order."""

    def query(self) -> bool:
        return active_card().clock.host_s >= self._device_s

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds from this event to a later one."""
        return (end._device_s - self._device_s) * 1e3

    def synchronize(self) -> None:
        active_card().host_sync("Event.synchronize")


_STREAM = Stream()


def current_stream(device: Device = None) -> Stream:
    _check(device)
    return _STREAM


default_stream = current_stream


def set_stream(stream: Stream) -> None:
    """End the recorded graph, which belongs to the previous stream."""
    active_card().mark_step()


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Queue the operators in this context on `stream`."""
    active_card().mark_step()
    yield
    active_card().mark_step()


_MODULE = ModuleType("habana_frameworks.torch.hpu", __doc__)


def device_module() -> ModuleType:
    """Return the module for `torch.hpu`: the names above, and the names that torch itself uses."""
    for name in __all__:
        setattr(_MODULE, name, globals()[name])
    vars(_MODULE).update(
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )
    return _MODULE
