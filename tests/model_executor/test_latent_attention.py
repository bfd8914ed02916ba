"""Test DeepSeek models: the cached values of a token, reading checkpoints, and choosing experts."""

import shutil
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from tests.model_executor.helpers import (
    load,
    logits_of,
    make_config,
    prompt_of,
    read_arch,
)
from vllm.attention.cached_layer import layers_with_cache
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.kv_cache_spec import CacheKind
from vllm.model_executor.layers.grouped_router import GroupedRouter, Routing
from vllm.model_executor.loader import load_model
from vllm.model_executor.models.deepseek import deepseek_routing
from vllm.model_executor.quantization.formats.cpu_packed import CPUPacked
from vllm.ops import get_ops, set_ops
from vllm.ops.cpu.operators import CPUOps, load_cpu_kernels
from vllm.ops.expert_options import ExpertGroups, RoutingOptions
from vllm.ops.native.operators import NativeOps
from vllm.worker.kv_cache import cache_layout


@pytest.fixture
def restored_ops() -> Iterator[None]:
    before = get_ops()
    yield
    set_ops(before)


INPUT_IDS = prompt_of(60)
NUM_LAYERS, LATENT_SIZE, ROTARY_SIZE = 3, 48, 16
"""Of the tiny model."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_is_one_latent_vector_in_each_layer(tiny_model, dtype):
    folder = tiny_model("deepseek_v3")
    layers = layers_with_cache(load(folder))
    specs = [layer.cache_spec(dtype) for layer in layers]
    assert [(spec.kind, len(spec.tensors)) for spec in specs] == [
        (CacheKind.LATENT, 1)
    ] * NUM_LAYERS
    token_bytes = NUM_LAYERS * (LATENT_SIZE + ROTARY_SIZE) * dtype.itemsize
    layout = cache_layout(make_config(folder), layers, dtype)
    assert layout.block_bytes == token_bytes * layout.block_size


def test_layers_that_guess_further_tokens_are_not_read(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model("deepseek_v3"), tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    names = ("eh_proj.weight", "self_attn.o_proj.weight", "shared_head.head.weight")
    extra = {f"model.layers.{NUM_LAYERS}.{name}": torch.ones(2, 2) for name in names}
    save_file(tensors | extra, folder / "model.safetensors")
    want = logits_of(load(tiny_model("deepseek_v3")), INPUT_IDS)
    assert torch.equal(logits_of(load(folder), INPUT_IDS), want)


@pytest.mark.parametrize("ops", [NativeOps, CPUOps])
def test_the_projection_of_keys_and_values_is_split_whatever_its_format(
    tiny_model, ops, restored_ops
):
    """The weight of other formats is computed with matmuls, which is exact for packed weights."""
    set_ops(ops())
    folder = tiny_model("deepseek_v3")
    packed = load_model(
        make_config(folder, "bfloat16"), TPGroup(), torch.device("cpu"), CPUPacked()
    )
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.kv_b_proj"
    layer = packed.get_submodule(name)
    heads = tensors[f"{name}.weight"].bfloat16().unflatten(0, (4, -1))
    assert torch.equal(layer.key_up.dense(), heads[:, :24])
    assert torch.equal(layer.value_up.dense(), heads[:, 24:].mT)
    names = {name for name, _ in layer.named_parameters()}
    is_packed = ops is CPUOps and load_cpu_kernels() is not None
    assert names == (set() if is_packed else {"key_up.weight", "value_up.weight"})
    rows = torch.randn(3, LATENT_SIZE).bfloat16()
    torch.testing.assert_close(layer(rows), rows @ heads.flatten(0, 1).T)


@cache
def router_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((50, 32), (24, 32), (24,))
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return x, weight, bias * 0.3


@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (4, 2), (8, 8)])
def test_experts_are_those_of_transformers(num_groups, top_groups, is_normalized):
    x, weight, bias = router_inputs()
    config = DeepseekV3Config(
        hidden_size=32,
        n_routed_experts=24,
        num_experts_per_tok=5,
        n_group=num_groups,
        topk_group=top_groups,
        norm_topk_prob=is_normalized,
        routed_scaling_factor=2.5,
    )
    theirs = DeepseekV3TopkRouter(config)
    ours = GroupedRouter(
        32,
        Routing(
            24,
            RoutingOptions(
                top_k=5,
                weights="sigmoid_of_chosen" if is_normalized else "sigmoid",
                scale=2.5,
                groups=ExpertGroups(num_groups, top_groups),
            ),
            has_bias=True,
        ),
    )
    for router in (theirs, ours):
        router.weight.data.copy_(weight)
        router.e_score_correction_bias.data.copy_(bias)
    dense = torch.zeros(2, 50, 24)
    ids, weights = ours.choose(x)
    dense[0].scatter_(1, ids, weights)
    *_, weights, ids = sorted(theirs(x), key=torch.is_floating_point, reverse=True)
    dense[1].scatter_(1, ids, weights.detach())
    torch.testing.assert_close(dense[0], dense[1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"topk_method": "best"}, "topk_method 'best' in config.json is not supported"),
        ({"scoring_func": "tanh"}, "scoring_func 'tanh' in config.json is not supported"),
        (
            {"num_experts_per_tok": None},
            "'num_experts_per_tok' must be an integer from 1 to 65536, got None",
        ),
        ({"n_group": 3}, r"n_routed_experts \(8\) in config.json must be a multiple of n_group"),
    ],
)
def test_routings_that_cannot_be_are_refused(tiny_model, values, message):
    arch = read_arch(tiny_model("deepseek_v3"))
    arch.hf_config.update(values)
    with pytest.raises(ConfigError, match=message):
        deepseek_routing(arch, default_method="noaux_tc")
