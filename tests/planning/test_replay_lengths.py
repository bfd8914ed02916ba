"""Test `--traffic` of an engine with a file of request lengths: the lengths are replayed, and the
engine uses the recorded traffic.
"""

from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from tests.hpu import SMALL_ENGINE, captured_log, simulated_hpu
from vllm.bucketing.bucket import Phase
from vllm.bucketing.traffic import TrafficTable
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.shared.replayed_traffic import with_recorded_traffic
from vllm.errors import ConfigError
from vllm.planning import replay_lengths

LENGTHS = "input_tokens,output_tokens,timestamp\n20,10,0\n30,5,0.01\n60,30,9\n"


def args_of(path: Path, **more) -> EngineArgs:
    return EngineArgs(**SMALL_ENGINE, traffic=str(path), **more)


def test_requests_are_replayed_in_another_process(tmp_path):
    path = tmp_path / "requests.csv"
    path.write_text(LENGTHS)
    with simulated_hpu(VLLM_HPU_SIM="gaudi3"), captured_log() as log:
        args = with_recorded_traffic(args_of(path, device="hpu"))
        assert with_recorded_traffic(args) is args
    table = TrafficTable.load(Path(args.traffic), SMALL_ENGINE["block_size"])
    prompts, _ = table.shapes(Phase.PREFILL)
    assert {20, 30, 60} <= set(prompts[:, 2].tolist())
    _, decodes = table.shapes(Phase.DECODE)
    assert decodes.sum() >= 29
    [line] = log
    assert f"--traffic {path}: a simulation of its requests on a gaudi3" in line


def test_an_engine_without_buckets_reads_no_traffic(tmp_path):
    args = args_of(tmp_path / "missing.csv", device="cpu")
    assert with_recorded_traffic(args) is args


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "missing.csv cannot be read"), ("input_tokens,output_tokens\n-1,2\n", "-1")],
)
def test_bad_lengths_are_one_line(content, words, tmp_path, monkeypatch, capsys):
    path = tmp_path / "missing.csv"
    if content is not None:
        path.write_text(content)

    class Done:
        """The result of a process that is replaced by a call in this process."""

        def __init__(self, command, *, input, **given) -> None:
            monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(input)))
            self.returncode = replay_lengths.main(*command[3:])
            self.stdout = capsys.readouterr().out.encode()

    monkeypatch.setattr("subprocess.run", Done)
    with (
        simulated_hpu(VLLM_HPU_SIM="gaudi2"),
        captured_log(),
        pytest.raises(ConfigError, match=words) as error,
    ):
        with_recorded_traffic(args_of(path, device="hpu"))
    assert len(str(error.value).splitlines()) == 1


def test_python_objects_are_refused_in_one_line(tmp_path):
    path = tmp_path / "requests.csv"
    path.write_text(LENGTHS)
    args = args_of(path, device="hpu")
    args.logits_processor_pattern = object()
    with (
        simulated_hpu(VLLM_HPU_SIM="gaudi2"),
        captured_log(),
        pytest.raises(ConfigError, match="to which these arguments cannot be sent"),
    ):
        with_recorded_traffic(args)
