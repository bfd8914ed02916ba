"""Test `vllm plan --traffic`: the buckets for a traffic, their padding, and the file with them."""

import json
import re
from pathlib import Path

import pytest

from tests.planning.test_card_search import DENSE, write_model
from tests.planning.test_replay import synthetic_trace
from vllm import envs
from vllm.bucketing.bucket import Phase
from vllm.bucketing.strategies.bucket_file import parse_buckets
from vllm.bucketing.traffic import TrafficTable
from vllm.entrypoints.cli.main import main


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = write_model(tmp_path_factory.mktemp("models") / "dense", DENSE)
    limits = ["--max-model-len", "1024", "--num-gpu-blocks-override", "65", "--max-num-seqs", "16"]
    return ["plan", str(folder), "--device", "gaudi2", "--skip-tokenizer-init", *limits]


def test_lengths_are_replayed_and_a_bucket_file_is_written(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = synthetic_trace(30)
    assert trace.times is not None
    rows = zip(trace.num_inputs, trace.num_outputs, trace.times, strict=True)
    (tmp_path / "trace.csv").write_text(
        "input_tokens,output_tokens,timestamp\n" + "".join(f"{i},{o},{t}\n" for i, o, t in rows)
    )
    given = ["--traffic", str(tmp_path / "trace.csv"), "--num-buckets", "6"]
    written = ["--write-buckets", str(tmp_path / "buckets.txt")]
    goals = ["--num-cards", "1", "--goal-ttft", "500", "--request-rate", "4"]
    assert main([*flags, *given, *written, *goals, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    found = plan["traffic"]
    assert plan["goals"]["speed"]["prompt_tokens"] == round(trace.num_inputs.mean())
    assert found["replay"]["requests_per_s"] == pytest.approx(4)
    assert found["at_goals"]["is_met"] and found["at_goals"]["first_token_s"]["p90"] <= 0.5
    assert found["padding"] < found["present_padding"]
    assert found["replay"]["steps"] > 30
    assert found["replay"]["first_token_s"]["p50"] > 0
    [prompts, decodes] = found["certificates"]
    assert prompts.split(":")[0].endswith("prefill buckets")
    assert " decode buckets: " in decodes
    text = (tmp_path / "buckets.txt").read_text()
    assert f"# {decodes}" in text
    buckets = [[str(b.phase), b.batch, b.query_len, b.blocks] for b in parse_buckets(text, "")]
    assert sorted(buckets) == sorted(found["buckets"])


def test_recorded_traffic_is_not_replayed(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = TrafficTable(128)
    for batch in range(1, 14):
        table.add(Phase.DECODE, batch, 1, 2 * batch + 1, count=50)
    table.add(Phase.PREFILL, 1, 300, 0, count=5)
    table.save(tmp_path / "traffic.json")
    assert main([*flags, "--traffic", str(tmp_path / "traffic.json"), "--num-buckets", "4"]) == 0
    out = capsys.readouterr().out
    assert "655 forward passes, recorded" in " ".join(out.split())
    assert "  4 decode buckets: " in out
    assert "device time of padding: " in out
    assert "too few" not in out


@pytest.mark.parametrize(
    ("flag", "unit"),
    [("--warm-up-budget", "seconds of warm-up"), ("--graph-budget", "GiB of HPU graphs")],
)
def test_a_budget_is_kept_and_its_use_is_said(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, unit: str
) -> None:
    table = TrafficTable(128)
    for batch in range(1, 14):
        table.add(Phase.DECODE, batch, 1, 2 * batch + 1, count=50)
        table.add(Phase.PREFILL, 1, 70 * batch, 0, count=5)
    table.save(tmp_path / "traffic.json")
    given = [*flags, "--traffic", str(tmp_path / "traffic.json"), "--json"]
    assert main([*given, flag, "1e-6"]) == 2
    [error] = capsys.readouterr().err.splitlines()
    named = re.search(
        rf"{flag} 1e-06 is too small: the 2 .*{unit}\. Set it to at least (.*)", error
    )
    assert named is not None
    least, found = float(named[1]), []
    for limit in (least, 3 * least):
        assert main([*given, flag, str(limit)]) == 0
        found.append(json.loads(capsys.readouterr().out)["traffic"])
        [line] = found[-1]["certificates"]
        said = re.match(rf"(\d+) buckets \((\S+) of \S+ {unit}\): .* no set within the bud", line)
        assert said is not None and int(said[1]) == len(found[-1]["buckets"])
        assert float(said[2]) <= limit * 1.005  # of three digits
    assert found[0]["padding"] > found[1]["padding"]
    assert len(found[0]["buckets"]) == 2 < len(found[1]["buckets"])


def test_an_engine_with_optimal_buckets_is_planned_with_its_traffic(
    flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = TrafficTable(128)
    table.add(Phase.PREFILL, 1, 300, 0, count=5)
    table.save(tmp_path / "traffic.json")
    monkeypatch.setenv("VLLM_BUCKETING_STRATEGY", "optimal")
    envs.get.cache_clear()
    try:
        given = ["--traffic", str(tmp_path / "traffic.json"), "--num-buckets", "2", "--json"]
        assert main([*flags, *given]) == 0
    finally:
        monkeypatch.undo()
        envs.get.cache_clear()
    found = json.loads(capsys.readouterr().out)
    assert found["start"]["prefill"]["num_buckets"] == 2
    assert found["traffic"]["num_present_buckets"] == len(found["traffic"]["buckets"])


def test_traffic_beyond_the_limits_of_the_engine_is_cut_and_this_is_said(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest bucket of the engine has 1024 tokens, so longer prompts run in parts."""
    table = TrafficTable(128)
    table.add(Phase.PREFILL, 1, 1920, 0, count=3)
    table.add(Phase.DECODE, 900, 1, 900, count=4)
    table.save(tmp_path / "wide.json")
    (tmp_path / "long.csv").write_text("input,output\n10,2\n9000,2\n")
    found = []
    for name in ("wide.json", "long.csv"):
        given = ["--max-model-len", "2048", "--traffic", str(tmp_path / name), "--json"]
        assert main([*flags, *given]) == 0
        found.append(json.loads(capsys.readouterr().out)["traffic"])
    recorded, replayed = found
    assert "4 forward passes are larger" in recorded["notes"][0]
    assert 0 <= recorded["padding"] <= recorded["present_padding"] < 1
    assert "1 of 2 requests are longer than 2048 tokens" in replayed["notes"][0]


@pytest.mark.parametrize(
    ("content", "given", "message"),
    [
        ("input_tokens,output_tokens\n-1,2\n", [], "line 2: input_tokens must be an integer"),
        ("", [], "is not a CSV file with lengths of requests"),
        ('{"format": "vllm traffic", "version": 1', [], "is not JSON, or is cut off"),
        (
            '{"cells": [["decode", 1, 1, 1, 0, 0]], "format": "vllm traffic", "version": 1, '
            '"block_size": 128}',
            [],
            "cell 0 has count 0, but a recorded shape has at least one forward pass",
        ),
        (
            '{"cells": [["decode", 1, 1, 1, 5, 0]], "format": "vllm traffic", "version": 1, '
            '"block_size": 16}',
            [],
            "was recorded with blocks of 16 tokens, and this engine has blocks of 128",
        ),
        (
            "input,output\n1,1\n",
            ["--write-buckets", "/proc/none/x"],
            "--write-buckets /proc/none/x cannot be written",
        ),
        ("input,output\n1,1\n", ["--device", "cpu"], "--device cpu has no buckets"),
        (None, ["--write-buckets", "x"], "--write-buckets x needs --traffic"),
        (None, ["--graph-budget", "2"], "--graph-budget 2 needs --traffic FILE"),
        ("input,output\n1,1\n", ["--warm-up-budget", "nan"], "--warm-up-budget nan must be a num"),
        (
            "input,output\n1,1\n",
            ["--warm-up-budget", "0"],
            "--warm-up-budget 0 must be a number of",
        ),
        ("input,output\n1,1\n", ["--graph-budget", "-1"], "--graph-budget -1 must be a number of"),
        (
            "input,output\n1,1\n",
            ["--graph-budget", "1", "--num-buckets", "9"],
            "--num-buckets 9 and --graph-budget 1 limit the same buckets",
        ),
        (
            "input,output\n1,1\n",
            ["--graph-budget", "1", "--enforce-eager"],
            "--graph-budget 1 needs HPU graphs, which exist only in lazy mode",
        ),
        (None, ["--request-rate", "2"], "--request-rate 2 needs --traffic with lengths"),
        ("input,output\n1,1\n", ["--request-rate", "nan"], " and 1e+06, got nan"),
        ("input,output\n1,1\n", ["--request-rate", "0"], ", got 0"),
    ],
)
def test_bad_traffic_is_one_line(
    flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    given: list[str],
    message: str,
) -> None:
    if content is not None:
        (tmp_path / "traffic").write_text(content)
        given = [*given, "--traffic", str(tmp_path / "traffic")]
    assert main([*flags, *given]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_a_bucket_file_that_is_not_closed_is_completed_and_named(
    flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "buckets.txt"
    monkeypatch.setenv("VLLM_BUCKETING_FROM_FILE", str(path))
    envs.get.cache_clear()
    try:
        says = []
        path.write_text("(1, 128, 0)\n(2, 1, 8)\n")
        for _ in range(2):
            assert main([*flags, "--json"]) == 0
            plan = json.loads(capsys.readouterr().out)
            says.append(plan["completed"])
            path.write_text("".join(f"{tuple(bucket[1:])}\n" for bucket in plan["buckets"]))
    finally:
        monkeypatch.delenv("VLLM_BUCKETING_FROM_FILE")
        envs.get.cache_clear()
    assert says[0].startswith(
        f"{path} (VLLM_BUCKETING_FROM_FILE) has no bucket for some steps. Added "
    )
    assert says[1] == "", "the file has all buckets of the plan"
