"""Write timelines of the engine's work, for ui.perfetto.dev, chrome://tracing and
perfetto.habana.ai.

A trace file has the JSON Array Format of Chrome traces. Events are written in batches, with a comma
before each event. The file of a killed process lacks the closing bracket, which viewers accept; if
the kill interrupts a write, it also ends with a part of an event.

Independent of requests, steps and devices: callers name what they measure.
"""

import atexit
import json
import logging
import os
import threading
import uuid
from collections import deque
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from io import FileIO
from numbers import Integral, Real
from pathlib import Path
from time import perf_counter_ns, time
from typing import Any

logger = logging.getLogger(__name__)

COUNTERS, EXTERNAL, INTERNAL = "counters", "external", "internal"
"""Tracks that every trace has, as threads 1, 2 and 3; others get the next numbers."""

LAUNCH_COUNTERS = "utils"
"""Name of the counter event that carries `launch_counters` and `cache_counters`."""

MAX_PENDING_EVENTS = 32_768
"""Maximum number of events that are not written yet, about 20 MiB. If the disk is too slow, further
events are dropped."""

FLUSH_INTERVAL_S = 1.0
FLUSH_AT_EVENTS = 4_096
_CLOSE_TIMEOUT_S = 5.0
_NULL_SPAN = nullcontext()


class Trace:
    """A disabled trace, which is also the interface of an enabled one.

    Values of events are numbers, strings, or lists and dicts of them. Another thread writes them
    later, so they must not change. Any other value is shown by the name of its type, because
    printing a tensor would make the host wait for the device.
    """

    is_on = False
    """Whether events are recorded. For callers whose values take time to compute."""

    def span(
        self, name: str, /, *, track: str = INTERNAL, **args: Any
    ) -> AbstractContextManager[None]:
        """Record the time from entering the block to leaving it. An exception is noted as the value
        `error`.

        Spans of a track must be nested or follow each other, so parallel threads need separate
        tracks.
        """
        return _NULL_SPAN

    def instant(self, name: str, /, *, track: str = INTERNAL, **args: Any) -> None:
        """Record an event without a duration."""

    def counter(self, name: str, /, **values: float) -> None:
        """Record values that are valid from now on. Each is shown as a separate curve."""

    def close(self) -> None:
        """Write pending events and close the file; waits at most 5 s. Later events are ignored."""


