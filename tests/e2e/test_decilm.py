"""Test DeciLM and Llama Nemotron against a Llama of transformers whose layers are changed one by
one.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from tests.e2e.reference import SHORT_TEXTS, assert_all_greedy, random_prompts
from tests.exhaustive import exhaustive
from tests.tiny_models import randomize
from vllm import LLM, SamplingParams
from vllm.errors import ConfigError
from vllm.transformers_utils.configs.decilm_config import complete_decilm_config

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_OP = {"no_op": True}
BLOCKS = [
    {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 5.25}},
    {"attention": NO_OP, "ffn": {"ffn_mult": 7.0}},
    {"attention": {"n_heads_in_group": 1}, "ffn": NO_OP},
    {"attention": NO_OP, "ffn": NO_OP},
    {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 13.125}},
]
SIZES_OF_MLPS = [256, 512, None, None, 768]
"""ffn_mult * 64 * 2 / 3, rounded up to a multiple of 256: of 224, 298 and 560."""
CONFIG = SIZES | {
    "model_type": "nemotron-nas",
    "architectures": ["DeciLMForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig"},
    "num_key_value_heads": None,
    "intermediate_size": None,
    "block_configs": BLOCKS,
}


class _AddsNothing(nn.Module):
    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.zeros_like(hidden_states)


class _AttendsToNothing(_AddsNothing):
    def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
        return torch.zeros_like(hidden_states), None


@pytest.fixture(scope="module")
def changed_llama() -> LlamaForCausalLM:
    config = LlamaConfig(**SIZES, intermediate_size=64, attn_implementation="eager")
    model = LlamaForCausalLM(config)
    for index, (layer, block) in enumerate(zip(model.model.layers, BLOCKS, strict=True)):
        group, size = block["attention"].get("n_heads_in_group"), SIZES_OF_MLPS[index]
        own = LlamaConfig(**SIZES, attn_implementation="eager")
        own.num_key_value_heads = 4 // (group or 1)
        own.intermediate_size = size or 64
        layer.self_attn = LlamaAttention(own, index) if group else _AttendsToNothing()
        layer.mlp = LlamaMLP(own) if size else _AddsNothing()
    randomize(model, 0)
    return model.eval()


@pytest.fixture(scope="module")
def folder(changed_llama, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("decilm")
    (path / "config.json").write_text(json.dumps(CONFIG))
    left_out = {
        f"model.layers.{index}.{norm}.weight"
        for index, block in enumerate(BLOCKS)
        for part, norm in (("attention", "input_layernorm"), ("ffn", "post_attention_layernorm"))
        if block[part] == NO_OP
    }
    tensors = changed_llama.state_dict()
    assert left_out < tensors.keys()
    save_file(
        {name: t.contiguous() for name, t in tensors.items() if name not in left_out},
        path / "model.safetensors",
        {"format": "pt"},
    )
    return path


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        exhaustive({"dtype": "float32", "tensor_parallel_size": 2}),
        exhaustive({"dtype": "float32", "pipeline_parallel_size": 2}),
    ],
    ids=str,
)
def test_layers_without_attention_or_mlp_give_the_tokens_of_the_changed_llama(
    settings, folder, changed_llama
):
    def reference(prompt: list[int], output: list[int]) -> torch.Tensor:
        return changed_llama(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0]

    prompts = random_prompts(8, 50, vocab_size=512)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    llm = LLM(str(folder), **(SHORT_TEXTS | {"skip_tokenizer_init": True} | settings))
    assert_all_greedy(llm.generate(prompts, params, use_tqdm=False), prompts, params, reference)


def test_the_first_decilm_lists_the_key_value_heads_of_layers():
    """The config has the values of DeciLM 7B, with fewer layers."""
    raw = SIZES | {"model_type": "deci", "num_key_value_heads_per_layer": [4, 4, 2, 1, 4]}
    found = complete_decilm_config(raw | {"intermediate_size": 96})
    assert (found["num_key_value_heads"], found["intermediate_size"]) == (4, 96)
    layers = found["per_layer_config"]
    assert [layers[i]["num_key_value_heads"] for i in range(5)] == [4, 4, 2, 1, 4]


def with_block(part: str, **values: Any) -> list[dict[str, Any]]:
    return [BLOCKS[0] | {part: BLOCKS[0][part] | values}, *BLOCKS[1:]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_configs": BLOCKS[:4]}, "an object for each of the 5 layers"),
        ({"block_configs": with_block("attention", n_heads_in_group=3)}, "layer 0 .* divides .*3"),
        ({"block_configs": with_block("ffn", ffn_mult=-1.0)}, r"layer 0 .* 0 to 1000, got -1\.0"),
        (
            {"block_configs": with_block("ffn", replace_with_linear=True)},
            "layer 0 in block_configs has ffn.replace_with_linear=True, which is not supported",
        ),
        ({"block_configs": None, "num_key_value_heads_per_layer": [4]}, "each of the 5 layers"),
        ({"block_configs": [{"attention": NO_OP}] * 5, "intermediate_size": 64}, "no layer"),
        ({"hidden_size": "x"}, "hidden_size in config.json must be an integer of at least 1"),
    ],
)
def test_a_config_that_cannot_run_is_named(values, message):
    with pytest.raises(ConfigError, match=message):
        complete_decilm_config(CONFIG | values)
