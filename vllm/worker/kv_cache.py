"""How many KV blocks there are, and their memory."""

from collections.abc import Sequence

import torch

from vllm.attention import Attention
from vllm.config import VllmConfig
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.platforms import Platform

logger = init_logger(__name__)

_GIB = 2**30

_CACHE_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def cache_dtype(config: VllmConfig) -> torch.dtype:
    """What the KV cache holds: `--kv-cache-dtype`, or the dtype of the model."""
    asked = config.cache.kv_cache_dtype
    model_dtype: torch.dtype = getattr(torch, config.model.dtype_name)
    return _CACHE_DTYPES.get(asked, model_dtype)


def bytes_per_block(layers: Sequence[Attention], block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of one block in all layers."""
    heads = sum(layer.num_kv_heads * layer.head_size for layer in layers)
    return 2 * heads * block_size * dtype.itemsize


def count_blocks(config: VllmConfig, block_bytes: int, free_bytes: int) -> int:
    """KV blocks, the null block included.

    Args:
        config: budget and limits.
        block_bytes: of one block in all layers; 0 for a model without a KV cache.
        free_bytes: device memory that is free now that the model is loaded.

    Raises:
        ConfigError: the cache would not hold one request of max_model_len tokens.
    """
    cache, scheduler = config.cache, config.scheduler
    if not block_bytes:
        # Nothing is cached: blocks only count the tokens of a full batch of the longest requests.
        return scheduler.max_num_seqs * (config.max_blocks_per_request + 1) + 1
    if cache.num_gpu_blocks_override is not None:
        num_blocks, source = cache.num_gpu_blocks_override, "--num-gpu-blocks-override"
    elif cache.kv_cache_space_bytes is not None:
        num_blocks, source = cache.kv_cache_space_bytes // block_bytes, "VLLM_CPU_KVCACHE_SPACE"
    else:
        budget = int(free_bytes * cache.gpu_memory_utilization)
        # Twice what a full batch of the longest requests can hold leaves room for prefixes of
        # finished requests; more would only cost memory.
        useful = scheduler.max_num_seqs * config.max_blocks_per_request
        useful = useful * (2 if cache.enable_prefix_caching else 1) + 1
        num_blocks, source = min(budget // block_bytes, useful), "--gpu-memory-utilization"
    check_capacity(config, num_blocks, block_bytes, free_bytes, source)
    return num_blocks


def log_cache(config: VllmConfig, num_blocks: int, block_bytes: int) -> None:
    """Log the size of a KV cache; nothing for a model without one."""
    if not block_bytes:
        return
    num_tokens, max_model_len = config.cache.block_size, config.scheduler.max_model_len
    logger.info(
        "KV cache: %d blocks of %d tokens (%.2f GiB, %.1f x max_model_len %d)",
        num_blocks,
        num_tokens,
        num_blocks * block_bytes / _GIB,
        (num_blocks - 1) * num_tokens / max_model_len,
        max_model_len,
    )


def check_capacity(
    config: VllmConfig,
    num_blocks: int,
    block_bytes: int,
    free_bytes: int,
    source: str = "--gpu-memory-utilization",
) -> None:
    """Refuse a cache that would not hold one request of max_model_len tokens.

    Args:
        config: limits.
        num_blocks: the null block included.
        block_bytes: of one block in all layers.
        free_bytes: device memory that was free.
        source: what has decided the number of blocks.

    Raises:
        ConfigError: it would not.
    """
    scheduler, free_gib = config.scheduler, free_bytes / _GIB
    capacity = max(0, num_blocks - 1) * config.cache.block_size
    if capacity >= scheduler.max_model_len:
        return
    raise ConfigError(
        f"the KV cache holds {capacity} tokens ({source}; {free_gib:.2f} GiB free) "
        f"and max_model_len is {scheduler.max_model_len}: a longest request would not fit. "
        f"Give the cache more memory, or lower --max-model-len to {capacity}"
        if capacity
        else f"no memory for a KV cache: one block takes {block_bytes} bytes ({source}; "
        f"{free_gib:.2f} GiB free)"
    )


def bind_kv_caches(
    layers: Sequence[Attention],
    platform: Platform,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    """Allocate key and value caches [num_blocks, S, G, D] of every layer, zeroed."""
    for layer in layers:
        shape = (num_blocks, block_size, layer.num_kv_heads, layer.head_size)
        layer.bind_kv_cache(
            platform.allocate_cache(shape, dtype), platform.allocate_cache(shape, dtype)
        )
