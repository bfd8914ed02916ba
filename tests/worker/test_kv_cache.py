"""The KV cache is as large as its budget says."""

from dataclasses import replace

import pytest
import torch

from vllm.attention import Attention
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.errors import ConfigError
from vllm.platforms import resolve_platform
from vllm.worker.kv_cache import bind_kv_caches, bytes_per_block, cache_dtype, count_blocks

GIB = 2**30


def make_config(**cache) -> VllmConfig:
    return VllmConfig(
        model=ModelConfig(),
        cache=CacheConfig(**{"block_size": 16, **cache}),
        scheduler=SchedulerConfig(max_model_len=64, max_num_seqs=1000, max_num_batched_tokens=1000),
    )


def test_a_block_holds_keys_and_values_of_all_layers():
    layers = [Attention(8, 64, 2) for _ in range(3)]
    assert bytes_per_block(layers, 16, torch.bfloat16) == 2 * 3 * 2 * 64 * 16 * 2


@pytest.mark.parametrize(
    ("asked", "dtype", "num_blocks"),
    [
        ("auto", torch.bfloat16, 1000),
        ("fp8", torch.float8_e4m3fn, 2000),
        ("fp8_e4m3", torch.float8_e4m3fn, 2000),
        ("fp8_e5m2", torch.float8_e5m2, 2000),
    ],
)
def test_a_cache_of_fp8_has_twice_as_many_blocks(asked, dtype, num_blocks):
    config = make_config(kv_cache_dtype=asked, kv_cache_space_bytes=1000 * 24576)
    config = replace(config, model=replace(config.model, dtype="bfloat16"))
    assert cache_dtype(config) == dtype
    layers = [Attention(8, 64, 2) for _ in range(3)]
    block_bytes = bytes_per_block(layers, 16, cache_dtype(config))
    assert count_blocks(config, block_bytes, free_bytes=GIB) == num_blocks


def test_the_share_of_free_memory_is_used():
    config = make_config(gpu_memory_utilization=0.5)
    assert count_blocks(config, block_bytes=2**20, free_bytes=8 * GIB) == 4096


def test_no_more_blocks_than_requests_can_use():
    config = make_config(enable_prefix_caching=False)
    assert count_blocks(config, block_bytes=1, free_bytes=GIB) == 1000 * 4 + 1


def test_a_cache_size_in_bytes_overrides_the_share():
    config = make_config(kv_cache_space_bytes=GIB)
    assert count_blocks(config, block_bytes=2**20, free_bytes=8 * GIB) == 1024


def test_a_number_of_blocks_overrides_everything():
    config = make_config(num_gpu_blocks_override=7, kv_cache_space_bytes=GIB)
    assert count_blocks(config, block_bytes=2**20, free_bytes=8 * GIB) == 7


def test_a_cache_too_small_for_the_longest_request_is_refused_with_what_would_fit():
    config = make_config(num_gpu_blocks_override=4)
    with pytest.raises(ConfigError, match=r"holds 48 tokens.*max_model_len is 64.*to 48"):
        count_blocks(config, block_bytes=1, free_bytes=GIB)
    config = replace(config, cache=CacheConfig(block_size=16, kv_cache_space_bytes=10))
    with pytest.raises(ConfigError, match="one block takes 100 bytes"):
        count_blocks(config, block_bytes=100, free_bytes=GIB)


def test_caches_are_zero_and_belong_to_one_layer_each():
    layers = [Attention(4, 8, 2) for _ in range(2)]
    bind_kv_caches(layers, resolve_platform("cpu"), 5, 16, torch.bfloat16)
    tensors = [t for layer in layers for t in (layer.key_cache, layer.value_cache)]
    assert all(t.shape == (5, 16, 2, 8) and t.dtype == torch.bfloat16 for t in tensors)
    assert all(not t.any() for t in tensors)
    assert len({t.data_ptr() for t in tensors}) == 4
