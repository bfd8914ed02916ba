"""Test decoders with the modules of transformers on several ranks and stages: they give the tokens
of one process, or are refused at the start.
"""

from pathlib import Path

import pytest
import transformers

from tests.e2e.ranks import ENGINE, assert_same, generate
from tests.e2e.test_transformers_model import make, needs_backend, skip_if_attention_is_fixed
from tests.executor.thread_ranks import ThreadRanks
from tests.reach import core_of, executor_of, leave_weights_unpacked
from vllm import LLM
from vllm.engine import engine_core
from vllm.errors import ConfigError

pytestmark = needs_backend
MORE_BLOCKS = ENGINE | {"num_gpu_blocks_override": 60, "model_impl": "transformers"}


def on_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch, **values: int) -> LLM:
    """Make an engine whose ranks are threads of this process."""
    with monkeypatch.context() as patched:
        patched.setattr(engine_core, "make_executor", ThreadRanks)
        return LLM(str(folder), **MORE_BLOCKS | values)


@pytest.mark.parametrize(
    ("model_type", "tensor", "stages"),
    [
        # Only some layers have rotary embedding.
        pytest.param("smollm3", 2, 1, marks=pytest.mark.exhaustive),
        ("exaone4", 1, 2),  # this family has windows and norms of heads
        ("seed_oss", 2, 2),  # this family has biases
        ("arcee", 4, 1),  # ranks share key/value heads
        # The activation of this family has parameters.
        pytest.param("apertus", 1, 2, marks=pytest.mark.exhaustive),
        # This family has experts, shared experts, and a layer without experts.
        pytest.param("ernie4_5_moe", 2, 2, marks=pytest.mark.exhaustive),
        # Norms cover all heads together, so every rank computes the whole attention.
        pytest.param("flex_olmo", 2, 1, marks=pytest.mark.exhaustive),
        ("phimoe", 2, 1),  # the tensor parallel plan of transformers covers the experts only
    ],
)
def test_ranks_and_stages_give_the_tokens_of_one(model_type, tensor, stages, tmp_path, monkeypatch):
    folder = make(model_type, tmp_path)
    skip_if_attention_is_fixed(model_type)
    want = generate(LLM(str(folder), **MORE_BLOCKS))
    llm = on_ranks(folder, monkeypatch, tensor_parallel_size=tensor, pipeline_parallel_size=stages)
    assert_same(generate(llm), want)
    core_of(llm).shutdown()


def test_a_rank_has_its_part_of_a_planned_layer_only(tmp_path, monkeypatch):
    leave_weights_unpacked(monkeypatch)
    llm = on_ranks(make("smollm3", tmp_path), monkeypatch, tensor_parallel_size=2)
    for worker in executor_of(llm).workers:
        layers = dict(worker.runner.model.named_modules())
        attention, mlp = (layers[f"model.layers.0.{name}"] for name in ("self_attn", "mlp"))
        assert attention.q_proj.weight.shape == (32, 64)
        assert attention.k_proj.weight.shape == (16, 64)
        assert attention.o_proj.weight.shape == (64, 32)
        assert mlp.up_proj.weight.shape[0] * 2 == mlp.down_proj.weight.shape[1] * 2 == 176
    core_of(llm).shutdown()


TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("model_type", "ranks", "values", "message"),
    [
        (
            "stablelm",
            TENSOR,
            {},
            r"has no plan for that \(base_model_tp_plan\). Set tensor_parallel_size=1",
        ),
        (
            "nemotron",
            PIPELINE,
            {},
            r"no plan for that \(base_model_pp_plan\). Set pipeline_par",
        ),
        (
            "granite",
            PIPELINE,
            {"embedding_multiplier": 2.0},
            "it also changes hidden states outside of them",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(model_type, ranks, values, message, tmp_path, monkeypatch):
    folder = make(model_type, tmp_path, **values)
    skip_if_attention_is_fixed(model_type)
    with pytest.raises(ConfigError, match=message) as failure:
        on_ranks(folder, monkeypatch, **ranks)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layers.*.self_attn.q_proj": "strange"},
            "its plan splits layers.0.self_attn.q_proj in the",
        ),
        ({"layers.*.self_attn.o_proj": "replicated"}, "a test run raised"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(change, message, tmp_path, monkeypatch):
    folder = make("smollm3", tmp_path)
    config = transformers.SmolLM3Config
    plan = config.base_model_tp_plan | change
    monkeypatch.setattr(config, "base_model_tp_plan", plan)
    with pytest.raises(ConfigError, match=message):
        on_ranks(folder, monkeypatch, **TENSOR)
