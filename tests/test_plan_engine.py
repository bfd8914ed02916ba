"""tools/plan_engine.py: what it refuses, and what it counts. Its numbers are tested where a page
has them (test_readme_commands.py) and against what a start takes."""

import json

import pytest

from tests.hpu import captured_log, simulated_hpu
from tools import plan_engine
from vllm import envs
from vllm.cost_model.cards import GIB
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError


def plan(launch_gib: float = 1, **settings):
    with simulated_hpu(), captured_log():
        config = EngineArgs(**settings).create_engine_config()
        return plan_engine.plan(config, "gaudi2", int(launch_gib * GIB))


@pytest.mark.parametrize(
    "settings, says",
    [
        (
            {"launch_gib": 95},
            r"0.01 GiB of weights and 95.00 GiB for forward passes do not fit into a gaudi2",
        ),
        ({"quantization": "fp8"}, "the bytes of fp8 weights are known only once they are loaded"),
        (
            {"speculative_config": {"method": "draft_model", "model": None}},
            "the memory of a draft model is not planned",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(settings, says):
    if "speculative_config" in settings:
        drafts = {"model": str(plan_engine.ROOT / "vllm/assets/models/stdlib-llama-5m")}
        settings = {"speculative_config": {**drafts, "num_speculative_tokens": 2}}
    with pytest.raises(ConfigError, match=says):
        plan(**settings)


def test_ranks_share_the_weights_and_the_keys_and_values():
    whole, half = plan(), plan(tensor_parallel_size=2)
    stage = plan(pipeline_parallel_size=2)
    assert half["cards"] == stage["cards"] == 2
    assert half["kv_block_mib"] == stage["kv_block_mib"] == whole["kv_block_mib"] / 2
    assert whole["weights_gib"] / 2 < half["weights_gib"] < 0.6 * whole["weights_gib"]


def test_the_program_prints_one_object_or_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["plan_engine.py", "--max-model-len", "1024"])
    with simulated_hpu(), captured_log():
        assert plan_engine.main() == 0
    assert json.loads(capsys.readouterr().out)["max_model_len"] == 1024
    envs.get.cache_clear()
    assert plan_engine.main() == 2
    assert capsys.readouterr().err.startswith("VLLM_HPU_SIM is not set: name the card")
