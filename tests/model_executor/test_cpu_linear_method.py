"""Test packing the weights of a whole model after loading."""

import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer

import vllm
from tests.model_executor.helpers import load, logits_of, pack_weights, prompt_of
from vllm.distributed import TPGroup
from vllm.model_executor.layers.cpu_methods import PackedTable
from vllm.model_executor.layers.embedding import DenseTable
from vllm.model_executor.layers.linear import ColumnParallelLinear, ParallelLinear
from vllm.model_executor.quantization.formats.cpu_packed import CPUInt4, CPUInt8
from vllm.ops.cpu.operators import load_cpu_kernels
from vllm.ops.cpu.weights.weight_format import WeightFormat

pytestmark = pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")

BUNDLED = Path(vllm.__file__).parent / "assets" / "models" / "stdlib-llama-5m"


def linear_layers(model: nn.Module) -> list[ParallelLinear]:
    return [layer for layer in model.modules() if isinstance(layer, ParallelLinear)]


def param_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("family", ["llama", "qwen2", "opt"])
def test_a_packed_model_gives_the_logits_of_the_dense_one(tiny_model, family):
    model, input_ids = load(tiny_model(family)), prompt_of(40)
    want = logits_of(model, input_ids)
    num_dense = param_bytes(model)
    num_packed = pack_weights(model)
    torch.testing.assert_close(logits_of(model, input_ids), want, rtol=0, atol=1e-4)
    assert not any(hasattr(layer, "weight") for layer in linear_layers(model))
    # Packed weights need more bytes only in layers with fewer outputs than a panel, or with a
    # number of outputs that is not a multiple of it.
    assert num_packed <= 1.1 * (num_dense - param_bytes(model))


@pytest.mark.parametrize(
    ("stored_as", "perplexity", "size"),
    [("dense", 1.001, 1.01), ("int8", 1.01, 0.52), ("int4", 1.04, 0.37)],
)
def test_perplexity_and_size_of_the_bundled_model(stored_as, perplexity, size):
    """Compare with bfloat16 weights. The head of an int4 model is int8."""
    model = load(BUNDLED, dtype="bfloat16")
    text = Path(textwrap.__file__).read_text()
    input_ids = torch.tensor(AutoTokenizer.from_pretrained(BUNDLED)(text[:3000]).input_ids)

    def loss() -> Tensor:
        return F.cross_entropy(logits_of(model, input_ids)[:-1].float(), input_ids[1:])

    dense_loss, num_dense = loss(), param_bytes(model)
    num_packed = pack_weights(model, stored_as)
    assert (loss() - dense_loss).exp() < perplexity
    assert num_packed < size * num_dense


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embeddings_are_read_from_the_packed_head_that_they_share(dtype):
    model = load(BUNDLED, dtype=dtype)
    assert model.arch.tie_word_embeddings
    input_ids = prompt_of(9)
    want = model.model.embed_tokens(input_ids)
    pack_weights(model)
    assert isinstance(model.lm_head.method, PackedTable)
    assert model.model.embed_tokens.method is model.lm_head.method
    assert not list(model.lm_head.parameters()) and not list(model.model.embed_tokens.parameters())
    assert torch.equal(model.model.embed_tokens(input_ids), want)


def test_embeddings_of_their_own_stay_as_they_are(tiny_model):
    model = load(tiny_model("llama"))
    assert not model.arch.tie_word_embeddings
    pack_weights(model)
    assert type(model.model.embed_tokens.method) is DenseTable
    assert isinstance(model.lm_head.method, PackedTable)


@pytest.mark.parametrize(
    ("stored_as", "num_in", "weight_format"),
    [
        ("int4", 16, WeightFormat.INT4),
        ("int4", 12, WeightFormat.INT8),
        ("int4", 6, WeightFormat.BFLOAT16),
        ("int8", 6, WeightFormat.BFLOAT16),
        ("dense", 6, WeightFormat.BFLOAT16),
        ("int4", 7, None),
    ],
)
def test_a_size_that_a_format_cannot_hold_takes_the_next_better_one(
    stored_as, num_in, weight_format
):
    torch.manual_seed(0)
    layer = ColumnParallelLinear(num_in, {"": 10}, TPGroup(), bias=True).bfloat16()
    for param in layer.parameters():
        nn.init.normal_(param)
    x = torch.randn(3, 2, num_in).bfloat16()
    want = layer(x)
    pack_weights(layer, stored_as)
    packed = layer.method.packed
    assert (packed.weight_format if packed else None) == weight_format
    assert (layer(x) - want).norm() < 0.25 * want.norm()
    transposed = x.transpose(0, 1)
    torch.testing.assert_close(layer(transposed), layer(x).transpose(0, 1), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("quantization", [CPUInt8(), CPUInt4()])
def test_a_format_gives_each_layer_a_method_of_its_own(quantization):
    layers = [ColumnParallelLinear(32, {"": 10}, TPGroup()) for _ in range(2)]
    methods = [quantization.linear_method("a.b", layer) for layer in layers]
    assert methods[0] is not methods[1]
    for layer, method in zip(layers, methods, strict=True):
        layer.use_method(method)
        nn.init.normal_(layer.weight)  # set the values of the dense weight, as loading does
        method.finish(layer)
        assert method.packed.weight_format.name.lower() == quantization.stored_as
        assert not list(layer.parameters())
