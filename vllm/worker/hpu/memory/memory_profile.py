"""Measures how much device and host memory a part of the start took, for Gaudi's log lines."""

import gc
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType

import psutil

from vllm.bucketing import format_bytes
from vllm.platforms.habana.bridge import OUT_OF_MEMORY_TEXT, HabanaBridge
from vllm.worker.hpu.launches.tp_group_status import TPGroupStatus

_REFUSED = re.compile(re.escape(OUT_OF_MEMORY_TEXT) + r"(\d+)")


class MemoryProfile:
    """Measures the memory change in a `with` block, or from `begin` to `end`.

    Afterwards `str()` is the text for the log:

    `15.05 GiB of device memory (15.05 GiB/94.62 GiB used) and 1.067 GiB of host memory (8.199
    GiB/108.2 GiB used)`. Negative values are released memory.

    Args:
        bridge: the card.
        is_peak: measure the peak in the block, instead of the memory still in use after it.
        resident_bytes: measure relative to this memory in use, instead of the memory in use when
            the block begins, which includes the workspace of earlier forward passes.
    """

    def __init__(
        self, bridge: HabanaBridge, *, is_peak: bool = False, resident_bytes: int | None = None
    ) -> None:
        self._bridge = bridge
        self._is_peak = is_peak
        self._resident_bytes = resident_bytes
        self._before = (0, 0)
        self._after = (0, 0)
        self._totals = (0, 0)

    def __enter__(self) -> "MemoryProfile":
        self.begin()
        return self

    def begin(self) -> None:
        """Begin to measure."""
        device_bytes, host_bytes = self._measure()
        if self._resident_bytes is not None:
            device_bytes = self._resident_bytes
        self._before = device_bytes, host_bytes
        if self._is_peak:
            self._bridge.reset_peak()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """End the measurement."""
        device_bytes, host_bytes = self._measure()
        if self._is_peak:
            device_bytes = self._bridge.peak_bytes()
        self._after = device_bytes, host_bytes

    @property
    def device_bytes(self) -> int:
        """Device memory that the block added: at its end, or at its peak."""
        return self._after[0] - self._before[0]

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.device_bytes)} of device memory "
            f"({format_bytes(self._after[0])}/{format_bytes(self._totals[0])} used) and "
            f"{format_bytes(self._after[1] - self._before[1])} of host memory "
            f"({format_bytes(self._after[1])}/{format_bytes(self._totals[1])} used)"
        )

    def _measure(self) -> tuple[int, int]:
        """Measure the bytes in use on the device and on the host."""
        device, host = self._bridge.memory_info(), psutil.virtual_memory()
        self._totals = (device.total_bytes, host.total)
        return device.total_bytes - device.free_bytes, host.total - host.available


@dataclass(frozen=True)
class Attempt:
    """The outcome of a forward pass that may have run out of memory."""

    profile: MemoryProfile
    """Measures the peak of memory, workspace included."""
    peak_bytes: int
    """Device memory at that peak."""
    kept_bytes: int
    """Workspace that is in use after it: the most that any launch needed until now."""
    has_grown: bool
    """Whether the forward pass needed more workspace than the previous ones; if not, it may need
    less than is kept."""
    refused_bytes: int | None
    """The allocation that failed; None: the launch completed."""

    @property
    def needed_bytes(self) -> int:
        """Device memory that the forward pass needs at a time; a minimum if it did not complete."""
        return max(0, self.peak_bytes) + (self.refused_bytes or 0)

    @property
    def passing_bytes(self) -> int:
        """The part of that memory that is passed between recipes, and freed after the
        forward pass.
        """
        return max(0, self.peak_bytes - self.kept_bytes)

    def without(self, held_bytes: int) -> "Attempt":
        """Return the attempt minus memory that was held by other data while it ran."""
        return replace(self, peak_bytes=max(self.kept_bytes, self.peak_bytes - held_bytes))

    def max_over_ranks(self, peers: TPGroupStatus | None) -> "Attempt":
        """Return the attempt with the largest memory need of all cards, so that all decide the
        same.
        """
        if peers is None:
            return self
        refused = -1 if self.refused_bytes is None else self.refused_bytes
        own = [self.peak_bytes, self.kept_bytes, int(self.has_grown), refused]
        peak, kept, has_grown, refused = peers.all_reduce_max(own)
        return Attempt(self.profile, peak, kept, bool(has_grown), None if refused < 0 else refused)


def attempt(
    bridge: HabanaBridge,
    run: Callable[[], None],
    resident_bytes: int,
    peers: TPGroupStatus | None = None,
) -> Attempt:
    """Run a forward pass and measure its memory; running out of memory is not an error.

    Only its workspace remains allocated.

    Args:
        resident_bytes: bytes in use on the card apart from its workspace: weights, cache, graphs.
        peers: the cards that run it together with this one.

    Raises:
        RuntimeError: only this card is out of memory, and the others wait for it in the pass.
    """
    started = time.monotonic()
    in_use = used_bytes(bridge)
    profile = MemoryProfile(bridge, is_peak=True, resident_bytes=resident_bytes)
    refused: int | None = None
    failure: Exception | None = None
    try:
        with profile:
            run()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        found = _REFUSED.search(str(error))
        refused = int(found[1]) if found else 0
        failure = error
    if peers is not None:
        peers.end_launch()
        if failure is not None and not peers.are_done(time.monotonic() - started):
            raise failure
    failure = None
    if refused is not None:
        gc.collect()  # frees tensors that the stack frames of the error held
        # Start a new recipe: operations recorded so far must not become a part of it.
        bridge.mark_step()
    kept = max(0, used_bytes(bridge) - resident_bytes)
    # Without a workspace (`kept` is 0), the forward pass has freed all the memory that it used, so
    # none of that memory had been there before.
    has_grown = refused is not None or not kept or resident_bytes + kept > in_use
    return Attempt(profile, profile.device_bytes, kept, has_grown, refused)


def used_bytes(bridge: HabanaBridge) -> int:
    """Return the device memory in use."""
    memory = bridge.memory_info()
    return memory.total_bytes - memory.free_bytes


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device is out of memory.

    The bridge has no exception class for it.
    """
    return OUT_OF_MEMORY_TEXT in str(error)
