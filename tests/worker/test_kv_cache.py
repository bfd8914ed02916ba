"""Test that the KV cache is as large as its budget allows."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gaudi_sim.bridge import SimBridge
from vllm.attention import Attention, CachedLayer, EncoderAttention, StateLayer
from vllm.attention.cached_layer import layers_with_cache
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.errors import ConfigError
from vllm.kv_cache_spec import CacheKind, CacheTensor, KVCacheGroup, KVCacheLayout, KVCacheSpec
from vllm.ops.attention_options import AttentionOptions
from vllm.platforms import resolve_platform
from vllm.platforms.hpu import HPUPlatform
from vllm.worker.hpu.memory.memory import subtract_states
from vllm.worker.kv_cache import (
    bind_kv_caches,
    cache_dtype,
    cache_layout,
    count_blocks,
    count_kept_states,
    num_provisional,
    states_bytes,
)
from vllm.worker.parts.memory_use import weights_use

GIB = 2**30


def make_config(**cache) -> VllmConfig:
    return VllmConfig(
        model=ModelConfig(),
        cache=CacheConfig(**{"block_size": 16, **cache}),
        scheduler=SchedulerConfig(max_model_len=64, max_num_seqs=1000, max_num_batched_tokens=1000),
    )


def test_a_block_holds_keys_and_values_of_all_layers():
    layers = [Attention(8, 64, 2) for _ in range(3)]
    layout = cache_layout(make_config(), layers, torch.bfloat16)
    assert layout.block_bytes == 2 * 3 * 2 * 64 * 16 * 2


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
    config = make_config(kv_cache_dtype=asked, kv_cache_memory_bytes=1000 * 24576)
    config = replace(config, model=replace(config.model, dtype="bfloat16"))
    assert cache_dtype(config) == dtype
    layers = [Attention(8, 64, 2) for _ in range(3)]
    block_bytes = cache_layout(config, layers, cache_dtype(config)).block_bytes
    assert count_blocks(config, block_bytes, free_bytes=GIB) == num_blocks


def test_the_share_of_free_memory_is_used():
    config = make_config(gpu_memory_utilization=0.5)
    assert count_blocks(config, block_bytes=2**20, free_bytes=8 * GIB) == 4096


def test_no_more_blocks_than_requests_can_use():
    config = make_config(enable_prefix_caching=False)
    assert count_blocks(config, block_bytes=1, free_bytes=GIB) == 1000 * 4 + 1


def test_a_cache_size_in_bytes_overrides_the_share():
    config = make_config(kv_cache_memory_bytes=GIB)
    assert count_blocks(config, block_bytes=2**20, free_bytes=8 * GIB) == 1024


def test_a_number_of_blocks_overrides_everything():
    config = make_config(num_gpu_blocks_override=7, kv_cache_memory_bytes=GIB)
    assert count_blocks(config, block_bytes=2**20, free_bytes=8 * GIB) == 7


def test_a_cache_too_small_for_the_longest_request_is_refused_with_what_would_fit():
    config = make_config(num_gpu_blocks_override=4)
    with pytest.raises(ConfigError, match=r"holds 48 tokens.*max_model_len is 64.*to 48"):
        count_blocks(config, block_bytes=1, free_bytes=GIB)
    config = replace(config, cache=CacheConfig(block_size=16, kv_cache_memory_bytes=10))
    with pytest.raises(ConfigError, match="one block takes 100 B"):
        count_blocks(config, block_bytes=100, free_bytes=GIB)
    config = make_config(gpu_memory_utilization=1e-9)
    with pytest.raises(ConfigError, match=r"unused 1024 MiB \(--gpu-mem.*\. Raise --gpu-memory-u"):
        count_blocks(config, block_bytes=100, free_bytes=GIB)
    with pytest.raises(ConfigError, match=r"weights 2 GiB, unused .*\. Use a smaller model or dt"):
        count_blocks(config, 100, free_bytes=GIB, others=[weights_use(2 * GIB)])


def bind(layers: list[CachedLayer], dtype: torch.dtype, num_blocks: int) -> KVCacheLayout:
    layout = cache_layout(make_config(), layers, dtype)
    bind_kv_caches(layers, resolve_platform("cpu"), num_blocks, layout, dtype)
    return layout


def test_caches_are_zero_and_belong_to_one_layer_each():
    layers = [Attention(4, 8, 2) for _ in range(2)]
    bind(layers, torch.bfloat16, num_blocks=5)
    tensors = [t for layer in layers for t in (layer.key_cache, layer.value_cache)]
    assert all(t.shape == (5, 16, 2, 8) and t.dtype == torch.bfloat16 for t in tensors)
    assert all(not t.any() for t in tensors)
    assert len({t.data_ptr() for t in tensors}) == 4


def windowed(window: int | None) -> Attention:
    return Attention(4, 8, 2, AttentionOptions(sliding_window=window))


def test_layers_with_different_windows_share_one_memory_in_groups_of_equal_size():
    windows = [32, 32, None, 32, 32]
    layers = [windowed(window) for window in windows]
    layout = bind(layers, torch.float32, num_blocks=5)
    assert [group.window for group in layout.groups] == [None, *[32] * 4]
    assert [layer.cache_group for layer in layers] == [1, 2, 0, 3, 4]
    assert layout.block_bytes == 2 * 16 * 2 * 8 * 4
    assert len({layer.key_cache.data_ptr() for layer in layers}) == 1
    # There are two layers of each kind, so a block has space for two layers.
    layers = [windowed(window) for window in (None, 32, None, 32)]
    layout = bind(layers, torch.float32, num_blocks=5)
    assert [group.layers for group in layout.groups] == [(0, 2), (1, 3)]
    first, second, third, fourth = (layer.key_cache.data_ptr() for layer in layers)
    assert (first, third) == (second, fourth) and first != third
    layers[0].release_kv_cache()
    assert layers[0].kv_caches == () and len(layers[1].kv_caches) == 2


def test_a_window_that_no_request_outgrows_is_no_window():
    layers = [windowed(window) for window in (64, None)]
    layout = cache_layout(make_config(), layers, torch.float32)
    assert layout.groups == (KVCacheGroup(None, (0, 1)),)


class LatentLayer(CachedLayer):
    """A layer that caches one tensor instead of separate keys and values."""

    cache_names = ("latent_cache",)

    def __init__(self, size: int, window: int | None = None) -> None:
        super().__init__()
        self.latent_cache = None
        self.size = size
        self.window = window

    def cache_spec(self, dtype: torch.dtype) -> KVCacheSpec:
        tensor = CacheTensor((self.size,), str(dtype).removeprefix("torch."), dtype.itemsize)
        if self.window is None:
            return KVCacheSpec(CacheKind.LATENT, (tensor,))
        return KVCacheSpec(CacheKind.SLIDING_WINDOW, (tensor,), self.window)


def test_what_a_layer_keeps_needs_to_be_neither_two_tensors_nor_of_one_shape():
    model = nn.ModuleList([LatentLayer(24), EncoderAttention(4, 8), Attention(4, 8, 2)])
    layers = layers_with_cache(model)
    assert layers == [model[0], model[2]]
    layout = bind(layers, torch.bfloat16, num_blocks=3)
    assert layout.block_bytes == 16 * 2 * (24 + 2 * 2 * 8)
    assert model[0].latent_cache.shape == (3, 16, 24)
    assert model[2].key_cache.shape == (3, 16, 2, 8)
    assert all(
        len({c.data_ptr() for c in layer.kv_caches}) == len(layer.kv_caches) for layer in layers
    )
    # Layers whose tensors differ cannot share memory alternately: all layers keep all tokens.
    mixed = [LatentLayer(24), LatentLayer(16, window=32)]
    assert [group.layers for group in bind(mixed, torch.bfloat16, num_blocks=3).groups] == [(0, 1)]
    assert mixed[0].latent_cache.shape != mixed[1].latent_cache.shape


def test_a_flat_cache_has_the_slots_of_all_blocks_in_one_dimension():
    platform = HPUPlatform(lambda: SimBridge("gaudi2"))
    layers = [LatentLayer(24), Attention(4, 8, 2)]
    layout = cache_layout(make_config(), layers, torch.bfloat16)
    bind_kv_caches(layers, platform, 3, layout, torch.bfloat16)
    assert layers[0].latent_cache.shape == (3 * 16, 24)
    assert layers[1].key_cache.shape == layers[1].value_cache.shape == (3 * 16, 2, 8)
    assert sum(c.nbytes for x in layers for c in x.kv_caches) == 3 * layout.block_bytes


def test_several_groups_need_as_many_blocks_for_the_same_tokens():
    config = make_config(num_gpu_blocks_override=9)
    assert count_blocks(config, 1, GIB, num_groups=2) == 9
    with pytest.raises(ConfigError, match=r"holds 32 tokens.*max_model_len is 64"):
        count_blocks(config, 1, GIB, num_groups=3)
    config = make_config(enable_prefix_caching=False)
    assert count_blocks(config, 1, GIB, num_groups=3) == 1000 * 4 * 3 + 1


class Memory(StateLayer):
    """A layer that stores the last three inputs and their sum."""

    cache_names = ("last", "total")

    def state_shapes(self):
        return ((3, 8), torch.bfloat16), ((8,), torch.float32)

    def input_shapes(self):
        return (((8,), torch.bfloat16),)

    def advance(self, inputs, lengths, states):
        raise NotImplementedError


def test_states_have_one_entry_per_row_and_no_blocks():
    layers = [Memory(), Attention(4, 8, 2), Memory(), Attention(4, 8, 2)]
    layout = cache_layout(make_config(), layers, torch.bfloat16)
    assert layout.groups == (KVCacheGroup(None, (1, 3)),)
    assert layout.block_bytes == 2 * 2 * 2 * 8 * 2 * 16
    assert layout.state_layers == (0, 2)
    assert layout.state_bytes == 2 * (3 * 8 * 2 + 8 * 4)
    bind_kv_caches(layers, resolve_platform("cpu"), 5, layout, torch.bfloat16, num_rows=7)
    assert layers[0].last.shape == (7, 3, 8) and layers[0].last.dtype == torch.bfloat16
    assert layers[2].total.shape == (7, 8) and layers[2].total.dtype == torch.float32
    assert layers[0].total.data_ptr() != layers[2].total.data_ptr()
    assert layers[3].key_cache.shape == (5, 16, 2, 8)


def test_layers_with_states_keep_the_inputs_of_tokens_that_ran_with_drafts():
    layers, platform = [Memory(), Attention(4, 8, 2)], resolve_platform("cpu")
    config = make_config()
    layout = cache_layout(config, layers, torch.bfloat16)
    assert layout.input_bytes == 8 * 2
    assert states_bytes(config, layout) == 1000 * layout.state_bytes
    bind_kv_caches(layers, platform, 5, layout, torch.bfloat16, 7, (6, num_provisional(config)))
    assert layers[0].provisional == ()
    config = replace(config, scheduler=replace(config.scheduler, max_draft_tokens=3))
    assert states_bytes(config, layout) == 1000 * (layout.state_bytes + 4 * 8 * 2)
    bind_kv_caches(layers, platform, 5, layout, torch.bfloat16, 7, (6, num_provisional(config)))
    assert [x.shape for x in layers[0].provisional] == [(6, 4, 8)]
    assert layers[0].request_tensors == (*layers[0].kv_caches, *layers[0].provisional)
    layers[0].release_kv_cache()
    assert layers[0].request_tensors == ()


def test_a_model_of_states_alone_has_no_blocks_to_keep():
    layout = cache_layout(make_config(), [Memory()], torch.float32)
    assert layout.block_bytes == 0 and layout.groups == (KVCacheGroup(),)
    config = make_config()
    num_blocks = count_blocks(config, 0, GIB, state_bytes=states_bytes(config, layout))
    assert num_blocks > 1000 * config.max_blocks_per_request


def test_states_come_off_the_memory_of_the_cache():
    config = make_config(kv_cache_memory_bytes=GIB)
    assert count_blocks(config, 2**20, 8 * GIB, state_bytes=GIB // 4) == 768
    config = make_config(gpu_memory_utilization=0.5)
    assert count_blocks(config, 2**20, 2 * GIB, state_bytes=GIB // 2) == 512
    refused = "state of 1000 requests takes 2 GiB, 2.048 MiB .* 1024 MiB are .*to 500"
    for block_bytes in (0, 2**20):
        with pytest.raises(ConfigError, match=refused):
            count_blocks(config, block_bytes, 2 * GIB, state_bytes=2 * GIB)


def test_a_stage_without_states_does_not_limit_how_many_are_kept():
    stages = [[Memory(), Attention(4, 8, 2)], [Attention(4, 8, 2)]]
    config = make_config(num_kept_states=9)
    layouts = [cache_layout(config, stage, torch.bfloat16) for stage in stages]
    assert [count_kept_states(config, layout, GIB) for layout in layouts] == [9, None]
    config = make_config(enable_prefix_caching=False)
    assert [count_kept_states(config, layout, GIB) for layout in layouts] == [None, None]


def test_states_on_a_card_come_off_the_memory_before_it_is_divided():
    config = make_config(gpu_memory_utilization=0.5)
    assert subtract_states(config, 2 * GIB, GIB // 2) == (config, 3 * GIB // 2)
    config, free_bytes = subtract_states(make_config(kv_cache_memory_bytes=GIB), 8 * GIB, GIB)
    assert (config.cache.kv_cache_memory_bytes, free_bytes) == (1, 7 * GIB)
    with pytest.raises(ConfigError, match=r"only 1024 MiB .*--kv-cache-memory-bytes.*to 500"):
        subtract_states(make_config(kv_cache_memory_bytes=GIB), 8 * GIB, 2 * GIB)
