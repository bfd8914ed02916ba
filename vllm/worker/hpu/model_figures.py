"""The sizes of a loaded model that decide its speed, and what it converts before it multiplies."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from vllm.attention.cached_layer import layers_with_cache
from vllm.bucketing import format_bytes
from vllm.config import VllmConfig
from vllm.cost_model.throughput import AttentionFigures, ModelFigures
from vllm.kv_cache_spec import CacheKind
from vllm.logger import init_logger
from vllm.model_executor.layers.experts import Experts, Router
from vllm.model_executor.layers.grouped_router import GroupedRouter
from vllm.model_executor.layers.linear import ParallelLinear
from vllm.model_executor.model_memory import model_tensors
from vllm.ops.attention_options import FP8_DTYPES
from vllm.ops.hpu.low_bit_weight import LowBitWeight
from vllm.worker.kv_cache import cache_dtype

logger = init_logger(__name__)


def model_figures(model: nn.Module, config: VllmConfig) -> ModelFigures:
    """Return the sizes that decide the speed of a model whose layers are split over all ranks.

    Args:
        model: the model of the first rank.
        config: config of the engine.
    """
    arch, num_cards = config.model.resolved_arch, config.parallel.world_size
    linears = [
        layer
        for layer in model.modules()
        if isinstance(layer, ParallelLinear) and not layer.is_of_items
    ]
    experts = [layer for layer in model.modules() if isinstance(layer, Experts)]
    routers = [layer for layer in model.modules() if isinstance(layer, (Router, GroupedRouter))]
    # Rank 0 holds a part of each split layer. A layer that is not split is on every rank, and is
    # counted for each of them, because each reads it.
    dense = num_cards * sum(layer.input_size * layer.output_size for layer in linears)
    num_local = len(experts[0].expert_ids) if experts else 0
    of_experts = num_cards * sum(map(_num_params, experts))
    num_experts = num_local + len(experts[0].elsewhere) if experts else 0
    tensors = model_tensors(nn.ModuleList([*linears, *experts]))
    num_bytes = num_cards * sum(tensor.nbytes for tensor in tensors)
    return ModelFigures(
        dense_params=dense,
        expert_params=of_experts / num_experts if num_experts else 0,
        num_experts=num_experts,
        experts_per_token=max((router.options.top_k for router in routers), default=0),
        vocab_size=arch.vocab_size,
        hidden_size=arch.hidden_size,
        num_layers=arch.num_layers,
        attention=_attention(model, config),
        weight_bytes=round(num_bytes / (dense + of_experts), 4),
        kv_bytes=cache_dtype(config).itemsize,
        is_fp8=_is_fp8(tensors),
    )


def _num_params(layer: Experts) -> int:
    """Return the number of parameters of a layer's experts on this rank."""
    width = layer.options.first_width(layer.intermediate_size) + layer.intermediate_size
    return len(layer.expert_ids) * width * layer.hidden_size


def _is_fp8(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether most of the bytes are FP8."""
    num_bytes: Counter[bool] = Counter()
    for tensor in tensors:
        num_bytes[tensor.dtype == torch.float8_e4m3fn] += tensor.nbytes
    return num_bytes[True] > num_bytes[False]


def _attention(model: nn.Module, config: VllmConfig) -> tuple[AttentionFigures, ...]:
    arch, dtype = config.model.resolved_arch, cache_dtype(config)
    num_cards = config.parallel.world_size
    kinds: Counter[tuple[int, int, int | None]] = Counter()
    for layer in layers_with_cache(model):
        spec = layer.cache_spec(dtype)
        if spec.kind is CacheKind.STATE:
            continue
        num_heads = 1 if spec.kind is CacheKind.LATENT else arch.num_kv_heads
        of_rank = sum(tensor.entry_bytes // tensor.itemsize for tensor in spec.tensors)
        kinds[of_rank * min(num_cards, num_heads), num_heads, spec.window] += 1
    return tuple(
        AttentionFigures(
            num_layers=count,
            query_width=arch.num_heads * arch.head_size,
            kv_width=width,
            num_kv_heads=num_heads,
            window=window,
        )
        for (width, num_heads, window), count in kinds.items()
    )


def log_converted(config: VllmConfig, model: nn.Module) -> None:
    """Log which weights and which cache are stored in a smaller format than they are multiplied in.

    Args:
        config: config of the engine.
        model: loaded.
    """
    rows = [module for module in model.modules() if isinstance(module, LowBitWeight)]
    found = []
    if rows:
        num_bytes = sum(param.nbytes for each in rows for param in each.parameters())
        found.append(f"{len(rows)} quantized weights ({format_bytes(num_bytes)})")
    dtype = cache_dtype(config)
    if dtype in FP8_DTYPES:
        found.append(f"the KV cache in {str(dtype).removeprefix('torch.')}")
    if found:
        logger.info(
            "Each forward pass converts %s to %s before a matmul uses them",
            *(" and ".join(found), config.model.dtype_name),
        )
