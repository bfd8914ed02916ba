"""Test the `vllm` command as a user runs it, in a separate process."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vllm import envs
from vllm.entrypoints.cli.main import main
from vllm.platforms import registry
from vllm.version import __version__

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
SMALL = ["--max-model-len", "256", "--num-gpu-blocks-override", "64"]
GREEDY = ["--temperature", "0", "--max-tokens", "4", *SMALL]


def test_a_program_without_standard_streams_gives_its_processes_some():
    """A supervisor may start a program without them. Then sockets would get their numbers."""
    code = (
        "import os, subprocess, sys\n"
        "from vllm.entrypoints.shared.program import run_command\n"
        "def run():\n"
        "    child = 'import sys; sys.exit(None in (sys.stdin, sys.stdout, sys.stderr))'\n"
        "    return subprocess.run([sys.executable, '-c', child]).returncode\n"
        "os._exit(run_command(run, list) or sys.stdin.read() != '' or sys.stderr.isatty())\n"
    )
    command = 'exec 0<&- 1>&- 2>&-; exec "$0" -c "$1"'
    assert subprocess.run(["sh", "-c", command, sys.executable, code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("args", [["--help"], ["generate", "--help"], ["collect-env", "--help"]])
def test_help_loads_nothing_heavy(args):
    code = (
        "import sys\n"
        "from vllm.entrypoints.cli.main import main\n"
        "try:\n"
        f"    main({args!r})\n"
        "except SystemExit as exit:\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)\n"
        "    print('code', exit.code, 'heavy', sorted(heavy))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert result.stderr == ""
    assert result.stdout.startswith("usage: vllm")
    assert result.stdout.endswith("code 0 heavy []\n")


def test_help_of_generate_shows_prompts_sampling_and_engine_flags(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help=all"])
    help = capsys.readouterr().out
    for flag in ("--prompt ", "--prompts-file", "--temperature", "--max-model-len", "--dtype"):
        assert flag in help
    assert "--swap-space" not in help


@pytest.mark.parametrize("flag", ["-v", "--version"])
def test_version(flag, capsys):
    with pytest.raises(SystemExit) as exit:
        main([flag])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "--promt", "x"], "unrecognized argument: --promt (did you mean --prompt?)"),
        (["generate", "--n", "two"], "argument --n: must be an integer, got 'two'"),
    ],
)
def test_a_bad_command_line_exits_with_2_and_a_hint(args, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(args)
    captured = capsys.readouterr()
    assert exit.value.code == 2
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "/no/such/model"], "error: model folder '/no/such/model' does not exist\n"),
        (["--temperature=-1"], "error: temperature must be "),
        (
            ["--enable-prompt-adapter"],
            "error: --enable-prompt-adapter: not available in this version: ",
        ),
        (["--prompts-file", "/no/file"], "error: cannot read prompts from '/no/file': "),
    ],
)
def test_what_cannot_run_is_one_line_on_stderr_and_code_2(args, message, capsys):
    assert main(["generate", "--prompt", "x", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_without_prompts_there_is_nothing_to_do(tmp_path, capsys):
    empty = tmp_path / "prompts.txt"
    empty.write_text("\n  \n")
    assert main(["generate", "--prompts-file", str(empty)]) == 2
    assert capsys.readouterr().err.startswith("error: there are no prompts: give --prompt TEXT")


def test_an_interrupt_is_quiet_and_130(tmp_path):
    pipe = tmp_path / "prompts"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [*COMMAND, "generate", "--prompts-file", str(pipe)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts a test run in the background with Ctrl-C ignored, and children inherit
        # this: restore the default handler.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    # Opening waits until the command has opened the other end and waits for prompts.
    with pipe.open("w"):
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.e2e
def test_generate_prints_prompts_texts_and_speed(capsys):
    assert main(["generate", "--prompt", "import os", "--prompt", "class Queue:", *GREEDY]) == 0
    printed = capsys.readouterr().out
    assert "--- 1 of 2\nimport os" in printed
    assert "--- 2 of 2\nclass Queue:" in printed
    assert re.fullmatch(
        r"2 prompts, \d+ prompt tokens, 8 output tokens in [\d.]+ s: [\d.]+ tokens/s",
        printed.splitlines()[-1],
    )


@pytest.mark.e2e
def test_generate_reads_standard_input_and_prints_json(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n\nclass Queue:\n"))
    assert main(["generate", "--prompts-file", "-", "--json", *GREEDY]) == 0
    result = capsys.readouterr()
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert [line["prompt"] for line in lines] == ["import os", "class Queue:"]
    for line in lines:
        (output,) = line["outputs"]
        assert set(output) == {"text", "num_tokens", "finish_reason"}
        assert output["num_tokens"] == 4
        assert output["finish_reason"] == "length"
    assert "tokens/s" in result.err


@pytest.mark.e2e
def test_generate_gives_several_outputs_and_stops_at_a_string(capsys):
    flags = ["--n", "2", "--seed", "1", "--max-tokens", "64", "--stop", "e", "--json"]
    assert main(["generate", "--prompt", "def ", *flags, *SMALL]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    outputs = json.loads(line)["outputs"]
    assert len(outputs) == 2
    assert all("e" not in output["text"] for output in outputs)


@pytest.mark.e2e
def test_generate_answers_a_chat(capsys):
    question = "What does os.path.join do?"
    assert main(["generate", "--chat", "--prompt", question, *GREEDY]) == 0
    assert f"--- 1 of 1\n{question}\n\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("release", "said"),
    [
        ("1.24", "all"),
        ("1.23", "absent, with torch operators instead: FusedSDPA sink, mixture_of_experts in MX"),
    ],
)
def test_collect_env_names_the_kernels_that_the_bridge_lacks(monkeypatch, capsys, release, said):
    settings = envs.Envs.load({"VLLM_HPU_SIM": "gaudi2", "VLLM_HPU_SIM_BRIDGE": release})
    monkeypatch.setattr(envs, "get", lambda: settings)
    registry.resolve_platform.cache_clear()
    try:
        assert main(["collect-env"]) == 0
    finally:
        registry.resolve_platform.cache_clear()
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("Gaudi kernels:")]
    assert line.partition(":")[2].strip().startswith(said)


def test_collect_env_says_what_a_bug_report_needs(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    monkeypatch.setenv("VLLM_USE_V1", "1")
    assert main(["collect-env"]) == 0
    out = capsys.readouterr().out
    facts = dict(re.split(r": +", line, maxsplit=1) for line in out.splitlines())
    assert facts["vllm"] == __version__
    assert facts["Python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert facts["Platform"] in ("cpu", "hpu")
    assert re.fullmatch(r"(\d+ of )?\d+", facts["CPU cores"])
    assert re.fullmatch(r"[\d.]+ GiB, [\d.]+ GiB available", facts["Memory"])
    assert facts["torch"] != "not installed"
    assert facts["CPU kernels"].startswith(("loaded", "off", "not built", "built, but"))
    assert facts["VLLM_USE_V1"] == "1"
    assert facts["VLLM_API_KEY"] == "***"
    assert "sesame" not in out
