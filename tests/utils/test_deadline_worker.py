"""Test a process that answers calls and is killed if it takes too long."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.reach import note_ended_calls, num_starts_of
from vllm.utils.process import deadline_worker
from vllm.utils.process.deadline_worker import (
    CallFailed,
    DeadlineExceeded,
    DeadlineWorker,
    WorkerDied,
    make_server,
)
from vllm.utils.process.memory_file import memory_file


@pytest.fixture
def worker():
    """Return a worker in a program with its own socket time-out."""
    worker = DeadlineWorker(make_server("tests.utils.workers:echo", b"<"), max_memory_bytes=2**28)
    socket.setdefaulttimeout(0.01)
    yield worker
    socket.setdefaulttimeout(None)
    worker.close()


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


def is_gone_within(pid: int, seconds: float) -> bool:
    """Return whether a process ends, and its parent waits for it, within some seconds."""
    deadline = time.monotonic() + seconds
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.02)
    return not os.path.exists(f"/proc/{pid}")


def test_it_answers_one_call_after_the_other_in_the_same_process(worker):
    pid = worker.call(b"pid", 120)
    assert int(pid) != os.getpid()
    large = os.urandom(3_000_000)
    for argument in (b"", b"print", large):
        assert worker.call(argument, 120) == b"<" + argument
    assert worker.call(b"pid", 120) == pid


@pytest.mark.parametrize(
    ("command", "deadline_s", "error"),
    [
        (b"sleep", 0.3, DeadlineExceeded),
        (b"crash", 300, WorkerDied),
        (b"exit", 300, WorkerDied),
    ],
)
def test_a_call_that_does_not_answer_ends_its_process_and_not_the_next_call(
    worker, command, deadline_s, error
):
    pid = int(worker.call(b"pid", 120))
    started = time.monotonic()
    with pytest.raises(error):
        worker.call(command, deadline_s)
    assert time.monotonic() - started < 50, "it sleeps for 60 s"
    assert worker.call(b"x", 120) == b"<x"
    assert ends_within(pid, 50)


@pytest.mark.parametrize(
    ("command", "text"), [(b"raise", "argument is wrong"), (b"memory", "Memory")]
)
def test_what_the_function_raises_reaches_the_caller_and_the_process_goes_on(worker, command, text):
    pid = worker.call(b"pid", 120)
    with pytest.raises(CallFailed, match=text):
        worker.call(command, 120)
    assert worker.call(b"pid", 120) == pid


def test_the_function_gets_copies_of_files_which_are_closed_after_the_call(worker):
    files = [memory_file("a"), memory_file("b")]
    counts = {worker.call(b"write", 120, files) for _ in range(3)}
    assert len(counts) == 1
    assert worker.call(b"x", 120) == b"<x"
    for file in files:
        assert os.pread(file, 99, 0) == b"<<<"
        os.close(file)


def test_a_setup_that_fails_is_told():
    with pytest.raises(CallFailed, match="cannot start with b'x'"):
        DeadlineWorker(make_server("tests.utils.workers:broken", b"x")).start()


def test_threads_get_the_answers_to_their_own_calls(worker):
    arguments = [str(i).encode() for i in range(20)]
    answers = {}
    threads = [
        threading.Thread(target=lambda a=a: answers.update({a: worker.call(a, 120)}))
        for a in arguments
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {a: b"<" + a for a in arguments}


def test_closing_kills_the_process_and_so_does_forgetting_the_worker():
    for end in (DeadlineWorker.close, lambda worker: None):
        worker = DeadlineWorker(make_server("tests.utils.workers:echo"))
        pid = int(worker.call(b"pid", 120))
        end(worker)
        del worker
        assert ends_within(pid, 120)


@pytest.mark.parametrize("is_server_alive", [True, False])
def test_closing_ends_a_call_whose_process_is_forked_meanwhile(monkeypatch, is_server_alive):
    server = make_server("tests.utils.workers:echo")
    worker = DeadlineWorker(server)
    fork, may_fork, forks = server.fork, threading.Event(), threading.Event()
    closing = threading.Event()

    def late_fork():
        forks.set()
        may_fork.wait()
        child = fork()
        if not is_server_alive:
            server.close()
        return child

    monkeypatch.setattr(server, "fork", late_fork)
    errors = []

    def call():
        try:
            worker.call(b"sleep", 120)
        except WorkerDied as error:
            errors.append(error)

    note_ended_calls(monkeypatch, worker, closing.set)
    threads = [threading.Thread(target=call), threading.Thread(target=worker.close)]
    threads[0].start()
    forks.wait()
    threads[1].start()
    closing.wait()  # the closing thread has found no process
    started = time.monotonic()
    may_fork.set()
    for thread in threads:
        thread.join()
    assert len(errors) == 1
    assert time.monotonic() - started < 50, "it sleeps for 60 s"
    server.close()


@pytest.mark.parametrize("command", ["pid", "sleep"])
def test_the_process_ends_when_its_parent_is_killed(command):
    code = (
        "from vllm.utils.process.deadline_worker import DeadlineWorker, make_server\n"
        "worker = DeadlineWorker(make_server('tests.utils.workers:echo'))\n"
        "print(worker.call(b'pid', 120).decode(), flush=True)\n"
        f"worker.call(b'{command}', 1.0)\n"
        "input()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    with parent:
        pid = int(parent.stdout.readline())
        time.sleep(0.2)
        parent.send_signal(signal.SIGKILL)
    assert ends_within(pid, 50)


def test_the_next_process_is_forked_by_one_that_has_imported_everything():
    server = make_server("tests.utils.workers:echo")
    workers = [DeadlineWorker(server) for _ in range(2)]
    try:
        pids = {int(worker.call(b"pid", 120)) for worker in workers}
        for _ in range(3):
            with pytest.raises(DeadlineExceeded):
                workers[0].call(b"sleep", 0.1)
            pids.add(int(workers[0].call(b"pid", 120)))
        assert len(pids) == 5
        assert server.num_starts == 1
    finally:
        for worker in workers:
            worker.close()
        server.close()
    for pid in pids:
        assert ends_within(pid, 50)


@pytest.mark.parametrize("end", ["killed while idle", "killed during a call", "too late"])
def test_a_process_that_has_ended_leaves_no_zombie_although_nobody_calls_it_again(worker, end):
    pid = int(worker.call(b"pid", 120))
    if end == "killed while idle":
        os.kill(pid, signal.SIGKILL)
    elif end == "killed during a call":
        threading.Timer(0.1, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(WorkerDied):
            worker.call(b"sleep", 120)
    else:
        with pytest.raises(DeadlineExceeded):
            worker.call(b"sleep", 0.1)
    assert is_gone_within(pid, 50)
    assert worker.call(b"x", 120) == b"<x"
    assert num_starts_of(worker) == 1


def test_the_children_of_a_closed_fork_server_end_although_they_work(monkeypatch):
    server = make_server("tests.utils.workers:echo")
    worker = DeadlineWorker(server)
    pid = int(worker.call(b"pid", 120))
    send, is_called, errors = deadline_worker.send, threading.Event(), []
    monkeypatch.setattr(deadline_worker, "send", lambda *given: (is_called.set(), send(*given))[1])

    def call():
        try:
            worker.call(b"sleep", 120)
        except WorkerDied as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    is_called.wait()
    started = time.monotonic()
    server.close()
    thread.join()
    assert len(errors) == 1
    assert time.monotonic() - started < 50, "it sleeps for 60 s"
    assert is_gone_within(pid, 50)


def test_a_fork_server_that_died_is_replaced():
    server = make_server("tests.utils.workers:echo")
    worker = DeadlineWorker(server)
    first = int(worker.call(b"pid", 120))
    os.kill(server.pid, signal.SIGKILL)
    assert ends_within(server.pid, 50)
    assert int(worker.call(b"pid", 120)) == first, "a child does not need its server"
    with pytest.raises(WorkerDied):
        worker.call(b"exit", 120)
    assert worker.call(b"x", 120) == b"x"
    assert server.num_starts == 2
    worker.close()
    server.close()
