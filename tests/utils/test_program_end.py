"""Test how a program ends without the end of the interpreter."""

import os
import subprocess
import sys

import pytest

from vllm.utils.process import program_end

PROGRAM = """
import atexit, threading, time
from vllm.utils.process.program_end import end_program

class Destroyed:
    def __del__(self):
        print("destroyed", flush=True)

def work():
    time.sleep(0.05)
    print("thread", end=" ")

kept = Destroyed()
atexit.register(print, "exit handler", end=" ")
threading.Thread(target=work).start()
end_program(7)
"""


def test_threads_and_exit_handlers_end_and_all_is_written_but_no_object_is_destroyed():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (7, "thread exit handler ", "")


def test_an_output_that_nobody_reads_is_no_traceback():
    code = (
        "import sys; from vllm.utils.process.program_end import end_program\n"
        "sys.stdin.read(); print('text'); end_program(0)"
    )
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    buffered = {"PYTHONPATH": os.pathsep.join(sys.path)}  # without PYTHONUNBUFFERED
    with subprocess.Popen(command, **pipes, env=buffered) as program:
        program.stdout.close()
        program.stdin.close()
        assert program.stderr.read() == b""
    assert program.returncode == 1


def test_where_handlers_in_c_may_wait_for_the_end_of_the_interpreter_it_ends_as_usual(monkeypatch):
    monkeypatch.setattr(program_end, "has_vendor_library", lambda: True)
    with pytest.raises(SystemExit) as ended:
        program_end.end_program(3)
    assert ended.value.code == 3


def test_a_profiler_gets_its_end():
    sys.setprofile(lambda *event: None)
    try:
        with pytest.raises(SystemExit):
            program_end.end_program(0)
    finally:
        sys.setprofile(None)
