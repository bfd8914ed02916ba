"""Decides the number of KV blocks, and allocates their memory."""

from collections.abc import Sequence

import torch

from vllm.attention import CachedLayer, StateLayer
from vllm.bucketing import format_bytes
from vllm.config import VllmConfig
from vllm.errors import ConfigError
from vllm.kv_cache_spec import CacheTensor, KVCacheLayout, plan_layout
from vllm.logger import init_logger
from vllm.platforms import Platform
from vllm.worker.parts.memory_use import CacheBudget, MemoryUse, states_use, unused_share

logger = init_logger(__name__)

_GIB = 2**30

_MORE = "give the cache more memory (--kv-cache-memory-bytes, --gpu-memory-utilization)"

_CACHE_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_inc": torch.float8_e4m3fn,
}


def cache_dtype(config: VllmConfig) -> torch.dtype:
    """Return the data type of the KV cache: `--kv-cache-dtype`, or the dtype of the model."""
    asked = config.cache.kv_cache_dtype
    model_dtype: torch.dtype = getattr(torch, config.model.dtype_name)
    return _CACHE_DTYPES.get(asked, model_dtype)


def cache_layout(
    config: VllmConfig,
    layers: Sequence[CachedLayer],
    dtype: torch.dtype,
    *,
    keeps_all: bool = False,
) -> KVCacheLayout:
    """Return the layout of the KV cache for these layers; see `plan_layout`."""
    return plan_layout(
        [layer.cache_spec(dtype) for layer in layers],
        config.cache.block_size,
        config.scheduler.max_model_len,
        keeps_all=keeps_all,
    )


def states_bytes(config: VllmConfig, layout: KVCacheLayout) -> int:
    """Return the bytes of the recurrent states of the whole batch; 0 without recurrent state.

    The inputs that are kept for drafts are included.
    """
    each = layout.state_bytes + num_provisional(config) * layout.input_bytes
    return each * config.scheduler.max_num_seqs


def num_provisional(config: VllmConfig) -> int:
    """Return the largest number of tokens per request whose inputs must be kept because of drafts.

    Layers with recurrent state keep them until the drafts are verified; 0 without drafts.
    """
    num_drafts = config.scheduler.max_draft_tokens
    return 1 + num_drafts if num_drafts else 0


