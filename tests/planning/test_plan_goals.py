"""Test `vllm plan` with goals: its output, and refused goals."""

import json

import pytest

from tests.planning.test_card_search import DENSE, write_model
from vllm.cost_model.measured import Measured
from vllm.entrypoints.cli.main import main


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    folder = write_model(tmp_path_factory.mktemp("models") / "dense", DENSE)
    limits = ["--max-model-len", "1024", "--num-gpu-blocks-override", "33"]
    return ["plan", folder, "--device", "gaudi2", "--skip-tokenizer-init", *limits]


def test_goals_add_their_cards_and_the_command(flags, capsys):
    goals = ["--goal-tokens-per-s", "1", "--input-len", "100", "--output-len", "100"]
    assert main([*flags, *goals, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["goals"]["is_met"]
    assert found["goals"]["num_cards"] == found["num_cards"] == 1
    command = found["goals"]["command"].split()
    assert command[:4] == ["PT_HPU_LAZY_MODE=1", "vllm", "serve", flags[1]]
    assert command[-4:-1] == ["--tensor-parallel-size", "1", "--max-num-seqs"]
    assert "--num-gpu-blocks-override" in command
    assert not {"--goal-tokens-per-s", "--device", "--json"} & set(command)
    assert {row["prompt_tokens"] for row in found["throughput"]} == {128, 512}


def test_the_first_line_has_format_and_engines_and_a_pipeline_has_no_speed(flags, capsys):
    given = ["--quantization", "fp8", "--data-parallel-size", "2", "--pipeline-parallel-size", "2"]
    assert main([*flags, *given]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "dense, fp8 weights, bfloat16, on 2 gaudi2 cards for each of 2 engines. Planned, not"
    )
    assert "Throughput" not in out


def test_a_server_answers_when_its_first_buckets_are_warm(flags, capsys):
    starts = []
    for given in ([], ["--ready-when", "first"], ["--first-buckets", "1"]):
        assert main([*flags, *given, "--json"]) == 0
        starts.append(json.loads(capsys.readouterr().out)["start"])
    usual, first, fewer = starts
    assert usual == first  # the plan has all buckets, whatever the server starts with
    all_buckets = usual["prefill"]["num_buckets"] + usual["decode"]["num_buckets"]
    assert fewer["num_first_buckets"] < usual["num_first_buckets"] < all_buckets
    assert 0 < fewer["first_s"] < usual["first_s"] < usual["cold_s"]


def test_measured_rates_change_the_plan_and_are_named(flags, capsys, tmp_path):
    path = tmp_path / "card.json"
    rates = {"memory_bytes_per_s": 1e12, "compile_s": 1.0}
    Measured("gaudi2", False, rates).write(path)
    plans = []
    for measured in ([], ["--measured", str(path)]):
        assert main([*flags, *measured, "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    published, own = plans
    assert published["measured"] == ""
    assert own["measured"].startswith("Measured on this card; time relative to published cards")
    assert own["start"]["cold_s"] > published["start"]["cold_s"]
    assert own["start"]["cached_s"] == published["start"]["cached_s"]
    for before, after in zip(published["throughput"], own["throughput"], strict=True):
        assert after["tpot_s"]["expected"] > before["tpot_s"]["expected"]


def test_pipeline_stages_have_no_throughput(flags, capsys):
    stages = ["--pipeline-parallel-size", "2"]
    assert main([*flags, *stages, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["throughput"] == []
    goals = ["--goal-ttft", "5", "--input-len", "100", "--num-cards", "1"]
    assert main([*flags, *stages, *goals]) == 2
    assert "--pipeline-parallel-size must be 1, got 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--goal-ttft", "0"], "--goal-ttft must be a number above 0, in ms, got 0"),
        (["--goal-tpot", "-3"], "--goal-tpot must be a number above 0, in ms, got -3"),
        (["--goal-tokens-per-s", "nan"], "--goal-tokens-per-s must be a number above 0"),
        (["--goal-ttft", "5", "--input-len", "0"], "--input-len must be at least 1, got 0"),
        (["--goal-ttft", "5", "--output-len", "2000"], "1024 + 2000 tokens are longer than"),
        (
            ["--goal-ttft", "5", "-pp", "2", "--input-len", "9"],
            "--pipeline-parallel-size must be 1, got 2",
        ),
        (["--output-len", "9"], "--output-len 9 has no effect without a goal: give --goal-ttft,"),
        (
            ["--num-buckets", "9"],
            "--num-buckets 9 needs --traffic FILE, the traffic for which buckets",
        ),
        (["--goal-ttft", "5", "--device", "cpu"], "goals need a card whose speed is known"),
        (
            ["--measured", "/no/file"],
            "--measured /no/file cannot be read: No such file or directory",
        ),
        (["--measured", "/no/file", "--device", "cpu"], "--measured needs a card, one of gaudi2"),
        (
            ["--goal-ttft", "5", "--num-cards", "8"],
            "the engine does not fit on any number of cards; on 8",
        ),
    ],
)
def test_wrong_goals_are_one_line(flags, given, message, capsys):
    assert main([*flags, *given]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]
