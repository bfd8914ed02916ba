"""Test that the offline examples run unchanged. test_server_examples runs the ones that need a
server.
"""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "offline_inference").rglob("*.py"))
LAUNCHER = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
"""Variables that torchrun sets for the only process."""


def test_there_are_examples():
    assert len(EXAMPLES) >= 5


def check_shown(out: str, err: str) -> None:
    assert out.strip()
    assert "Traceback" not in err and "Warning" not in err, err[-2000:]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_prints(example, monkeypatch, capfd):
    """The example runs in this process, which has already imported everything."""
    monkeypatch.setattr(sys, "argv", [str(example)])
    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, value)
    runpy.run_path(str(example), run_name="__main__")
    check_shown(*capfd.readouterr())


def test_an_example_needs_nothing_that_tests_have_imported():
    example = ROOT / "examples" / "offline_inference" / "basic.py"
    done = subprocess.run(
        [sys.executable, str(example)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    check_shown(done.stdout, done.stderr)
