"""Test the recorded start time of this process, and the progress of a start."""

import subprocess
import sys
import time

from vllm.utils.process import startup_progress


def test_a_process_began_after_its_parent_asked_and_before_its_first_line():
    code = (
        "import time; first_line = time.monotonic()\n"
        "from vllm.utils.process.startup_progress import process_start\n"
        "print(process_start(), first_line)"
    )
    asked = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    began, first_line = map(float, result.stdout.split())
    tick = 0.011  # the system counts in hundredths of a second
    assert asked - tick <= began <= first_line + tick


def test_without_the_system_s_word_it_is_the_import(monkeypatch, tmp_path):
    monkeypatch.setattr(startup_progress, "STAT", tmp_path / "none")
    assert startup_progress.process_start() == startup_progress.IMPORTED


def test_reports_reach_the_listener_and_nobody_else():
    heard = []
    startup_progress.listen(lambda *report: heard.append(report))
    try:
        startup_progress.report("loading", 1, 2)
        startup_progress.report("warm-up", 1, 2, 30.0)
    finally:
        startup_progress.listen(None)
    startup_progress.report("unheard")
    assert heard == [("loading", 1, 2, None), ("warm-up", 1, 2, 30.0)]
