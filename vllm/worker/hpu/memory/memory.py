"""Divides the memory of a card between forward passes, graphs and the KV cache.

It only computes with measured values, without access to a card.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from vllm.bucketing import MemoryLedger, format_bytes
from vllm.bucketing.ledger import MemoryClass, MemorySplit, open_ledger, split_memory
from vllm.bucketing.log_lines import memory_split_line
from vllm.config import VllmConfig
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.worker.interface import MemoryReport
from vllm.worker.kv_cache import check_capacity, check_states, count_blocks
from vllm.worker.parts.memory_use import (
    CacheBudget,
    MemoryUse,
    graphs_use,
    launches_use,
    unused_share,
)

logger = init_logger(__name__)


def max_launch_bytes(config: VllmConfig, free_bytes: int, block_bytes: int) -> int:
    """Return how many bytes forward passes may need, so that the cache still holds the longest
    request.
    """
    cache = config.cache
    if cache.kv_cache_memory_bytes is not None and cache.num_gpu_blocks_override is None:
        graph_bytes = free_bytes * cache.gpu_memory_utilization * _graph_share(config)
        return int(free_bytes - graph_bytes - cache.kv_cache_memory_bytes)
    num_blocks = cache.num_gpu_blocks_override or config.max_blocks_per_request + 1
    share = cache.gpu_memory_utilization * (1 - _graph_share(config))
    cache_bytes = num_blocks * block_bytes / share if share else 0
    return int(free_bytes - cache_bytes)


def max_kv_blocks(config: VllmConfig, free_bytes: int, block_bytes: int) -> int:
    """Return the largest number of KV blocks of the cache, the null block included.

    Args:
        config: fractions and limits of the memory.
        free_bytes: device memory that weights do not use.
        block_bytes: bytes of one KV block in all layers; 0: there is no cache, and no limit.
    """
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    if not block_bytes:
        return sys.maxsize
    kv_bytes = cache.kv_cache_memory_bytes
    if kv_bytes is None:
        kv_bytes = _split(config, free_bytes).kv_bytes
    return max(config.max_blocks_per_request + 1, kv_bytes // block_bytes)


def subtract_states(
    config: VllmConfig, free_bytes: int, state_bytes: int
) -> tuple[VllmConfig, int]:
    """Subtract the memory of recurrent states; return the new config and free memory.

    In the config, the memory of the KV cache is reduced to the part for blocks.

    Args:
        config: config of the engine.
        free_bytes: device memory that weights do not use.
        state_bytes: bytes of the recurrent states of all requests.

    Raises:
        ConfigError: the recurrent states do not fit.
    """
    cache = config.cache
    budget, source = int(free_bytes * cache.gpu_memory_utilization), "--gpu-memory-utilization"
    asked = cache.kv_cache_memory_bytes
    if asked is not None:
        budget, source = asked, "--kv-cache-memory-bytes"
    check_states(config, state_bytes, budget, source)
    if asked is not None:
        left = max(1, asked - state_bytes)  # 0 is not a valid setting
        config = replace(config, cache=replace(cache, kv_cache_memory_bytes=left))
    return config, free_bytes - state_bytes


def divide_memory(
    config: VllmConfig,
    *,
    free_bytes: int,
    launch_bytes: int,
    block_bytes: int,
    others: Sequence[MemoryUse] = (),
) -> MemoryReport:
    """Divide the memory that weights leave, and count the KV blocks that fit.

    Args:
        config: fractions and limits of the memory.
        free_bytes: device memory that weights do not use.
        launch_bytes: the part of it that forward passes need while they run.
        block_bytes: bytes of one KV block in all layers.
        others: uses of the memory that is not free, for the error.

    Raises:
        ConfigError: the cache would not hold one request of max_model_len tokens, or is larger than
            the memory.
    """
    launch_bytes = min(launch_bytes, free_bytes)
    split = _split(config, free_bytes - launch_bytes)
    has_bytes = config.cache.kv_cache_memory_bytes is not None
    if has_bytes:
        logger.info(
            "the KV cache has the size of kv_cache_memory_bytes; gpu_memory_utilization has no "
            "effect on it"
        )
    utilization, reserved = config.cache.gpu_memory_utilization, _graph_share(config)
    logger.info(memory_split_line(split, utilization, reserved))
    uses = (
        *others,
        launches_use(config, launch_bytes),
        graphs_use(config, split.graph_bytes),
        unused_share(config, split.margin_bytes),
    )
    memory = CacheBudget(split.kv_bytes, "--kv-cache-memory-bytes" if has_bytes else None, uses)
    num_blocks = _count_blocks(config, memory, block_bytes)
    if config.cache.num_gpu_blocks_override is not None:
        memory = CacheBudget(num_blocks * block_bytes, "--num-gpu-blocks-override")
    check_capacity(config, num_blocks, block_bytes, memory)
    return MemoryReport(
        free_bytes=free_bytes,
        launch_bytes=launch_bytes,
        warm_up_bytes=split.graph_bytes,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
    )


def make_ledger(
    config: VllmConfig, report: MemoryReport, total_bytes: int, num_blocks: int
) -> MemoryLedger:
    """Make the ledger of a card's memory before its KV cache is allocated.

    Args:
        config: fractions of the memory.
        report: report of this card.
        total_bytes: memory of the card.
        num_blocks: number of blocks of the KV cache; memory freed by having fewer blocks than
            reported stays unassigned.
    """
    ledger = open_ledger(
        total_bytes=total_bytes,
        weight_bytes=total_bytes - report.free_bytes,
        workspace_bytes=report.launch_bytes,
        split=_split(config, report.free_bytes - report.launch_bytes),
        prompt_ratio=config.hpu.graph_prompt_ratio,
        block_bytes=max(1, report.block_bytes),
    )
    ledger.assign(MemoryClass.KV_CACHE, num_blocks * report.block_bytes)
    return ledger


def _split(config: VllmConfig, free_bytes: int) -> MemorySplit:
    split = split_memory(free_bytes, config.cache.gpu_memory_utilization, _graph_share(config))
    asked = config.cache.kv_cache_memory_bytes
    if asked is None or config.cache.num_gpu_blocks_override is not None:
        return split
    usable_bytes = asked + split.graph_bytes
    if usable_bytes > free_bytes:
        raise ConfigError(
            f"kv_cache_memory_bytes={asked} ({format_bytes(asked)}): after weights and "
            f"activations the card has {format_bytes(free_bytes)} left, and "
            f"{format_bytes(split.graph_bytes)} of it are reserved for HPU graphs "
            f"(VLLM_GRAPH_RESERVED_MEM). Lower it to {max(0, free_bytes - split.graph_bytes)} at "
            "most"
        )
    margin_bytes = free_bytes - usable_bytes
    return replace(split, usable_bytes=usable_bytes, margin_bytes=margin_bytes, kv_bytes=asked)


def _graph_share(config: VllmConfig) -> float:
    """Return the fraction of the usable memory for graphs."""
    return 0.0 if config.model.enforce_eager else config.hpu.graph_reserved_mem


def _count_blocks(config: VllmConfig, memory: CacheBudget, block_bytes: int) -> int:
    cache = config.cache
    if not block_bytes:
        return count_blocks(config, 0, memory.num_bytes)
    override = cache.num_gpu_blocks_override
    if override is not None:
        if override * block_bytes > memory.num_bytes:
            raise ConfigError(
                f"num_gpu_blocks_override={override}: the blocks take "
                f"{format_bytes(override * block_bytes)}, which is more than the KV cache can "
                f"have. {memory.reason}. Lower it to {memory.num_bytes // block_bytes}, or "
                f"{memory.fix}"
            )
        return override
    num_blocks = max(0, memory.num_bytes // block_bytes)
    if cache.kv_cache_memory_bytes is not None:
        return num_blocks
    # Blocks beyond the needs of all requests together can only cache prefixes of finished requests.
    most = config.scheduler.max_num_seqs * config.max_blocks_per_request
    if not cache.enable_prefix_caching:
        return min(num_blocks, most + 1)
    # If blocks of running requests can be anywhere in the cache, contiguous decodes of a large
    # cache read a long slice. So the cache gets at most twice the blocks that requests can use.
    is_spread = config.hpu.contiguous_pa and not config.has_dense_cache
    return min(num_blocks, 2 * most + 1) if is_spread else num_blocks