class TraceWriter(Trace):
    """Writes a trace file from its own thread.

    Any thread may record events. Recording never raises: if the disk fails, the trace stops with
    one warning. If it is not closed, it is closed when the interpreter exits.

    Args:
        path: the file; an existing file is overwritten.
        process_name: name that viewers show for this process.

    Raises:
        OSError: the file cannot be opened.
    """

    is_on = True

    def __init__(self, path: str | os.PathLike[str], process_name: str = "vllm") -> None:
        self.path = Path(path)
        self._file = FileIO(self.path, "w")
        self._num_bytes = 0  # size of the complete events in the file
        self._pid = os.getpid()
        self._pending: deque[dict[str, Any]] = deque()
        self._num_dropped = 0
        self._tracks: dict[str, int] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._name_track("process_name", 0, process_name)
        for track in (COUNTERS, EXTERNAL, INTERNAL):
            self._thread_id(track)
        # The clock of events starts at boot. This event relates it to the time in the logs.
        self.instant("trace begins", unix_time_s=time())
        self._thread = threading.Thread(target=self._run, name="trace-writer", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def span(
        self, name: str, /, *, track: str = INTERNAL, **args: Any
    ) -> AbstractContextManager[None]:
        return _Span(self, name, track, args)

    def instant(self, name: str, /, *, track: str = INTERNAL, **args: Any) -> None:
        self._add("i", name, track, args, s="t")

    def counter(self, name: str, /, **values: float) -> None:
        self._add("C", name, COUNTERS, values)

    def close(self) -> None:
        self.is_on = False
        self._wake.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        atexit.unregister(self.close)

    def _add_span(self, name: str, track: str, start_ns: int, args: dict[str, Any]) -> None:
        duration_ns = perf_counter_ns() - start_ns
        self._add("X", name, track, args, ts=start_ns / 1000, dur=duration_ns / 1000)

    def _add(self, phase: str, name: str, track: str, args: dict[str, Any], **more: Any) -> None:
        if not self.is_on:
            return
        num_pending = len(self._pending)
        if num_pending >= MAX_PENDING_EVENTS:
            with self._lock:
                self._num_dropped += 1
            return
        self._pending.append(self._event(phase, name, track, args, **more))
        if num_pending >= FLUSH_AT_EVENTS:
            self._wake.set()

    def _event(
        self, phase: str, name: str, track: str, args: dict[str, Any], **more: Any
    ) -> dict[str, Any]:
        place = {"pid": self._pid, "tid": self._thread_id(track)}
        now_us = perf_counter_ns() / 1000
        return {**place, "ph": phase, "name": name, "ts": now_us, **more, "args": args}

    def _thread_id(self, track: str) -> int:
        number = self._tracks.get(track)
        if number is not None:
            return number
        with self._lock:
            if track not in self._tracks:  # check again: another thread may have added it meanwhile
                self._tracks[track] = len(self._tracks) + 1
                self._name_track("thread_name", self._tracks[track], track)
            return self._tracks[track]

    def _name_track(self, kind: str, number: int, name: str) -> None:
        event = {"pid": self._pid, "tid": number, "ph": "M", "name": kind, "args": {"name": name}}
        self._pending.append(event)

    def _run(self) -> None:
        try:
            while self.is_on:
                self._wake.wait(FLUSH_INTERVAL_S)
                self._wake.clear()
                self._flush()
            self._flush()
            self._write(b"\n]\n")
        except OSError as error:
            logger.warning("tracing stops, %s cannot be written: %s", self.path, error)
            with suppress(OSError):  # the disk error is already reported
                # Remove a partial event, which would make the file unreadable.
                self._file.truncate(self._num_bytes)
        finally:
            self.is_on = False
            self._pending.clear()
            self._file.close()

    def _flush(self) -> None:
        with self._lock:
            num_dropped, self._num_dropped = self._num_dropped, 0
        if num_dropped:
            args = {"count": num_dropped}
            self._pending.append(self._event("i", "events dropped", INTERNAL, args, s="t"))
        while num_events := min(len(self._pending), FLUSH_AT_EVENTS):
            events = [_encode(self._pending.popleft()) for _ in range(num_events)]
            self._write((b",\n" if self._num_bytes else b"[\n") + b",\n".join(events))

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._num_bytes += len(data)


class _Span:
    __slots__ = ("_args", "_name", "_start_ns", "_track", "_writer")

    def __init__(self, writer: TraceWriter, name: str, track: str, args: dict[str, Any]) -> None:
        self._writer = writer
        self._name = name
        self._track = track
        self._args = args
        self._start_ns = 0

    def __enter__(self) -> None:
        self._start_ns = perf_counter_ns()

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None:
            self._args["error"] = error_type.__name__
        self._writer._add_span(self._name, self._track, self._start_ns, self._args)


def _encode(event: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(event, default=_plain, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):  # NaN, keys that are not strings, or a cycle
        text = json.dumps({**event, "args": {"error": "values that JSON cannot hold"}})
    return text.encode()


def _plain(value: object) -> object:
    if isinstance(value, Integral):  # integers of numpy
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return f"<{type(value).__name__}>"


NULL_TRACE = Trace()

_current = NULL_TRACE


def get_trace() -> Trace:
    """Return the trace of this process; `NULL_TRACE` before `set_trace` was called."""
    return _current


def set_trace(trace: Trace) -> None:
    """Use `trace` as the trace of this process. The previous one is not closed."""
    global _current
    _current = trace


def open_trace(folder: str | os.PathLike[str], instance_id: str | None = None) -> Trace:
    """Open a trace in `folder`, which is created if missing. On failure, log a warning and return
    `NULL_TRACE`.

    Args:
        folder: folder of the trace file.
        instance_id: the file is named `server_events_{instance_id}.json`. None: use an id that no
            other process has.
    """
    if instance_id is None:
        instance_id = f"vllm-instance-{os.getpid()}-{uuid.uuid4().hex}"
    path = Path(folder) / f"server_events_{instance_id}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        trace = TraceWriter(path)
    except OSError as error:
        logger.warning("no trace is written, %s cannot be opened: %s", path, error)
        return NULL_TRACE
    logger.info("Profiler enabled for: %s", instance_id)
    logger.info("The trace is written to %s", path)
    return trace


@dataclass(frozen=True, kw_only=True)
class PaddingCounts:
    """Real sizes of a batch, and the padded sizes of its bucket."""

    phase: str
    """prompt or decode; begins the names of the counters."""
    rows: int
    padded_rows: int
    query_len: int
    """Tokens of the longest row."""
    tokens: int
    padded_tokens: int
    block_refs: int
    """Entries of the block list that are no padding; a block counts once per row that reads it."""
    padded_blocks: int


def launch_counters(size: PaddingCounts) -> dict[str, float]:
    """Return the trace counters of one forward pass, with the names used in Gaudi traces.

    Utilizations are real size / padded size, from 0 to 1 (1 if nothing is padded).
    """
    phase = size.phase
    return {
        f"{phase}_batch_size": size.rows,
        f"{phase}_bucket_batch_size": size.padded_rows,
        f"{phase}_seq_len": size.query_len,
        f"{phase}_bucket_seq_len": size.padded_tokens // max(1, size.padded_rows),
        f"{phase}_tokens": size.tokens,
        f"{phase}_bucket_tokens": size.padded_tokens,
        f"{phase}_blocks": size.block_refs,
        f"{phase}_bucket_blocks": size.padded_blocks,
        f"{phase}_batch_token_utilization": _utilization(size.tokens, size.padded_tokens),
        f"{phase}_batch_block_utilization": _utilization(size.block_refs, size.padded_blocks),
    }


def cache_counters(used_blocks: int, num_blocks: int) -> dict[str, float]:
    """Return the trace counters of the KV cache: blocks that requests hold, and blocks that are
    free.
    """
    return {
        "cache_num_blocks_used": used_blocks,
        "cache_num_free_blocks": num_blocks - used_blocks,
        "cache_computed_utilization": used_blocks / max(1, num_blocks),
    }


def _utilization(real: int, padded: int) -> float:
    return real / padded if padded else 1.0
