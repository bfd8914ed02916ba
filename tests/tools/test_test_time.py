"""Test the measured processor time of tests, with a child process."""

import subprocess
import sys

from tools.test_time import CpuTimes, cpu_s

BUSY = (
    "import time; end = time.process_time() + 0.1\n"
    "while time.process_time() < end: pass\n"
    "print(flush=True); input()"
)


def test_a_child_counts_while_it_runs_and_afterwards():
    before = cpu_s()
    command = [sys.executable, "-S", "-c", BUSY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        running = cpu_s() - before
        child.communicate(b"\n")
    assert running > 0.05 and cpu_s() - before > 0.05


def test_a_fixture_counts_without_the_fixtures_that_it_uses(monkeypatch):
    clock = iter([0.0, 1.0, 4.0, 6.0])
    monkeypatch.setattr("tools.test_time.cpu_s", lambda: next(clock))
    times = CpuTimes()
    with times.measured(times.fixtures, "outer"), times.measured(times.fixtures, "inner"):
        pass
    assert times.fixtures == {"outer": 3.0, "inner": 3.0}
