"""Test the graph that a card compiles for every architecture, captured with functionalisation.

Nothing here needs the simulated torch device, so it runs with every torch that a card comes with.
"""

import pytest
import torch
import transformers
from torch import fx

from gaudi_sim.graphs.capture import capture
from gaudi_sim.graphs.rules import operator_violations, write_violations
from tests.conformance.hpu_program import (
    GENERATORS,
    SHAPES,
    config_of,
    launch_model,
    operators_of_a_card,
    padding_input,
)
from tests.tiny_models import NOT_SAVED
from tests.tiny_pooling_models import MODELS, REWARD_MODELS
from vllm.attention import layers_with_cache
from vllm.config.families import FAMILIES, TEXT_TYPES
from vllm.model_executor.models.registry import ModelRegistry, is_encoder
from vllm.transformers_utils.transformers_version import is_version_4

_FIRST = "LlamaForCausalLM"
_ALIASES = {name for family in FAMILIES.values() for name in family.also_published_as}
_FOREIGN = {"TransformersForCausalLM", "TransformersForConditionalGeneration"}
"""Runs the code of transformers, which nobody here has captured."""
_SAME_LAYERS = {
    *("BaichuanForCausalLM", "InternLM2ForCausalLM", "InternLM3ForCausalLM"),
    *("ExaoneForCausalLM", "MiMoForCausalLM", "MiniCPMForCausalLM"),
    *("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "DeepseekForCausalLM"),
    *("ChatGLMModel", "DeciLMForCausalLM", *TEXT_TYPES),
}
"""Have the layers of a Llama or of GLM, those of Baichuan 13B with the ALiBi of BLOOM; or are the
language models of others."""
_WITH_ITEMS = {"MllamaForCausalLM", "WhisperForConditionalGeneration"}
"""Have cross-attention: test_captured_items.py captures them."""
_POOLERS = (*MODELS, *REWARD_MODELS)
_TYPICAL = {
    *((_FIRST, shape) for shape in ("decode", "prefill with context", "merged prefill")),
    ("GptOssForCausalLM", "prefill with context"),
    ("DeepseekV3ForCausalLM", "decode"),
    ("BambaForCausalLM", "prefill with context"),
    ("BertModel", "prefill"),
}
"""Every run of the tests captures these: windows, sinks and experts, absorbed weights, recurrent
states, and an encoder. The other cases guard soft caps, chunked attention, ALiBi, decodes of
drafts, blocks in order, and each architecture that has other layers.
"""
_PREFILLS = (
    *("Qwen2ForCausalLM", "BloomForCausalLM", "Gemma2ForCausalLM"),
    *("GptOssForCausalLM", "Llama4ForCausalLM", "DeepseekV3ForCausalLM"),
    *("MambaForCausalLM", "BambaForCausalLM"),
)
_ALL_CASES = [
    *((_FIRST, shape) for shape in SHAPES),
    *((name, "decode") for name in GENERATORS if name != _FIRST),
    # Prompts with context and: windows, ALiBi, a soft cap, sinks, chunks, a latent cache, recurrent
    # states.
    *((name, "prefill with context") for name in _PREFILLS if name in GENERATORS),
    *((name, "prefill") for name in _POOLERS if name not in GENERATORS),
]

CASES = [
    pytest.param(*case, marks=[] if case in _TYPICAL else pytest.mark.exhaustive)
    for case in _ALL_CASES
]


def test_every_architecture_is_captured():
    names = set(ModelRegistry.supported()) - _ALIASES - _FOREIGN - _SAME_LAYERS - _WITH_ITEMS
    if is_version_4():  # transformers 4 does not have all of these classes
        names = {name for name in names if hasattr(transformers, name) or name in _POOLERS}
    assert names - NOT_SAVED == {name for name, _ in _ALL_CASES}


def captured(architecture: str, shape: str) -> tuple[fx.Graph, int]:
    """Return the graph of a forward pass, and the number of tensors in the KV cache."""
    with operators_of_a_card():
        model = launch_model(config_of(architecture, "bfloat16"))
        graph = capture(model, padding_input(model, SHAPES[shape]), SHAPES[shape])
        num_tensors = sum(len(layer.cache_names) for layer in layers_with_cache(model))
    return graph, num_tensors


@pytest.mark.parametrize(("architecture", "shape"), CASES)
def test_a_launch_is_one_graph_of_operators_that_run_on_the_device_and_write_once(
    architecture, shape
):
    """Keys and values are written in place, each tensor of the cache once."""
    graph, num_tensors = captured(architecture, shape)
    assert operator_violations(graph) == []
    if is_encoder(architecture):  # it has no cache
        return
    assert write_violations(graph) == []
    writes = [node for node in graph.nodes if node.target is torch.ops.aten.copy_.default]
    assert len(writes) == num_tensors
