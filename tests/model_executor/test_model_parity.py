"""Test every family against transformers in float32, with whole prompts and without a cache."""

import shutil
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model_executor.helpers import load, logits_of, prompt_of, reference_logits
from tests.reference_model import load_reference
from tests.tiny_models import ALL_FAMILIES, make_tiny_model, sparing
from vllm.errors import ConfigError
from vllm.ops import get_ops, set_ops
from vllm.ops.native.operators import NativeOps
from vllm.transformers_utils.transformers_version import is_version_4

MIXTURES = (
    *("deepseek_v3", "glm4_moe", "minimax_m2", "ernie4_5_moe", "hunyuan_moe", "phimoe"),
    *("mixtral", "qwen2_moe", "olmoe", "glm_moe_dsa", "dots1", "flex_olmo"),
)
MIXTURES_WITH_STATES = ("kimi_linear", "jamba", "lfm2_moe", "qwen3_5_moe")


LONGROPE_OF_PHIMOE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.5 * i for i in range(8)],
    "short_mscale": 1.3,
    "long_mscale": 1.5,
    "original_max_position_embeddings": 256,
}
LIKE_KIMI_K2 = {
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    "n_routed_experts": 48,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.827,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 32.0,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
    },
}
"""One group of many experts, as in Kimi K2, and its rotations."""


@pytest.fixture(autouse=True)
def native_ops() -> Iterator[None]:
    """Compute with the operators of torch, even if an engine of another test has installed
    others.
    """
    before = get_ops()
    set_ops(NativeOps())
    yield
    set_ops(before)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_logits_are_those_of_transformers(tiny_model, family):
    folder = tiny_model(family)
    model, input_ids = load(folder), prompt_of(100)
    want = reference_logits(folder, input_ids)
    assert want.std() > 1, "logits too flat to tell anything"
    limit = 6e-5 * max(1, want.std().item())
    for length in (1, 100):
        got = logits_of(model, input_ids[:length])
        torch.testing.assert_close(got, want[:length], atol=limit, rtol=0)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"num_key_value_heads": 4, "num_attention_heads": 4}),
        ("llama", {"num_key_value_heads": 1, "vocab_size": 4099}),
        ("qwen2", {"use_sliding_window": False}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
        ("opt", {"enable_bias": False, "activation_function": "gelu"}),
        ("opt", {"layer_norm_elementwise_affine": False, "activation_function": "gelu_new"}),
        ("opt", {"_remove_final_layer_norm": True, "tie_word_embeddings": False}),
        ("phimoe", {"rope_parameters": LONGROPE_OF_PHIMOE}),
        ("deepseek_v3", LIKE_KIMI_K2),
        ("glm4_moe_lite", {"num_attention_heads": 3, "num_key_value_heads": 3}),
        ("hunyuan_moe", {"moe_intermediate_size": [48, 48], "n_group": False, "moe_topk": 2}),
        ("glm4_moe", {"use_qk_norm": False, "n_group": 1, "n_shared_experts": 1}),
    ],
)
def test_variants_of_a_family(tmp_path, family, overrides):
    folder, input_ids = make_tiny_model(family, tmp_path, **overrides), prompt_of(40)
    want = reference_logits(folder, input_ids)
    limit = 2e-5 * max(1, want.std().item())
    torch.testing.assert_close(logits_of(load(folder), input_ids), want, atol=limit, rtol=0)


@pytest.mark.parametrize(
    "family",
    sparing(
        ("qwen3_moe", *MIXTURES, *MIXTURES_WITH_STATES, "nemotron_h", "nemotron_h_latent"),
        [f for f in MIXTURES if f != "deepseek_v3"] + ["lfm2_moe", "qwen3_5_moe"],
    ),
)
def test_experts_are_read_one_by_one_or_joined(tiny_model, tmp_path, family):
    """transformers 4 stores experts one by one, transformers 5 stores them jointly."""
    if is_version_4():
        pytest.skip("this transformers stores none that are joined")
    load_reference(tiny_model(family)).save_pretrained(tmp_path, save_original_format=False)
    stored, input_ids = load_file(tmp_path / "model.safetensors"), prompt_of(20)
    assert any(name.endswith((".experts.gate_up_proj", ".experts.up_proj")) for name in stored)
    got, want = (logits_of(load(each), input_ids) for each in (tmp_path, tiny_model(family)))
    assert torch.equal(got, want)


def test_gemma_3n_is_read_with_the_names_of_transformers_4(tiny_model, tmp_path):
    source, input_ids = tiny_model("gemma3n"), prompt_of(20)
    shutil.copy(source / "config.json", tmp_path)
    weights = {
        name.replace("model.language_model", "model").replace(
            "model", "model.language_model"
        ): weight
        for name, weight in load_file(source / "model.safetensors").items()
    }
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    got, want = (logits_of(load(each), input_ids) for each in (tmp_path, source))
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("family", "beginning"),
    [("mpt", "transformer."), ("gpt_neox", "gpt_neox."), ("mamba2", "backbone.")],
)
def test_names_may_lack_the_beginning_of_their_family(tiny_model, tmp_path, family, beginning):
    """As in a decoder that was saved without its output head."""
    source = tiny_model(family)
    weights = load_file(source / "model.safetensors")
    assert any(name.startswith(beginning) for name in weights)
    shorter = {name.removeprefix(beginning): weight for name, weight in weights.items()}
    save_file(shorter, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").symlink_to(source / "config.json")
    got, want = (logits_of(load(each), prompt_of(20)) for each in (tmp_path, source))
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("glm4_moe", "model.layers.3.eh_proj.weight"),
        ("deepseek_v32", "model.layers.2.self_attn.indexer.wk.weight"),
        ("ernie4_5_moe", "model.mtp_block.0.mlp.up_proj.weight"),
    ],
)
def test_layers_that_predict_drafts_are_not_loaded(tiny_model, tmp_path, family, name):
    source = tiny_model(family)
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {name: torch.ones(4, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").symlink_to(source / "config.json")
    got, want = (logits_of(load(folder), prompt_of(20)) for folder in (tmp_path, source))
    assert torch.equal(got, want)


def test_a_window_hides_older_keys(tiny_model):
    model, input_ids = load(tiny_model("mistral")), prompt_of(60)
    changed = input_ids.clone()
    changed[0] = input_ids[1]
    # With windows of 16, two layers see 15 + 15 tokens before a token.
    before, after = logits_of(model, input_ids), logits_of(model, changed)
    assert torch.equal(before[31:], after[31:])
    assert not torch.equal(before[30], after[30])


def test_experts_of_gemma_4_have_one_activation(tmp_path):
    folder = make_tiny_model("gemma4_moe", tmp_path, hidden_activation="silu")
    with pytest.raises(ConfigError, match=r"must be 'gelu_pytorch_tanh' for the experts.*'silu'"):
        load(folder)
