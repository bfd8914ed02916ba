"""Measures largest absolute values while a model runs, for FP8 scales (`QUANT_CONFIG`, MEASURE).

Linear layers measure their inputs and weights, attention layers their keys and values. The values
are kept on the device, so measuring does not wait for it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from vllm.attention import Attention
from vllm.attention.latent import LatentAttention
from vllm.config import IncConfig
from vllm.distributed import Stage, TPGroup, place_in_engine
from vllm.model_executor.layers.embedding import (
    EmbeddingMethod,
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.layers.experts import DenseExperts, Experts, ExpertsMethod
from vllm.model_executor.layers.latent import LatentUpProjection
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearMethod,
    ParallelLinear,
    UnquantizedLinear,
)
from vllm.model_executor.layers.stored.stored_experts import are_plain
from vllm.model_executor.layers.stored.stored_linear import StoredHead
from vllm.model_executor.quantization.inc.files import (
    Node,
    file_path,
    merged,
    read_file,
    write_file,
)
from vllm.model_executor.quantization.interface import Quantization

_PREFIX = "measured_"
"""Beginning of the names of the buffers of a layer that measures."""

_NOTED = ("input", "output", "query", "key", "value")
"""Tensors that launches measure; the largest weights are known from the start."""


def type_name(layer: ParallelLinear) -> str:
    """Return the class name by which Intel Neural Compressor lists a linear layer."""
    if not isinstance(layer, ColumnParallelLinear):
        return "RowParallelLinear"
    if "q_proj" in layer.feature_slices:
        return "QKVParallelLinear"
    return "MergedColumnParallelLinear" if len(layer.feature_slices) > 1 else "ColumnParallelLinear"


def can_be_fp8(name: str, layer: ParallelLinear, config: IncConfig) -> bool:
    """Return whether a linear layer can run in FP8. Projections absorbed into others cannot."""
    is_plain = not layer.keeps_precision and not isinstance(layer, LatentUpProjection)
    return is_plain and config.covers(name, type_name(layer))


def head_can_be_fp8(name: str, layer: VocabParallelEmbedding, config: IncConfig) -> bool:
    """Return whether an embedding or output head can run in FP8; only untied heads can."""
    is_head = isinstance(layer, ParallelLMHead) and not layer.is_tied
    return is_head and config.covers(name, "ParallelLMHead")


def experts_can_be_fp8(name: str, layer: Experts, config: IncConfig) -> bool:
    """Return whether the experts of a layer can run in FP8; they are one module of the library."""
    types = ("FusedMoE", "VllmMixtureOfExpertsOp")
    return are_plain(layer) and config.covers(experts_name(name), *types)


def experts_name(name: str) -> str:
    """Return the library's name of the module that multiplies with the experts of a layer."""
    return f"{name}.moe_op"


def expert_names(name: str, number: int) -> tuple[str, str]:
    """Return the library's names of an expert's gate-and-up and down matrices, by its
    index here.
    """
    op = experts_name(name)
    return f"{op}.w13_list.{number}", f"{op}.w2_list.{number}"


def cache_names(name: str, layer: Attention) -> list[str]:
    """Return the library's names of the modules that store keys, and values if stored
    separately.
    """
    if isinstance(layer, LatentAttention):
        return [f"{name}.impl.latent_cache_k"]
    return [f"{name}.impl.{part}_cache" for part in "kv"]


def attention_name(name: str) -> str:
    """Return the library's name of the module that computes the attention of prompts."""
    return f"{name}.impl.fused_scaled_dot_product_attention"


def prompts_can_be_fp8(name: str, layer: Attention, config: IncConfig) -> bool:
    """Return whether the attention of prompts can run in FP8, for a layer whose KV cache can."""
    is_plain = not isinstance(layer, LatentAttention)
    return is_plain and config.covers(attention_name(name), "ModuleFusedSDPA")


def measured_layers(model: nn.Module, config: IncConfig) -> list[tuple[str, Attention]]:
    """Return the attention layers whose KV caches are measured, with their names."""
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, Attention)
        and all(config.covers(cache, "VLLMKVCache") for cache in cache_names(name, layer))
    ]


