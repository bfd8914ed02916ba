"""Test published kinds of pooling checkpoints: with other heads, with and without a prefix."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.tiny_models import LOAD_FLOAT32, make_tiny_model, randomize
from tests.tiny_pooling_models import MODELS, hidden_states, make_pooling_model
from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.errors import ConfigError, WeightLoadError
from vllm.model_executor.layers.pooler import activate
from vllm.model_executor.loader.checkpoint import iterate_tensors
from vllm.model_executor.loader.model_loader import build_model, materialize
from vllm.model_executor.loader.weights import load_weights
from vllm.model_executor.models.interface import PoolingModel
from vllm.utils.files.weight_files import find_files

PROMPT = torch.arange(100, 130)


def read_config(folder: Path, **changes: Any) -> dict[str, Any]:
    config = transformers.AutoConfig.from_pretrained(folder).to_dict()
    return {**config, **changes}


def load(folder: Path, config: dict[str, Any]) -> PoolingModel:
    model = build_model(ModelArch.from_hf(config), TPGroup(), torch.float32, is_pooling=True)
    assert isinstance(model, PoolingModel)
    materialize(model, torch.device("cpu"))
    load_weights(model, iterate_tensors(find_files(folder, "auto"), False), TPGroup())
    return model


@torch.inference_mode()
def states_of(model: PoolingModel) -> torch.Tensor:
    states: torch.Tensor = model(PROMPT, torch.arange(len(PROMPT)))
    return states


@pytest.mark.parametrize(
    ("saved_as", "loaded_as"),
    [
        ("BertForPreTraining", "BertModel"),
        ("BertForMaskedLM", "BertModel"),
        ("RobertaForMaskedLM", "RobertaModel"),
        ("XLMRobertaForMaskedLM", "XLMRobertaModel"),
        ("LlamaForCausalLM", "LlamaModel"),
        ("Qwen3ForCausalLM", "Qwen3Model"),
        ("Qwen2Model", "Qwen2ForCausalLM"),
    ],
)
def test_heads_of_other_tasks_are_passed_over(saved_as, loaded_as, tmp_path):
    create, values = MODELS[loaded_as]
    model = getattr(transformers, saved_as)(create(**values))
    randomize(model, 0)
    model.save_pretrained(tmp_path)
    config = read_config(tmp_path, architectures=[loaded_as])
    want = hidden_states(tmp_path, saved_as, PROMPT.tolist())
    torch.testing.assert_close(states_of(load(tmp_path, config)), want, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ["opt", "mistral", "qwen3"])
def test_any_generative_family_can_embed(family, tmp_path):
    folder = make_tiny_model(family, tmp_path)
    reference = transformers.AutoModel.from_pretrained(folder, **LOAD_FLOAT32).eval()
    with torch.inference_mode():
        want = reference(PROMPT[None]).last_hidden_state[0]
    got = states_of(load(folder, read_config(folder)))
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


def test_a_classifier_without_its_head_is_refused(tmp_path):
    folder = make_pooling_model("BertModel", tmp_path)
    config = read_config(folder, architectures=["BertForSequenceClassification"])
    with pytest.raises(WeightLoadError, match=r"missing.*classifier\.weight"):
        load(folder, config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "supported: absolute"),
        ({"hidden_act": "quick_gelu_2"}, "'quick_gelu_2' is not supported"),
    ],
)
def test_what_an_encoder_cannot_do_is_refused(changes, message, tmp_path):
    folder = make_pooling_model("BertModel", tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(folder, read_config(folder, **changes))


def test_a_pooling_model_is_not_run_as_a_generative_one(tmp_path):
    folder = make_pooling_model("BertModel", tmp_path)
    arch = ModelArch.from_hf(json.loads((folder / "config.json").read_text()))
    with pytest.raises(ConfigError, match="BertModel is not a subclass of CausalLM"):
        build_model(arch, TPGroup(), torch.float32)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("none", lambda x: x),
        ("normalize", lambda x: torch.nn.functional.normalize(x, dim=-1)),
        ("softmax", lambda x: x.softmax(-1)),
        ("sigmoid", torch.sigmoid),
    ],
)
@pytest.mark.parametrize("shape", [(5,), (3, 5), (0, 5)])
def test_the_last_function_is_that_of_torch(name, reference, shape):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 50
    got = activate(numbers.numpy(), name)
    assert got.dtype == "float32"
    torch.testing.assert_close(torch.from_numpy(got), reference(numbers))
