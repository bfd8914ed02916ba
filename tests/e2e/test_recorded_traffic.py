"""Test that the traffic that one engine records chooses the buckets of the next engine."""

from pathlib import Path

import pytest

from tests.hpu import FEW_BUCKETS, SMALL_ENGINE, captured_log, simulated_hpu
from vllm import LLM, SamplingParams
from vllm.bucketing import Phase
from vllm.bucketing.traffic import TrafficTable
from vllm.errors import ConfigError

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [number + 5] * (9 * number + 4)} for number in range(3)]


def test_an_engine_runs_in_the_buckets_of_what_another_has_recorded(tmp_path: Path) -> None:
    path = str(tmp_path / "traffic.json")
    with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS):
        with captured_log():
            llm = LLM(**SMALL_ENGINE, record_traffic=path)
            expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]
            llm.llm_engine.shutdown()
        table = TrafficTable.load(Path(path), 16)
        shapes, weights = table.shapes(Phase.DECODE)
        assert shapes[:, 1].tolist() == [3] * len(shapes)
        assert weights.sum() == 7
    variables = {"PT_HPU_LAZY_MODE": 1, "VLLM_CONTIGUOUS_PA": 0}
    with simulated_hpu(has_profiling_run=False, **variables), captured_log() as log:
        llm = LLM(**SMALL_ENGINE, traffic=path, num_buckets=3)
        found = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]
    assert found == expected
    assert sum("% padding; no" in line for line in log) == 2
    assert not any("was not warmed-up" in line for line in log)


def test_traffic_and_another_strategy_exclude_each_other(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    TrafficTable(16).save(path)
    for variables in (
        {"VLLM_BUCKETING_STRATEGY": "sparse"},
        {"VLLM_EXPONENTIAL_BUCKETING": 1},
        {"VLLM_BUCKETING_FROM_FILE": "buckets.txt"},
    ):
        with simulated_hpu(**variables), pytest.raises(ConfigError, match=r"--traffic .* chooses"):
            LLM(**SMALL_ENGINE, traffic=str(path))