class MeasuredLinear(UnquantizedLinear):
    """A dense linear layer that measures its largest input, weight and, if asked for, output."""

    def __init__(self, measures_outputs: bool) -> None:
        self.measures_outputs = measures_outputs

    @torch.no_grad()
    def finish(self, layer: ParallelLinear) -> None:
        start_measuring(layer, layer.weight.abs().amax().float(), self.measures_outputs)

    def apply(self, layer: ParallelLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        note(layer, "input", x)
        out = super().apply(layer, x, bias)
        if self.measures_outputs:
            note(layer, "output", out)
        return out


class MeasuredExperts(DenseExperts):
    """Dense experts that measure their largest input and weights."""

    @torch.no_grad()
    def finish(self, layer: Experts) -> None:
        super().finish(layer)
        weights = [w.abs().amax((1, 2)).float() for w in (layer.gate_up, layer.down)]
        start_measuring(layer, torch.stack(weights, dim=1))

    def apply(self, layer: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        note(layer, "input", x)
        return super().apply(layer, x, ids, weights)


class IncMeasure(Quantization):
    """Measures layers without quantizing them (`QUANT_CONFIG` with mode MEASURE).

    Args:
        config: the content of the file.
    """

    def __init__(self, config: IncConfig) -> None:
        self.config = config

    def linear_method(self, name: str, layer: ParallelLinear) -> LinearMethod | None:
        if not can_be_fp8(name, layer, self.config):
            return None
        return MeasuredLinear(self.config.measures_outputs)

    def embedding_method(self, name: str, layer: VocabParallelEmbedding) -> EmbeddingMethod | None:
        if not head_can_be_fp8(name, layer, self.config):
            return None
        return StoredHead(MeasuredLinear(self.config.measures_outputs))

    def experts_method(self, name: str, layer: Experts) -> ExpertsMethod | None:
        return MeasuredExperts() if experts_can_be_fp8(name, layer, self.config) else None

    def finish_model(self, model: nn.Module) -> None:
        device = next(model.parameters()).device
        for name, layer in measured_layers(model, self.config):
            for part in ("key", "value")[: len(cache_names(name, layer))]:
                _register(layer, part, torch.zeros((), device=device))
            _register(layer, "query", torch.zeros((), device=device))
            layer.register_forward_pre_hook(_measure_cache)


def _measure_cache(layer: nn.Module, args: tuple[Any, ...]) -> None:
    query, key, *rest = args
    note(layer, "query", query)
    note(layer, "key", key)
    if rest and rest[0] is not None:
        note(layer, "value", rest[0])


def start_measuring(layer: nn.Module, largest: Tensor, measures_outputs: bool = False) -> None:
    """Register the buffers in which a layer stores its largest values; `note` updates them.

    Args:
        layer: a linear layer, or the experts of a layer.
        largest: absolute weight, float32 on the device: one value, or for experts [experts, 2], of
            gate and up and of down.
        measures_outputs: whether it measures outputs as well.
    """
    _register(layer, "weight", largest)
    for part in ("input", "output") if measures_outputs else ("input",):
        _register(layer, part, torch.zeros((), device=largest.device))


def _register(layer: nn.Module, part: str, value: Tensor) -> None:
    layer.register_buffer(_PREFIX + part, value, persistent=False)


def note(layer: nn.Module, part: str, x: Tensor) -> None:
    """Update the largest absolute value of x, the input or output of a layer that measures."""
    kept: Tensor = layer.get_buffer(_PREFIX + part)
    kept.copy_(torch.maximum(kept, x.abs().amax().float()))


def reset(model: nn.Module) -> None:
    """Reset measured inputs and outputs, for example after the batches without requests of a
    warm-up.
    """
    names = {_PREFIX + part for part in _NOTED}
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] in names:
            buffer.zero_()


def collect(model: nn.Module, config: IncConfig) -> dict[str, Node]:
    """Return the measurements of all modules, by name."""
    nodes: dict[str, Node] = {}
    for name, layer in model.named_modules():
        if not hasattr(layer, f"{_PREFIX}weight"):
            continue
        if isinstance(layer, Experts):
            nodes[experts_name(name)] = Node([_read(layer, "input")])
            for number, weights in enumerate(layer.get_buffer(f"{_PREFIX}weight").tolist()):
                for part, weight in zip(expert_names(name, number), weights, strict=True):
                    nodes[part] = Node(weight=[weight])
        else:
            outputs = [_read(layer, "output")] if hasattr(layer, f"{_PREFIX}output") else []
            nodes[name] = Node([_read(layer, "input")], outputs, _read(layer, "weight"))
    for name, layer in measured_layers(model, config):
        for cache, part in zip(cache_names(name, layer), ("key", "value"), strict=False):
            nodes[cache] = Node([_read(layer, part)])
        if prompts_can_be_fp8(name, layer, config):
            inputs = [_read(layer, part) for part in ("query", "key", "value")]
            # The output of attention is a mean of values, so it is within their range. The largest
            # softmax weight is 1, because the first token of a prompt attends only to itself.
            nodes[attention_name(name)] = Node(inputs, [inputs[2], [1.0]])
    return nodes


def _read(layer: nn.Module, part: str) -> list[float]:
    return [float(layer.get_buffer(_PREFIX + part))]


def save(model: nn.Module, config: IncConfig, tp: TPGroup, stage: Stage | None, adds: bool) -> str:
    """Write the measurements of this rank to its file.

    Args:
        model: model that has measured.
        config: contains the path.
        tp: the ranks that share its layers.
        stage: pipeline stage of this rank; None: there is only one stage.
        adds: merge with the existing file, from an earlier run of the same model.

    Returns:
        The path of the file.

    Raises:
        ConfigError: it cannot be written, or the existing file does not fit.
    """
    rank, world_size = place_in_engine(tp, stage)
    path = file_path(config.dump_stats_path, rank, world_size)
    nodes = collect(model, config)
    if adds and path.is_file():
        nodes = merged(nodes, read_file(path, "DynamicRange"))
    is_split = world_size > 1
    write_file(
        path,
        nodes,
        "DynamicRange",
        global_rank=rank if is_split else None,
        local_rank=rank if is_split else None,
    )
    return str(path)
