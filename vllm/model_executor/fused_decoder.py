"""Reading a decoder from its modules, to run it in one call of the C++ kernels.

Only what is known exactly is read: every module must be of the very type that this file knows,
and hold what the kernels can take. Anything else (another family, a wrapper around a layer, a
weight that could not be packed) leaves the model to its modules. Knows no launch.
"""

from typing import TypeVar

import torch
from torch import Tensor, nn

from vllm.attention import Attention
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.cpu_linear_method import CPULinear, PackedTable
from vllm.model_executor.layers.embedding import (
    DenseTable,
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    ParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.norm import RMSNorm
from vllm.model_executor.layers.rotary import RotaryEmbedding
from vllm.model_executor.models.decoder import (
    Decoder,
    DecoderAttention,
    DecoderForCausalLM,
    DecoderLayer,
    GatedMLP,
)
from vllm.ops import get_ops
from vllm.ops.cpu.decoder import FusedDecoder, FusedLayer, FusedModel
from vllm.ops.cpu.linear import PackedWeight, WeightFormat
from vllm.ops.cpu.operators import CPUOps, load_cpu_kernels

Kind = TypeVar("Kind")


class _NotFusibleError(Exception):
    """The model has something that the kernels do not know."""


def fuse(model: nn.Module) -> FusedDecoder | None:
    """The decoder of a model whose weights are packed and whose caches are bound.

    Returns:
        None when modules have to run it. Otherwise results have the same bits as those of the
        modules, up to the final norm; the output head is not part of it.
    """
    if type(get_ops()) is not CPUOps or load_cpu_kernels() is None:
        return None
    if not isinstance(model, DecoderForCausalLM):
        return None
    # A family gives options; one that computes something else has such a method of its own.
    methods = ("forward", "embed", "run_layers")
    if any(getattr(type(model), m) is not getattr(DecoderForCausalLM, m) for m in methods):
        return None
    if type(model.model) is not Decoder:
        return None
    try:
        return FusedDecoder(_read_decoder(model.model))
    except _NotFusibleError:
        return None


def read_head(model: nn.Module) -> PackedWeight | None:
    """The output head of such a model; None when modules have to run it."""
    if not isinstance(model, DecoderForCausalLM) or type(model.lm_head) is not ParallelLMHead:
        return None
    if type(model).compute_logits is not DecoderForCausalLM.compute_logits:
        return None
    method = model.lm_head.method
    return method.packed if type(method) is PackedTable else None


def _read_decoder(decoder: Decoder) -> FusedModel:
    norm = _exactly(RMSNorm, decoder.norm)
    layers = [_exactly(DecoderLayer, layer) for layer in decoder.layers]
    attentions = [_exactly(DecoderAttention, layer.self_attn) for layer in layers]
    tables = {_exactly(RotaryEmbedding, attention.rotary_emb) for attention in attentions}
    epsilons = {m.eps for m in decoder.modules() if isinstance(m, RMSNorm)}
    dtype = norm.weight.dtype
    if len(tables) != 1 or epsilons != {norm.eps} or dtype not in (torch.bfloat16, torch.float32):
        raise _NotFusibleError
    return FusedModel(
        layers=[_read_layer(layer, dtype) for layer in layers],
        embedding=_read_embedding(decoder.embed_tokens, dtype),
        final_norm=_read_norm(norm, dtype),
        cos_sin=_of_dtype(tables.pop().cos_sin_cache, torch.float32),
        norm_eps=norm.eps,
    )


def _read_layer(layer: DecoderLayer, dtype: torch.dtype) -> FusedLayer:
    attention = _exactly(DecoderAttention, layer.self_attn)
    attn, mlp = _exactly(Attention, attention.attn), _exactly(GatedMLP, layer.mlp)
    _exactly(SiluAndMul, mlp.act)
    if attn.key_cache is None or attn.value_cache is None:
        raise _NotFusibleError
    if attn.alibi_slopes is not None or attn.logits_soft_cap is not None:
        raise _NotFusibleError
    if (attention.q_norm is None) != (attention.k_norm is None):
        raise _NotFusibleError  # the module then applies neither
    qkv, qkv_bias = _read_linear(ColumnParallelLinear, attention.qkv_proj, dtype)
    output, output_bias = _read_linear(RowParallelLinear, attention.o_proj, dtype)
    gate_up, gate_up_bias = _read_linear(ColumnParallelLinear, mlp.gate_up_proj, dtype)
    down, down_bias = _read_linear(RowParallelLinear, mlp.down_proj, dtype)
    return FusedLayer(
        qkv=qkv,
        output=output,
        gate_up=gate_up,
        down=down,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        input_norm=_read_norm(layer.input_layernorm, dtype),
        attention_norm=_read_norm(layer.post_attention_layernorm, dtype),
        query_norm=None if attention.q_norm is None else _read_norm(attention.q_norm, dtype),
        key_norm=None if attention.k_norm is None else _read_norm(attention.k_norm, dtype),
        key_cache=_of_dtype(attn.key_cache, dtype),
        value_cache=_of_dtype(attn.value_cache, dtype),
        scale=attn.scale,
        sliding_window=attn.sliding_window,
    )


def _read_linear(
    kind: type[ParallelLinear], layer: nn.Module, dtype: torch.dtype
) -> tuple[PackedWeight, Tensor | None]:
    linear = _exactly(kind, layer)
    packed = _exactly(CPULinear, linear.method).packed
    if packed is None or linear.tp.size != 1:
        raise _NotFusibleError
    if packed.weight_format is WeightFormat.FLOAT32 and dtype != torch.float32:
        raise _NotFusibleError
    return packed, None if linear.bias is None else _of_dtype(linear.bias, dtype)


def _read_embedding(module: nn.Module, dtype: torch.dtype) -> Tensor | PackedWeight:
    embedding = _exactly(VocabParallelEmbedding, module)
    if embedding.tp.size != 1:
        raise _NotFusibleError
    method = embedding.method
    if type(method) is PackedTable and method.packed is not None:
        if method.dtype != dtype:
            raise _NotFusibleError
        return method.packed
    if type(method) not in (DenseTable, PackedTable):
        raise _NotFusibleError
    return _of_dtype(embedding.weight, dtype)


def _read_norm(module: nn.Module, dtype: torch.dtype) -> Tensor:
    return _of_dtype(_exactly(RMSNorm, module).weight, dtype)


def _exactly(kind: type[Kind], module: object) -> Kind:
    """The module, which is no subclass or wrapper."""
    if type(module) is not kind:
        raise _NotFusibleError
    return module


def _of_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, dense on the CPU."""
    if x.dtype != dtype or not x.is_cpu or not x.is_contiguous():
        raise _NotFusibleError
    return x.detach()
