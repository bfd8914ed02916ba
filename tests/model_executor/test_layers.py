"""Test norms and activations."""

import pytest
import torch
import torch.nn.functional as F

from vllm.errors import ConfigError
from vllm.model_executor.layers.activation import (
    SiluAndMul,
    get_activation,
    get_gated_activation,
)
from vllm.model_executor.layers.embedding import LearnedPositionalEmbedding
from vllm.model_executor.layers.norm import RMSNorm


@pytest.mark.parametrize(
    "name", ["relu", "gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "silu"]
)
def test_activations_are_those_of_transformers(name):
    from transformers.activations import ACT2FN

    x = torch.linspace(-5, 5, 101)
    torch.testing.assert_close(get_activation(name)(x), ACT2FN[name](x))


def test_an_unknown_activation_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'gelu_10' is not supported; .*gelu, gelu_fast"):
        get_activation("gelu_10")


def test_silu_and_mul():
    x = torch.randn(3, 8)
    torch.testing.assert_close(SiluAndMul()(x), F.silu(x[:, :4]) * x[:, 4:])


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh"])
def test_gelu_and_mul(name):
    x = torch.randn(3, 8)
    want = F.gelu(x[:, :4], approximate="none" if name == "gelu" else "tanh") * x[:, 4:]
    torch.testing.assert_close(get_gated_activation(name)(x), want)


def test_an_unknown_gated_activation_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'relu' is not supported in a gated MLP; .*silu"):
        get_gated_activation("relu")


def test_rms_norm_with_a_residual_norms_the_sum():
    norm = RMSNorm(8, 1e-6)
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    want = F.rms_norm(x + residual, (8,), norm.weight, 1e-6)
    total = x + residual
    torch.testing.assert_close(norm(total), want)
    normed, new_residual = norm(x, residual)
    torch.testing.assert_close(normed, want)
    torch.testing.assert_close(new_residual, total)


def test_learned_positions_start_at_the_offset():
    table = LearnedPositionalEmbedding(4, 3, offset=2)
    torch.nn.init.normal_(table.weight)
    assert table.weight.shape == (6, 3)
    assert torch.equal(table(torch.tensor([0, 3])), table.weight[[2, 5]])
