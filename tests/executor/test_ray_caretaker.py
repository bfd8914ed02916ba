"""Test that processes of a local Ray cluster end with the process that started the cluster."""

import signal
import subprocess
import sys

import psutil

from vllm.executor.ray import caretaker
from vllm.executor.ray.utils import start_caretaker


def test_what_is_left_is_ended_and_no_process_that_has_its_number_by_now():
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    left, other = subprocess.Popen(command), subprocess.Popen(command)
    started = psutil.Process(left.pid).create_time()
    names = [f"{left.pid}:{started}", f"{other.pid}:{started - 1}", "999999999:1.0"]
    subprocess.run([sys.executable, caretaker.__file__, *names], input=b"", check=True)
    assert left.wait(60) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()


def test_the_engine_starts_the_program_that_ends_its_cluster():
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    started = start_caretaker([psutil.Process(left.pid)])
    assert left.poll() is None
    started.communicate(timeout=60)  # closes the pipe, as the end of the engine does
    assert (started.returncode, left.wait(60)) == (0, -signal.SIGKILL)
