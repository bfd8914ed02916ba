"""Test that the client examples and the commands that talk to a server run unchanged."""

import runpy
import subprocess
import sys

import pytest

from tests.e2e.operated_server import KEY, OperatedServer
from tests.e2e.server import ROOT, Server
from tests.exhaustive import exhaustive

pytestmark = pytest.mark.e2e

EXAMPLES = sorted((ROOT / "examples" / "online_serving").glob("*.py"))
for name in ("image.py", "transcription.py"):  # these examples need models of their own
    EXAMPLES.remove(ROOT / "examples" / "online_serving" / name)


@pytest.fixture(scope="module")
def server(operated_server: OperatedServer) -> Server:
    return operated_server.server


def flags_of(server):
    return ["--url", f"{server.url}/v1", "--api-key", KEY]


def run(server, *command, typed=""):
    return subprocess.run(
        [sys.executable, *command, *flags_of(server)],
        cwd=ROOT,
        input=typed,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_prints(server, operated_server, example, monkeypatch, capfd):
    """The example runs in this process, which has already imported everything."""
    pytest.importorskip("openai")
    more, shown = (), ""
    if example.stem == "kv_events_subscriber":
        port, replay_port = map(str, operated_server.ports)
        more = ("--port", port, "--replay-port", replay_port)
        shown = "stored "
    elif example.stem == "prompt_embeds":
        shown = "the same as of the text: True"
    monkeypatch.setattr(sys, "argv", [str(example), *more, *flags_of(server)])
    runpy.run_path(str(example), run_name="__main__")
    out, err = capfd.readouterr()
    assert out.strip() and shown in out
    assert "Traceback" not in err and "Warning" not in err, err[-2000:]


@pytest.mark.parametrize(
    ("command", "flags", "typed"),
    [
        exhaustive("chat", ("-q", "Hello"), ""),
        ("chat", ("--system-prompt", "Be brief."), "Hello\nAnd now?\n"),
        ("complete", ("-q", "import os"), ""),
        exhaustive("complete", (), "import os\n"),
    ],
)
def test_a_command_shows_what_the_model_writes(server, command, flags, typed):
    module = ("-m", "vllm.entrypoints.cli.main")
    done = run(server, *module, command, *flags, "--max-tokens", "8", typed=typed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and "Traceback" not in done.stderr
