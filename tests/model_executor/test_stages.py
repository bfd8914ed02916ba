"""Test that a model gives the same bits in pipeline stages as in one piece."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.model_executor.helpers import load, prompt_of
from tests.model_executor.test_pooling_models import load as load_pooling
from tests.model_executor.test_pooling_models import read_config
from tests.tiny_models import FAMILIES
from tests.tiny_pooling_models import make_pooling_model
from vllm.model_executor.models.interface import CausalLM, PoolingModel


def run_in_stages(model: CausalLM | PoolingModel, bounds: list[int], *inputs: Tensor) -> Tensor:
    """Return the hidden states of a prompt; each stage passes one tensor to the next."""
    input_ids, positions, *types = inputs
    states = model.embed(input_ids)
    for first, end in pairwise(bounds):
        states = model.run_layers(states.clone(), positions, first, end, *types)
    return states


def cuts_of(model: CausalLM | PoolingModel) -> list[list[int]]:
    """Return every division into two stages, and the division with one layer per stage."""
    count = model.num_layers
    return [*([0, cut, count] for cut in range(1, count)), list(range(count + 1))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_stages_of_a_decoder_give_the_bits_of_one(tiny_model, family, dtype):
    model, input_ids = load(tiny_model(family), dtype=dtype), prompt_of(40)
    positions = torch.arange(len(input_ids))
    want = model(input_ids, positions)
    for bounds in cuts_of(model):
        got = run_in_stages(model, bounds, input_ids, positions)
        assert torch.equal(got, want), bounds
    # The stage runs only its own layers: without the last layer, the result differs.
    part = run_in_stages(model, [0, model.num_layers - 1], input_ids, positions)
    assert part.shape == (len(input_ids), model.arch.hidden_size)
    assert not torch.equal(part, want)


@pytest.mark.parametrize("name", ["BertModel", "XLMRobertaModel", "Qwen3Model"])
@torch.inference_mode()
def test_stages_of_a_pooling_model_give_the_bits_of_one(name, tmp_path):
    folder = make_pooling_model(name, tmp_path)
    model, input_ids = load_pooling(folder, read_config(folder)), prompt_of(20)
    types = torch.arange(20) % model.num_token_types
    want = model(input_ids, torch.arange(20), types)
    for bounds in cuts_of(model):
        got = run_in_stages(model, bounds, input_ids, torch.arange(20), types)
        assert torch.equal(got, want), bounds