def count_kept_states(config: VllmConfig, layout: KVCacheLayout, free_bytes: int) -> int | None:
    """Return how many recurrent states of prefixes are kept; None if the model keeps none.

    It is `num_kept_states`, but they take at most a quarter of the cache's memory. None: these
    layers have no recurrent state, or there is no prefix cache.

    Args:
        config: config of the engine.
        layout: layout of the layers.
        free_bytes: free bytes; see `count_blocks`.
    """
    cache = config.cache
    if not layout.state_bytes or not cache.enable_prefix_caching:
        return None
    budget = cache.kv_cache_memory_bytes or int(free_bytes * cache.gpu_memory_utilization)
    left = budget - states_bytes(config, layout)
    return max(0, min(cache.num_kept_states, left // (4 * layout.state_bytes)))


def count_blocks(
    config: VllmConfig,
    block_bytes: int,
    free_bytes: int,
    num_groups: int = 1,
    state_bytes: int = 0,
    others: Sequence[MemoryUse] = (),
    kept_bytes: int = 0,
) -> int:
    """Return the number of KV blocks that fit in memory, the null block included.

    Args:
        config: budget and limits.
        block_bytes: bytes of one block; 0 for a model without a KV cache.
        free_bytes: device memory that is free after loading the model.
        num_groups: groups of layers with separate block tables.
        state_bytes: bytes of the recurrent states of the batch, which are part of the cache's
            memory.
        others: uses of the memory that is not free, for an error.
        kept_bytes: bytes of the recurrent states of prefixes that are kept.

    Raises:
        ConfigError: the memory does not hold one request of max_model_len tokens, or the recurrent
            states.
    """
    cache, scheduler = config.cache, config.scheduler
    budget, source = int(free_bytes * cache.gpu_memory_utilization), "--gpu-memory-utilization"
    unused = unused_share(config, free_bytes - budget)
    setting = None
    if cache.kv_cache_memory_bytes is not None:
        budget, source = cache.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
        setting = f"{source} or VLLM_CPU_KVCACHE_SPACE"
    check_states(config, state_bytes, budget, source)
    budget -= state_bytes + kept_bytes
    if not block_bytes:
        # The model caches nothing. Blocks only limit the number of tokens: a full batch of the
        # longest requests must fit.
        return scheduler.max_num_seqs * (config.max_blocks_per_request + 1) + 1
    if cache.num_gpu_blocks_override is not None:
        num_blocks, setting = cache.num_gpu_blocks_override, "--num-gpu-blocks-override"
        budget = num_blocks * block_bytes
    elif cache.kv_cache_memory_bytes is not None:
        num_blocks = budget // block_bytes
    else:
        # Twice the blocks of a full batch of the longest requests leave room for prefixes of
        # finished requests. More would only cost memory.
        useful = scheduler.max_num_seqs * config.max_blocks_per_request * num_groups
        useful = useful * (2 if cache.enable_prefix_caching else 1) + 1
        num_blocks = min(budget // block_bytes, useful)
    others = (*others, states_use(config, state_bytes + kept_bytes), unused)
    memory = CacheBudget(budget, setting, others)
    check_capacity(config, num_blocks, block_bytes, memory, num_groups)
    return num_blocks


def check_states(config: VllmConfig, state_bytes: int, budget: int, source: str) -> None:
    """Check that the recurrent states fit in the memory of the cache.

    Args:
        config: limits.
        state_bytes: bytes of the recurrent states of the batch.
        budget: bytes that they may take.
        source: the setting that decided the budget, for the error.

    Raises:
        ConfigError: the states need more.
    """
    if state_bytes <= max(0, budget):
        return
    num_rows = config.scheduler.max_num_seqs
    each = state_bytes // num_rows
    most = max(0, budget) // each
    fix = f"Lower --max-num-seqs to {most}" if most else "Use a smaller model"
    raise ConfigError(
        f"--max-num-seqs {num_rows}: the recurrent state of {num_rows} requests takes "
        f"{format_bytes(state_bytes)}, {format_bytes(each)} per request, but only "
        f"{format_bytes(budget)} are available ({source}). {fix}, or {_MORE}"
    )


def log_cache(
    config: VllmConfig, num_blocks: int, layout: KVCacheLayout, num_kept_states: int = 0
) -> None:
    """Log the size of a KV cache and of recurrent states; nothing for a model without them."""
    log_states(layout, config.scheduler.max_num_seqs, num_kept_states)
    if not layout.block_bytes:
        return
    num_tokens = _num_tokens(num_blocks, layout.block_size, len(layout.groups))
    max_model_len = config.scheduler.max_model_len
    logger.info(
        "KV cache: %d blocks of %d tokens (%.2f GiB), room for %.1f requests of max_model_len=%d "
        "tokens",
        num_blocks,
        layout.block_size,
        num_blocks * layout.block_bytes / _GIB,
        num_tokens / max_model_len,
        max_model_len,
    )


def log_states(layout: KVCacheLayout, num_rows: int, num_kept: int = 0) -> None:
    """Log the size of recurrent states of requests and of prefixes; nothing if there are none."""
    if layout.state_bytes:
        logger.info(
            "Mamba state: room for %d requests and %d cached prefixes, %.2f MiB each (%.2f GiB)",
            num_rows,
            num_kept,
            layout.state_bytes / 2**20,
            layout.state_bytes * (num_rows + num_kept) / _GIB,
        )


def check_capacity(
    config: VllmConfig, num_blocks: int, block_bytes: int, memory: CacheBudget, num_groups: int = 1
) -> None:
    """Check that a cache holds at least one request of max_model_len tokens.

    Args:
        config: limits.
        num_blocks: the null block included.
        block_bytes: bytes of one block.
        memory: memory of the cache, and why it is not larger.
        num_groups: groups of layers with separate block tables.

    Raises:
        ConfigError: the cache is too small.
    """
    scheduler = config.scheduler
    capacity = _num_tokens(num_blocks, config.cache.block_size, num_groups)
    if capacity >= scheduler.max_model_len:
        return
    raise ConfigError(
        f"the KV cache holds {capacity} tokens, but max_model_len is {scheduler.max_model_len}: a "
        f"request that long would not fit. {memory.reason}. Lower --max-model-len to {capacity}, "
        f"or {memory.fix}"
        if capacity
        else (
            f"not enough memory for the KV cache: one block takes {format_bytes(block_bytes)}, "
            f"and the first one is reserved. {memory.reason}. "
            f"{memory.fix[0].upper()}{memory.fix[1:]}"
        )
    )


def _num_tokens(num_blocks: int, block_size: int, num_groups: int) -> int:
    """Return how many tokens of a request the cache holds at least.

    With sliding windows it may hold more, because blocks outside the window are freed.
    """
    return max(0, num_blocks - 1) // num_groups * block_size


def bind_kv_caches(
    layers: Sequence[CachedLayer],
    platform: Platform,
    num_blocks: int,
    layout: KVCacheLayout,
    dtype: torch.dtype,
    num_rows: int = 0,
    provisional: tuple[int, int] = (0, 0),
) -> None:
    """Allocate the KV caches of all layers, filled with zeros, and bind them to the layers.

    Layers with the same index in different groups share tensors, because a block belongs to one
    group at a time.

    Args:
        layers: the layers that the layout was planned for.
        platform: platform of the device.
        num_blocks: the null block included.
        layout: layout of the layers.
        dtype: data type that the layout was planned for.
        num_rows: number of recurrent states that layers with recurrent state have.
        provisional: (rows of the batch, `num_provisional`).
    """
    for layer_index in layout.state_layers:
        tensors = layers[layer_index].cache_spec(dtype).tensors
        layers[layer_index].bind_kv_cache(
            *(
                platform.allocate_cache((num_rows, *tensor.shape), getattr(torch, tensor.dtype))
                for tensor in tensors
            )
        )
        if provisional[1]:
            layer = layers[layer_index]
            assert isinstance(layer, StateLayer)
            layer.provisional = tuple(
                platform.allocate_cache((*provisional, *x.shape), getattr(torch, x.dtype))
                for x in layer.cache_spec(dtype).inputs
            )
    pool: list[list[torch.Tensor]] = []
    for index, group in enumerate(layout.groups):
        for number, layer_index in enumerate(group.layers):
            layer = layers[layer_index]
            if number == len(pool):
                tensors = layer.cache_spec(dtype).tensors
                pool.append([_allocate(t, platform, num_blocks, layout) for t in tensors])
            layer.bind_kv_cache(*pool[number])
            layer.cache_group = index


def _allocate(
    tensor: CacheTensor, platform: Platform, num_blocks: int, layout: KVCacheLayout
) -> torch.Tensor:
    sizes: tuple[int, ...] = (num_blocks, layout.block_size)
    if platform.has_flat_cache:
        sizes = (num_blocks * layout.block_size,)
    shape = (*sizes, *tensor.shape)
    return platform.allocate_cache(shape, getattr(torch, tensor.dtype))
