"""The process of a core as its client sees it, without a core."""

import asyncio
import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from vllm.engine.process import core_client, core_supervisor, socket_folder


class KeptProcess:
    """A process that the kernel keeps after it was killed, until `released`."""

    pid = 4711

    def __init__(self, *args, **kwargs):
        self.released = threading.Event()
        self.is_killed = False
        reader, writer = os.pipe()
        os.close(reader)
        self.stdin = os.fdopen(writer, "wb")

    def kill(self):
        self.is_killed = True

    def wait(self, timeout=None):
        if timeout is not None and not self.released.is_set():
            raise subprocess.TimeoutExpired("core", timeout)
        is_main = threading.current_thread() is threading.main_thread()
        assert self.released.is_set() or not is_main, "the event loop waits without limit"
        self.released.wait()
        return -9


def test_a_core_that_does_not_end_does_not_hold_up_the_event_loop(monkeypatch, caplog):
    monkeypatch.setattr(subprocess, "Popen", KeptProcess)
    client = core_client.CoreClient()
    client.close()
    assert client.process.is_killed and "4711" in caplog.text
    assert not client.process.stdin.closed  # a thread may still write to it
    (reaper,) = (t for t in threading.enumerate() if t.name == "core-reaper")
    client.process.released.set()
    reaper.join()
    assert client.process.stdin.closed


def test_a_folder_of_a_socket_is_removed_with_the_socket():
    address = socket_folder.make_address()
    path = Path(address.removeprefix("ipc://"))
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    assert path.is_socket()
    socket_folder.remove(address)
    assert not path.parent.exists()


@pytest.mark.parametrize("folder", ["mine", "vllm-core-mine"])
@pytest.mark.parametrize("scheme", ["ipc://", ""])
def test_nothing_is_removed_that_is_not_of_a_socket(tmp_path, folder, scheme):
    work = tmp_path / folder
    work.mkdir()
    (work / "core").write_text("the work of a year")
    socket_folder.remove(f"{scheme}{work / 'core'}")
    assert (work / "core").read_text() == "the work of a year"
    empty = tmp_path / "empty"
    empty.mkdir()
    socket_folder.remove(f"{scheme}{empty / 'core'}")
    assert empty.is_dir()


def test_the_first_core_may_be_started_early_and_is_ended_if_nobody_takes_it(monkeypatch):
    ended = []

    class Client:
        def close(self):
            ended.append(self)

    monkeypatch.setattr(core_supervisor, "CoreClient", Client)
    core_supervisor.start_early_core()
    (early,) = core_supervisor._early

    async def start():
        return await core_supervisor.start_core()

    assert asyncio.run(start()) is early
    assert asyncio.run(start()) is not early
    core_supervisor.end_early_core()
    assert not ended
    core_supervisor.start_early_core()
    core_supervisor.end_early_core()
    assert len(ended) == 1 and not core_supervisor._early
