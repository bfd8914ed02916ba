"""Test that a viewer can read trace files, even if the process or the disk fails."""

import errno
import json
import subprocess
import sys
import threading
from io import FileIO
from pathlib import Path

import numpy as np
import pytest

from vllm.utils import trace
from vllm.utils.trace import (
    NULL_TRACE,
    PaddingCounts,
    TraceWriter,
    cache_counters,
    get_trace,
    launch_counters,
    open_trace,
    set_trace,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def writer(tmp_path):
    writer = TraceWriter(tmp_path / "events.json")
    yield writer
    writer.close()


def closed(writer: TraceWriter) -> list[dict]:
    """Return the events of the file, except the event with the start time of the file."""
    writer.close()
    # Python's json module accepts NaN and Infinity, but trace viewers do not.
    events = json.loads(writer.path.read_text(), parse_constant=pytest.fail)
    return [event for event in events if event["name"] != "trace begins"]


def only(events: list[dict], phase: str) -> list[dict]:
    return [event for event in events if event["ph"] == phase]


def names_of_tracks(events: list[dict]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def test_a_closed_file_is_json_and_every_event_has_what_viewers_need(writer):
    with writer.span("step", track="engine", rows=3):
        writer.instant("preempted", row=1)
    writer.counter("utils", free=2, used=5.5)
    events = closed(writer)
    for event in events:
        assert {"pid", "tid", "ph", "name", "args"} <= event.keys()
        assert event["ph"] == "M" or event["ts"] > 0
    assert [(e["ph"], e["name"], e["args"]) for e in events if e["ph"] != "M"] == [
        ("i", "preempted", {"row": 1}),
        ("X", "step", {"rows": 3}),
        ("C", "utils", {"free": 2, "used": 5.5}),
    ]


def test_processes_and_tracks_have_names_and_the_known_tracks_their_numbers(writer):
    for _ in range(2):
        writer.instant("a", track="launches")
    writer.instant("b", track="copies")
    events = closed(writer)
    assert names_of_tracks(events) == {
        1: "counters",
        2: "external",
        3: "internal",
        4: "launches",
        5: "copies",
    }
    assert [e["tid"] for e in only(events, "i")] == [4, 4, 5]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["vllm"]
    assert len(only(events, "M")) == 6


def test_an_inner_span_lies_inside_the_outer_one(writer):
    with writer.span("outer"), writer.span("inner"):
        pass
    inner, outer = only(closed(writer), "X")
    assert (inner["name"], outer["name"]) == ("inner", "outer")
    assert outer["ts"] <= inner["ts"]
    # Times are rounded to nanoseconds.
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.001


def test_a_span_that_fails_is_written_and_lets_the_exception_through(writer):
    with pytest.raises(KeyError), writer.span("step", rows=1):
        raise KeyError
    assert only(closed(writer), "X")[0]["args"] == {"rows": 1, "error": "KeyError"}


def test_arguments_may_be_called_as_the_parameters_are(writer):
    with writer.span("step", name="llama"):
        writer.instant("request", name="x")
    events = closed(writer)
    assert only(events, "X")[0]["args"] == {"name": "llama"}
    assert only(events, "i")[0]["args"] == {"name": "x"}


class Unreadable:
    def __str__(self) -> str:
        raise AssertionError("the text of a value was asked for")

    __repr__ = __str__


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int32(3), 3),
        (np.float32(0.5), 0.5),
        (["a", {"b": None}], ["a", {"b": None}]),
        ('"\n\ud800', '"\n\ud800'),
        (Unreadable(), "<Unreadable>"),
    ],
)
def test_values_are_shown_as_json(writer, value, expected):
    writer.instant("event", value=value)
    assert only(closed(writer), "i")[0]["args"] == {"value": expected}


@pytest.mark.parametrize("value", [float("nan"), {(1, 2): 3}])
def test_an_event_with_values_json_cannot_hold_keeps_its_place(writer, value):
    writer.instant("before")
    writer.instant("event", value=value)
    writer.instant("after")
    assert [e["name"] for e in only(closed(writer), "i")] == ["before", "event", "after"]


