"""The examples of clients run as they are, and so do the commands that talk to a server."""

import subprocess
import sys

import pytest

from tests.e2e.server import ROOT, start_server

pytestmark = pytest.mark.e2e

EXAMPLES = sorted((ROOT / "examples" / "online_serving").glob("*.py"))
KEY = "sesame"


@pytest.fixture(scope="module")
def server():
    with start_server("--api-key", KEY, "--enable-prompt-embeds") as server:
        yield server


def run(server, *command, typed=""):
    flags = ["--url", f"{server.url}/v1", "--api-key", KEY]
    return subprocess.run(
        [sys.executable, *command, *flags],
        cwd=ROOT,
        input=typed,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_prints(server, example):
    pytest.importorskip("openai")
    done = run(server, str(example))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("command", "flags", "typed"),
    [
        ("chat", ("-q", "Hello"), ""),
        ("chat", ("--system-prompt", "Be brief."), "Hello\nAnd now?\n"),
        ("complete", ("-q", "import os"), ""),
        ("complete", (), "import os\n"),
    ],
)
def test_a_command_shows_what_the_model_writes(server, command, flags, typed):
    module = ("-m", "vllm.entrypoints.cli.main")
    done = run(server, *module, command, *flags, "--max-tokens", "8", typed=typed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and "Traceback" not in done.stderr
