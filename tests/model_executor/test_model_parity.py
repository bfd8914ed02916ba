"""Every family against transformers, float32, whole prompts without a cache."""

import json

import pytest
import torch

from tests.model_executor.helpers import load, logits_of, prompt_of, reference_logits
from tests.tiny_models import ALL_FAMILIES, make_tiny_model
from vllm.errors import ConfigError


@pytest.mark.parametrize("length", [1, 100])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_logits_are_those_of_transformers(tiny_model, family, length):
    folder, input_ids = tiny_model(family), prompt_of(length)
    want = reference_logits(folder, input_ids)
    got = logits_of(load(folder), input_ids)
    assert want.std() > 1, "logits too flat to tell anything"
    torch.testing.assert_close(got, want, atol=6e-5 * max(1, want.std().item()), rtol=0)


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
    ],
)
def test_variants_of_a_family(tmp_path, family, overrides):
    folder, input_ids = make_tiny_model(family, tmp_path, **overrides), prompt_of(40)
    want = reference_logits(folder, input_ids)
    torch.testing.assert_close(logits_of(load(folder), input_ids), want, atol=2e-5, rtol=0)


def test_a_window_hides_older_keys(tiny_model):
    model, input_ids = load(tiny_model("mistral")), prompt_of(60)
    changed = input_ids.clone()
    changed[0] = input_ids[1]
    # Two layers of 16 reach back 15 + 15 tokens.
    before, after = logits_of(model, input_ids), logits_of(model, changed)
    assert torch.equal(before[31:], after[31:])
    assert not torch.equal(before[30], after[30])


def test_experts_of_gemma_4_are_refused(tmp_path):
    folder = make_tiny_model("gemma4_wide", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"enable_moe_block": True}))
    with pytest.raises(ConfigError, match=r"enable_moe_block in config\.json must be false"):
        load(folder)