def test_threads_write_side_by_side_and_nothing_is_lost(writer):
    def work(index: int) -> None:
        for number in range(500):
            with writer.span("work", track=f"thread {index}", number=number):
                writer.counter("utils", value=number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = closed(writer)
    tracks = names_of_tracks(events)
    assert len(tracks) == 3 + 4
    for index in range(4):
        spans = [e for e in only(events, "X") if tracks[e["tid"]] == f"thread {index}"]
        assert [e["args"]["number"] for e in spans] == list(range(500))
    assert len(only(events, "C")) == 2000


KILLED = """
import os, signal, sys, time
from vllm.utils import trace
trace.FLUSH_INTERVAL_S = 0.01
writer = trace.TraceWriter(sys.argv[1])
for number in range(100):
    writer.instant("event", number=number)
while b'"number":99' not in writer.path.read_bytes():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""

NEVER_CLOSED = """
import sys
from vllm.utils.trace import TraceWriter
writer = TraceWriter(sys.argv[1])
for number in range(100):
    writer.instant("event", number=number)
"""


@pytest.mark.parametrize(
    ("code", "lacks", "code_of_exit"), [(KILLED, "]", -9), (NEVER_CLOSED, "", 0)]
)
def test_a_process_that_ends_without_closing_leaves_a_trace(tmp_path, code, lacks, code_of_exit):
    path = tmp_path / "events.json"
    result = subprocess.run(
        [sys.executable, "-c", code, path], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert (result.returncode, result.stderr) == (code_of_exit, "")
    events = json.loads(path.read_text() + lacks)
    numbers = [e["args"]["number"] for e in events if e["name"] == "event"]
    assert numbers == list(range(100))


@pytest.fixture
def log(caplog, monkeypatch):
    """Return the list of logged messages, whether or not the `vllm` logger propagates them."""
    monkeypatch.setattr(trace.logger, "propagate", False)
    monkeypatch.setattr(trace.logger, "handlers", [caplog.handler])
    caplog.set_level("INFO", logger=trace.logger.name)
    return caplog


class FullDisk(FileIO):
    """A file that accepts some bytes and then fails, like a full disk."""

    room = 2_000

    def write(self, data) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = super().write(data[: self.room])
        self.room -= taken
        return taken


def test_a_full_disk_ends_the_trace_with_one_warning(tmp_path, monkeypatch, log):
    monkeypatch.setattr(trace, "FileIO", FullDisk)
    monkeypatch.setattr(trace, "FLUSH_AT_EVENTS", 1)
    writer = TraceWriter(tmp_path / "events.json")
    for number in range(100):
        with writer.span("step", number=number):
            pass
    for thread in threading.enumerate():
        if thread.name == "trace-writer":
            thread.join(120)
    assert not writer.is_on
    writer.instant("ignored")
    writer.close()
    assert [(r.levelname, r.getMessage()) for r in log.records] == [
        (
            "WARNING",
            f"tracing stops, {writer.path} cannot be written: [Errno 28] No space left on device",
        )
    ]
    spans = only(json.loads(writer.path.read_text() + "]"), "X")
    assert [e["args"]["number"] for e in spans] == list(range(len(spans)))
    assert 0 < len(spans) < 100


def test_a_device_that_takes_nothing_fails_no_caller(log):
    writer = TraceWriter("/dev/full")
    writer.instant("event")
    writer.close()
    assert [record.levelname for record in log.records] == ["WARNING"]


def test_events_the_disk_is_too_slow_for_are_dropped_and_counted(tmp_path, monkeypatch):
    is_writing, may_go_on = threading.Event(), threading.Event()

    class SlowDisk(FileIO):
        def write(self, data) -> int:
            is_writing.set()
            may_go_on.wait(120)
            return super().write(data)

    monkeypatch.setattr(trace, "FileIO", SlowDisk)
    monkeypatch.setattr(trace, "MAX_PENDING_EVENTS", 10)
    monkeypatch.setattr(trace, "FLUSH_INTERVAL_S", 0.001)
    writer = TraceWriter(tmp_path / "events.json")
    assert is_writing.wait(120)
    for number in range(50):
        writer.instant("event", number=number)
    may_go_on.set()
    *kept, dropped = only(closed(writer), "i")
    assert [event["args"]["number"] for event in kept] == list(range(10))
    assert (dropped["name"], dropped["args"]) == ("events dropped", {"count": 40})


def test_a_trace_is_off_until_one_is_set(writer):
    assert get_trace() is NULL_TRACE
    set_trace(writer)
    try:
        assert get_trace() is writer
    finally:
        set_trace(NULL_TRACE)


def test_a_trace_that_is_off_takes_the_same_calls(tmp_path):
    before = threading.active_count()
    with NULL_TRACE.span("outer", track="x", rows=1), NULL_TRACE.span("inner"):
        NULL_TRACE.instant("a", track="x", b=1)
        NULL_TRACE.counter("utils", a=1)
    NULL_TRACE.close()
    assert not NULL_TRACE.is_on and threading.active_count() <= before
    with pytest.raises(KeyError), NULL_TRACE.span("step"):
        raise KeyError


@pytest.mark.parametrize(
    ("instance_id", "file_name"),
    [("a", "server_events_a.json"), (None, "server_events_vllm-instance-*-*.json")],
)
def test_a_trace_is_opened_under_the_known_name(tmp_path, log, instance_id, file_name):
    opened = open_trace(tmp_path / "new" / "folder", instance_id)
    opened.close()
    [path] = (tmp_path / "new" / "folder").iterdir()
    assert path.match(file_name)
    shown = path.stem.removeprefix("server_events_")
    assert log.messages == [f"Profiler enabled for: {shown}", f"The trace is written to {path}"]


def test_a_folder_that_cannot_be_written_means_no_trace_and_a_warning(tmp_path, log):
    (tmp_path / "file").touch()
    assert open_trace(tmp_path / "file", "a") is NULL_TRACE
    [record] = log.records
    assert record.levelname == "WARNING"
    assert f"{tmp_path / 'file' / 'server_events_a.json'} cannot be opened" in record.getMessage()


PROMPT = PaddingCounts(
    phase="prompt", rows=3, padded_rows=4, query_len=100, tokens=250, padded_tokens=512,
    block_refs=0, padded_blocks=0,
)  # fmt: skip
DECODE = PaddingCounts(
    phase="decode", rows=6, padded_rows=8, query_len=1, tokens=6, padded_tokens=8,
    block_refs=96, padded_blocks=128,
)  # fmt: skip


def test_counters_of_a_prompt_launch():
    assert launch_counters(PROMPT) == {
        "prompt_batch_size": 3,
        "prompt_bucket_batch_size": 4,
        "prompt_seq_len": 100,
        "prompt_bucket_seq_len": 128,
        "prompt_tokens": 250,
        "prompt_bucket_tokens": 512,
        "prompt_blocks": 0,
        "prompt_bucket_blocks": 0,
        "prompt_batch_token_utilization": 250 / 512,
        "prompt_batch_block_utilization": 1.0,
    }


def test_counters_of_a_decode_launch():
    counters = launch_counters(DECODE)
    assert counters["decode_bucket_seq_len"] == 1
    assert counters["decode_batch_token_utilization"] == 0.75
    assert counters["decode_batch_block_utilization"] == 0.75


@pytest.mark.parametrize(("used", "total", "share"), [(30, 120, 0.25), (0, 5, 0), (0, 0, 0)])
def test_counters_of_the_cache(used, total, share):
    assert cache_counters(used, total) == {
        "cache_num_blocks_used": used,
        "cache_num_free_blocks": total - used,
        "cache_computed_utilization": share,
    }
