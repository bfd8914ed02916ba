"""Test a child process that is stopped, continues, is stopped for too long, or loses its parent."""

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from vllm.utils.process import child_process
from vllm.utils.process.child_process import ChildProcess, describe_exit

WAIT_S = 60


class Ends:
    """Receives the cause of the end of a child process."""

    def __init__(self, child):
        self._has_ended = threading.Event()
        child.on_end(self._note)

    def _note(self, cause):
        self.cause = cause
        self._has_ended.set()

    def wait(self):
        assert self._has_ended.wait(WAIT_S)
        return self.cause


@pytest.fixture
def child():
    found = ChildProcess(["cat"], os.environ)
    yield found
    found.process.kill()
    found.process.wait()
    found.process.stdin.close()


def test_the_cause_of_an_end_is_told_also_to_who_asks_later(child):
    first = Ends(child)
    child.process.stdin.close()
    assert first.wait() == Ends(child).wait() == "exit code 0"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (-signal.SIGKILL, "killed by signal 9, probably out of memory: "),
        (-signal.SIGTERM, "ended by signal 15, SIGTERM"),
        (-signal.SIGSEGV, "ended by signal 11, SIGSEGV, a crash of native code"),
        (-signal.SIGBUS, f"ended by signal {signal.SIGBUS:d}, SIGBUS, probably /dev/shm"),
        (-signal.SIGILL, "ended by signal 4, SIGILL, probably a library was built for another"),
        (-(signal.SIGRTMIN + 1), f"ended by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_how_a_process_has_ended_is_told_in_words(code, words):
    program = "import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "
    command = [sys.executable, "-c", f"{program}os.kill(os.getpid(), {-code})"]
    if code == 0:
        command = ["true"]
    process = subprocess.run(command)
    assert process.returncode == code
    assert describe_exit(process.returncode).startswith(words)


def test_a_child_that_goes_on_is_left_alone_and_its_stop_is_no_end(child):
    child.stop_limit_s = WAIT_S
    ends = Ends(child)
    child.process.send_signal(signal.SIGSTOP)
    child.process.send_signal(signal.SIGCONT)
    child.process.kill()
    assert ends.wait() == describe_exit(-9)


def test_a_child_that_is_stopped_for_too_long_is_killed(child, monkeypatch):
    monkeypatch.setattr(child_process, "LOOK_S", 0.01)
    child.stop_limit_s = 0.02
    ends = Ends(child)
    child.process.send_signal(signal.SIGSTOP)
    assert ends.wait() == "it was stopped by a signal (SIGSTOP) for 0.02 s, and killed"
    assert child.process.returncode == -signal.SIGKILL


def test_a_stopped_child_ends_with_its_parent():
    inner = "import os, sys; from vllm.utils.process.child_process import set_parent_death_signal\n"
    inner += "set_parent_death_signal(int(sys.argv[1])); print(os.getpid(), flush=True)\n"
    inner += "sys.stdin.read()"
    outer = (
        "import os, sys; from vllm.utils.process.child_process import ChildProcess\n"
        f"ChildProcess([sys.executable, '-c', {inner!r}, str(os.getpid())], os.environ)\n"
        "sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with parent:
        process = psutil.Process(int(parent.stdout.readline()))
        process.suspend()
        parent.kill()
    gone, _ = psutil.wait_procs([process], timeout=WAIT_S)
    assert gone == [process]
