"""Test forking a process. Each test is a program, because the test process has threads."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from typing import Any

import psutil
import pytest

HEAD = """
import gc, json, os, signal, subprocess, sys, threading, time, _thread
from vllm.utils.process import forked_process as forked
from vllm.utils.process.forked_process import ForkedProcess, can_fork
"""


def run_program(text: str, *arguments: str, code: int = 0, **variables: str) -> str:
    """Return what a program writes to its standard output."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(text), *arguments],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == code
    return done.stdout


@pytest.mark.parametrize(
    ("before", "wanted"),
    [
        ("pass", True),
        ("import numpy", True),  # numpy ends its threads before a fork
        ("threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", False),
        # A thread that the module `threading` does not know.
        ("_thread.start_new_thread(time.sleep, (60,))", False),
        ("forked.MAX_SHARED_BYTES = 2**20", False),
    ],
    ids=["one thread", "numpy", "a thread", "a thread of C", "much memory"],
)
def test_only_a_small_process_of_one_thread_can_be_copied(before, wanted):
    text = f"{before}\nprint(can_fork(), flush=True)\nos._exit(0)"
    assert run_program(text, OPENBLAS_NUM_THREADS="2") == f"{wanted}\n"


def test_a_thread_beside_the_main_one_cannot_copy_the_process():
    text = """
        def look():
            print(can_fork())
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    """
    assert run_program(text) == "False\n"


def test_a_copy_has_nothing_open_that_it_was_not_given_and_finalises_nothing(tmp_path):
    text = """
        import io
        class Loud:
            def __del__(self):
                print("finalised by", "copy" if os.getpid() != parent else "parent")
        gc.disable()  # in Python 3.12, a collection may run before the copy is made
        parent = os.getpid()
        loud = Loud(); loud.itself = loud; del loud
        kept = os.open(sys.argv[1], os.O_RDWR)
        other = open(sys.argv[2], "w")
        other.write("buffered")
        signal.signal(signal.SIGUSR1, lambda *_: print("handled"))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        sys.stdout = io.StringIO()
        sys.__stdout__.write("once, ")

        def run():
            gc.collect()
            other.flush()
            null = os.stat(os.devnull).st_rdev
            found = {
                "is null": [os.fstat(n).st_rdev == null for n in (0, kept, other.fileno())],
                "handler": signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL,
                "ignored": [signal.getsignal(n) == signal.SIG_IGN for n in (2, 15)],
                "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
                "parent": os.getppid() == parent,
            }
            print(json.dumps(found))
            os.write(kept, b"written by the copy")
            return 7

        sys.__stdout__.flush()
        copy = ForkedProcess(run, {kept})
        code = copy.wait(60)
        sys.stdout = sys.__stdout__
        print(code, copy.poll(), signal.pthread_sigmask(signal.SIG_BLOCK, ()) == {signal.SIGUSR2})
        gc.collect()
    """
    files = [str(tmp_path / name) for name in ("kept", "other")]
    (tmp_path / "kept").touch()
    lines = run_program(text, *files).splitlines()
    assert json.loads(lines[0].removeprefix("once, ")) == {
        "is null": [True, False, True],
        "handler": True,
        "ignored": [True, True],
        "blocked": [signal.SIGUSR2],
        "parent": True,
    }
    assert lines[1:] == ["7 7 True", "finalised by parent"]
    assert [(tmp_path / name).read_text() for name in ("kept", "other")] == [
        "written by the copy",
        "buffered",
    ]


def test_the_end_of_a_copy_is_reported_however_it_comes():
    text = """
        def fail():
            raise KeyError("told on standard error")
        slow = ForkedProcess(lambda: time.sleep(600) or 0, ())
        try:
            slow.wait(0.01)
        except subprocess.TimeoutExpired:
            print("waits", slow.poll())
        slow.kill()
        print(slow.wait(60))
        slow.kill()  # nothing happens
        sys.stderr = None
        print(ForkedProcess(fail, ()).wait(60))
        taken = ForkedProcess(lambda: 3, ())
        os.waitpid(taken.pid, 0)  # by the program that the engine is a part of
        print(taken.wait(60))
    """
    assert run_program(text).split() == ["waits", "None", "-9", "1", "0"]


def test_a_copy_that_is_stopped_ends_with_its_parent():
    text = """
        ready, told = os.pipe()
        copy = ForkedProcess(lambda: os.write(told, b"x") and time.sleep(600), {told})
        os.read(ready, 1)
        os.kill(copy.pid, signal.SIGSTOP)
        print(copy.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    pid = int(run_program(text, code=-signal.SIGKILL))
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(60)


LOGS: dict[str, Any] = {
    "handlers of the application": ("logging.getLogger('vllm').addHandler(own)", {}),
    "a file of settings": ("pass", {"VLLM_LOGGING_CONFIG_PATH": "settings.json"}),
}


@pytest.mark.parametrize("case", LOGS)
def test_the_logger_of_a_copy_is_set_up_as_in_a_new_process(case, tmp_path):
    settings = {
        "version": 1,
        "handlers": {"file": {"class": "logging.FileHandler", "filename": str(tmp_path / "log")}},
        "root": {"handlers": ["file"], "level": "INFO"},
    }
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    before, variables = LOGS[case]
    text = f"""
        import logging
        own = logging.StreamHandler(sys.stdout)
        {before}
        from vllm.logger import configure_again, init_logger
        logger = init_logger("vllm.some.module")
        logger.warning("of the parent")

        def run():
            configure_again("json")
            logger.warning("of the copy")
            return 0

        sys.exit(ForkedProcess(run, ()).wait(60))
    """
    variables = {name: str(tmp_path / value) for name, value in variables.items()}
    output = run_program(text, **variables)
    if variables:
        assert (tmp_path / "log").read_text() == "of the parent\nof the copy\n"
    else:
        assert output == "of the parent\n"
