"""Test layers with the gated delta rule: the values of configs, and refused values.

Outputs are compared with transformers in test_model_parity.py.
"""

from dataclasses import replace

import pytest

from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.model_executor.layers.delta_net import DeltaNetSizes, GatedDeltaNet
from vllm.model_executor.models.kimi import KimiLinearForCausalLM, delta_attention_sizes

SIZES = DeltaNetSizes(
    hidden_size=32,
    num_key_heads=2,
    num_value_heads=6,
    key_size=8,
    value_size=4,
    kernel=4,
    norm_eps=1e-6,
    activation="silu",
)
PUBLISHED = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 16,
    "model_max_length": 128,
    "rope_theta": 10000.0,
    "mla_use_nope": True,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_router_activation_func": "sigmoid",
    "linear_attn_config": {
        "full_attn_layers": [2],
        "kda_layers": [1, 3],
        "head_dim": 8,
        "num_heads": 4,
        "short_conv_kernel_size": 3,
    },
}
"""The keys of a published config.json, which has no `layer_types`."""


def test_a_published_kimi_linear_is_read_without_the_defaults_of_transformers():
    arch = ModelArch.from_hf(PUBLISHED)
    assert arch.state_layers == (True, False, True)
    assert set(arch.layer_ropes) == {None}
    sizes = delta_attention_sizes(arch)
    assert (sizes.num_value_heads, sizes.key_size, sizes.kernel) == (4, 8, 3)
    mlps = [layer.mlp for layer in KimiLinearForCausalLM(arch, TPGroup()).layers]
    assert [type(mlp).__name__ for mlp in mlps] == ["GatedMLP", *["DeepseekMixture"] * 2]


@pytest.mark.parametrize("numbers", ["1, 3", {"1": 3}, 7])
def test_layers_that_are_no_list_are_refused(numbers):
    linear = PUBLISHED["linear_attn_config"] | {"kda_layers": numbers}
    with pytest.raises(ConfigError, match="'kda_layers' of linear_attn_config must be a list"):
        ModelArch.from_hf(PUBLISHED | {"linear_attn_config": linear})


def test_heads_that_do_not_belong_together_are_refused():
    with pytest.raises(ConfigError, match=r"linear_num_value_heads \(7\) must be a multiple"):
        replace(SIZES, num_value_heads=7)
    with pytest.raises(ConfigError, match="hidden_act 'gelu' in config"):
        replace(SIZES, activation="gelu")


@pytest.mark.parametrize("tp_size", [3, 4])
def test_ranks_between_which_heads_cannot_be_split_are_refused(tp_size):
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size \({tp_size}\) must divide the 6"):
        GatedDeltaNet(SIZES, TPGroup(0, tp_size))
