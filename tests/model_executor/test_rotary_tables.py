"""Test the rotary tables of every type against transformers, to the last bit."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.tiny_models import YARN_BY_LONGEST, spelled
from vllm.config import ModelArch, RopeConfig
from vllm.errors import ConfigError
from vllm.model_executor.layers.rotary import RotaryEmbedding

NUM_POSITIONS = 4096

PARAMETERS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn_untruncated": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "original_max_position_embeddings": 128,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 128,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 1024,
    },
}


def make_hf_config(parameters, head_dim=64):
    if YARN_BY_LONGEST and parameters["rope_type"] == "yarn":
        pytest.skip("YaRN of transformers 4 goes by max_position_embeddings")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=256,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=1024,
        **spelled({"rope_parameters": parameters}),
    )


def make_rope(hf_config) -> RopeConfig:
    rope = ModelArch.from_hf(hf_config.to_dict()).rope
    assert rope is not None
    return rope


@pytest.mark.parametrize("head_dim", [64, 128, 80])
@pytest.mark.parametrize("name", PARAMETERS)
def test_tables_are_those_of_transformers(name, head_dim):
    hf_config = make_hf_config(PARAMETERS[name], head_dim)
    rope = make_rope(hf_config)
    if rope.rope_type == "default":
        exponents = torch.arange(0, head_dim, 2).float() / head_dim
        inv_freq, factor = 1.0 / (rope.theta**exponents), 1.0
    else:
        inv_freq, factor = ROPE_INIT_FUNCTIONS[rope.rope_type](
            # Pass the base as a tensor, as the forward pass of transformers does: float32 rounds
            # it.
            hf_config,
            torch.device("cpu"),
            seq_len=torch.tensor(NUM_POSITIONS),
        )
    angles = torch.outer(torch.arange(NUM_POSITIONS).float(), inv_freq)
    want = torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)
    got = RotaryEmbedding(rope, NUM_POSITIONS).cos_sin_cache
    assert got.dtype is torch.float32
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", [n for n in PARAMETERS if n != "dynamic"])
def test_tables_are_those_of_the_transformers_layer(name):
    hf_config = make_hf_config(PARAMETERS[name])
    positions = torch.arange(512)
    cos, sin = LlamaRotaryEmbedding(hf_config)(torch.zeros(1), positions[None])
    table = RotaryEmbedding(make_rope(hf_config), 512).cos_sin_cache
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], atol=1e-6, rtol=0)
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32], atol=1e-6, rtol=0)


def test_dynamic_does_not_stretch_what_fits_the_original_context():
    rope = make_rope(make_hf_config(PARAMETERS["dynamic"]))
    plain = RopeConfig(theta=rope.theta, rotary_dim=rope.rotary_dim)
    dynamic = RotaryEmbedding(rope, 1024).cos_sin_cache
    assert torch.equal(dynamic, RotaryEmbedding(plain, 1024).cos_sin_cache)


def test_the_table_is_real_while_a_model_is_built_on_the_meta_device():
    with torch.device("meta"):
        layer = RotaryEmbedding(RopeConfig(theta=10000.0, rotary_dim=16), 32)
    assert layer.cos_sin_cache.device.type == "cpu"
    assert not layer.state_dict()


def test_an_unknown_type_is_named_with_the_known_ones():
    rope = RopeConfig(theta=10000.0, rotary_dim=16, rope_type="spiral")
    known = "default, linear, dynamic, llama3, yarn, longrope"
    with pytest.raises(ConfigError, match=rf"'spiral'.*{known}"):
        RotaryEmbedding(rope, 32)


def test_a_missing_parameter_is_named():
    rope = RopeConfig(theta=10000.0, rotary_dim=16, rope_type="linear")
    with pytest.raises(ConfigError, match=r"'linear' needs the parameter 'factor'"):
        RotaryEmbedding(rope, 32)
