"""Test the figures of planned models, the throughput section of a plan, and finding cards for
goals.
"""

import json
from functools import partial

import pytest

from vllm.cost_model.throughput import AttentionFigures, ModelFigures
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.planning.card_search import found_lines, found_object, search_cards, serve_command
from vllm.planning.engine_plan import EnginePlan, make_engine_plan
from vllm.planning.engine_throughput import max_requests, serving_cost, throughput_grid
from vllm.planning.throughput.goals import Goals
from vllm.planning.throughput.prediction import Lengths
from vllm.planning.throughput.table import as_lines, as_objects
from vllm.worker.hpu.model_figures import model_figures

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
MIXTURE = DENSE | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
DENSE_PARAMS = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256)


def write_model(folder, config) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return str(folder)


def make_plan(folder: str, num_cards: int, max_num_seqs: int | None = None, **flags) -> EnginePlan:
    args = EngineArgs(
        model=folder,
        max_model_len=1024,
        max_num_seqs=max_num_seqs or 4,
        num_gpu_blocks_override=33,
        skip_tokenizer_init=True,
        **flags,
    )
    return make_engine_plan(args, "gaudi2", num_cards)


def figures_of(plan: EnginePlan) -> ModelFigures:
    return model_figures(plan.worker.model, plan.config)


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory) -> str:
    return write_model(tmp_path_factory.mktemp("models") / "dense", DENSE)


@pytest.fixture(scope="module")
def dense(dense_folder) -> EnginePlan:
    return make_plan(dense_folder, 1)


def test_figures_of_a_dense_model_are_the_same_on_any_number_of_cards(dense, dense_folder):
    figures = figures_of(dense)
    assert figures == ModelFigures(
        dense_params=DENSE_PARAMS,
        vocab_size=512,
        hidden_size=128,
        num_layers=2,
        attention=(
            AttentionFigures(num_layers=2, query_width=128, kv_width=2 * 64, num_kv_heads=2),
        ),
        weight_bytes=2,
        kv_bytes=2,
        is_fp8=False,
    )
    assert figures_of(make_plan(dense_folder, 2)) == figures


def test_figures_of_a_mixture_have_the_parameters_of_an_expert(tmp_path):
    figures = figures_of(make_plan(write_model(tmp_path / "mixture", MIXTURE), 2))
    assert (figures.num_experts, figures.experts_per_token) == (4, 2)
    assert figures.expert_params == 2 * 3 * 128 * 256
    routers = 2 * 2 * 4 * 128  # every rank has all routers
    assert figures.dense_params == 2 * (2 * 128 * 128 + 2 * 128 * 64) + routers


def test_the_grid_has_what_fits_and_marks_what_no_published_run_is_near(dense):
    predictions = throughput_grid(dense, serving_cost(dense))
    objects = as_objects(predictions)
    assert {(one["requests"], one["prompt_tokens"]) for one in objects} == {
        (requests, prompt) for requests in (1, 4) for prompt in (128, 512)
    }
    for one in objects:
        for name in ("ttft_s", "tpot_s", "tokens_per_s"):
            low, high = one[name]["band"]
            assert 0 < low < one[name]["expected"] < high
        assert one["outside_of_published_data"] == ["dtype"]
    lines = as_lines(predictions)
    assert len(lines) == 1 + len(objects) + 1
    assert max(map(len, lines)) <= 100
    assert lines[-1].startswith("* outside of published data (dtype)")


def test_goals_that_one_card_meets_need_one_card(dense_folder):
    lengths = Lengths(100, 100)
    found = search_cards(partial(make_plan, dense_folder), Goals(tokens_per_s=1), lengths)
    assert found.choice.num_cards == 1
    assert found.choice.misses == ()
    held = max_requests(make_plan(dense_folder, 1, found.choice.max_num_seqs), lengths)
    assert found.choice.max_num_seqs <= held
    command = serve_command(found, "a model", ["--max-model-len", "1024"])
    assert command == (
        "PT_HPU_LAZY_MODE=1 vllm serve 'a model' --max-model-len 1024 --tensor-parallel-size 1 "
        f"--max-num-seqs {found.choice.max_num_seqs}"
    )
    assert json.loads(json.dumps(found_object(found, command)))["is_met"]
    assert found_lines(found)[0].startswith("The goals are met by 1 card with --max-num-seqs ")


def test_a_batch_whose_workspace_does_not_fit_is_given_up(dense_folder):
    def make(num_cards: int, max_num_seqs: int | None) -> EnginePlan:
        if max_num_seqs is not None and max_num_seqs > 6:
            raise ConfigError("no memory for the workspace")
        return make_plan(dense_folder, num_cards, max_num_seqs)

    found = search_cards(make, Goals(tokens_per_s=1), Lengths(100, 100))
    assert 4 <= found.choice.max_num_seqs <= 6
    assert found.plan.config.scheduler.max_num_seqs == found.choice.max_num_seqs


def test_cards_on_which_the_engine_does_not_run_are_named(dense_folder):
    found = search_cards(partial(make_plan, dense_folder), Goals(ttft_ms=1e-6), Lengths(100, 100))
    assert [miss.name for miss in found.choice.misses] == ["ttft_ms"]
    assert list(found.unfit) == [8]  # 8 cards do not fit, since the model has 4 heads
    lines = found_lines(found)
    assert lines[0].startswith("8 cards: ")
    assert lines[1].startswith("No setting meets the goals. The nearest is ")


def test_requests_longer_than_the_model_takes_are_refused(dense_folder):
    with pytest.raises(ConfigError, match="requests of 1000 \\+ 100 tokens are longer than"):
        search_cards(partial(make_plan, dense_folder), Goals(ttft_ms=1), Lengths(1000, 100))
