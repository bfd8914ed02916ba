"""Test how a client sees the process of a core, without a core."""

import errno
import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from vllm.engine.process import core_client, core_launch, socket_folder
from vllm.entrypoints.cli.main import main
from vllm.errors import ConfigError


class KeptProcess:
    """A killed process that the kernel does not remove until `released`."""

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
    client, before = core_client.CoreClient(), set(threading.enumerate())
    client.close()
    assert client.process.is_killed and "4711" in caplog.text
    assert not client.process.stdin.closed  # a thread may still write to this pipe
    (reaper,) = (t for t in set(threading.enumerate()) - before if t.name == "core-reaper")
    client.process.released.set()
    reaper.join()
    assert client.process.stdin.closed


def test_a_machine_without_a_folder_for_temporary_files_is_an_error_of_one_line(monkeypatch):
    def read_only(**options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(socket_folder.tempfile, "mkdtemp", read_only)
    with pytest.raises(ConfigError, match=r"Read-only file system.* Set TMPDIR to a folder"):
        socket_folder.make_address()


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


@pytest.fixture
def launched(monkeypatch):
    """Return the list of cores that are launched, which have no process."""
    cores = []

    class Core:
        def __init__(self):
            cores.append(self)
            self.is_closed = False

        def close(self):
            self.is_closed = True

    monkeypatch.setattr(core_launch, "LaunchedCore", Core)
    return cores


def test_the_first_core_may_be_launched_early(launched):
    with core_launch.early_core(), core_launch.early_core():
        assert len(launched) == 1
        assert core_launch.take_core() is launched[0]
        assert core_launch.take_core() is launched[1]
    assert not any(core.is_closed for core in launched)


def test_an_early_core_that_nobody_takes_is_ended(launched):
    with core_launch.early_core():
        pass
    assert launched[0].is_closed
    assert core_launch.take_core() is launched[1]


@pytest.mark.parametrize(
    ("words", "code", "num_launched"),
    [
        (["serve", "--no-such-flag"], 2, 1),
        (["serve", "/no/such/model"], 2, 1),
        (["serve", "/no/such/model", "--headless"], 2, 1),
        (["serve", "--help"], 0, 0),
        (["serve", "-h"], 0, 0),
        (["generate", "--help"], 0, 0),
        ([], 0, 0),
    ],
)
def test_serve_launches_a_core_before_it_reads_its_flags_and_ends_it_if_they_are_wrong(
    launched, words, code, num_launched, capsys
):
    try:
        found = main(words)
    except SystemExit as end:  # argparse ends the program
        found = end.code
    assert (found, len(launched)) == (code, num_launched), capsys.readouterr().err
    assert all(core.is_closed for core in launched)


def test_no_process_is_launched_with_a_bad_environment_variable(launched, monkeypatch, capsys):
    def refuse():
        raise ConfigError("VLLM_X='letters' must be a number")

    monkeypatch.setattr(core_launch.envs, "get", refuse)
    assert main(["serve", "some-model"]) == 2
    assert not launched
    assert capsys.readouterr().err.count("letters") == 1
