"""Test the checks of each config class, and that all config classes are frozen."""

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from tests.loops import loop_over
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    HPUConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.config.parallel import check_tensor_split, even_partition
from vllm.errors import ConfigError

SCHEDULER: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
}
COMPLETE: dict[type, dict[str, Any]] = {
    CacheConfig: {"block_size": 16},
    DeviceConfig: {},
    HPUConfig: {},
    LoadConfig: {},
    ModelConfig: {},
    ParallelConfig: {},
    SchedulerConfig: SCHEDULER,
}


def make_vllm_config() -> VllmConfig:
    return VllmConfig(
        model=ModelConfig(),
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(**SCHEDULER),
    )


@pytest.mark.parametrize("config_class", COMPLETE, ids=lambda c: c.__name__)
def test_configs_are_frozen_and_take_keywords_only(config_class):
    config = config_class(**COMPLETE[config_class])
    with pytest.raises(FrozenInstanceError):
        setattr(config, fields(config)[0].name, None)
    with pytest.raises(TypeError):
        config_class("positional")


def test_the_whole_config_is_frozen_too():
    with pytest.raises(FrozenInstanceError):
        make_vllm_config().model = ModelConfig()


REFUSED = [
    (HPUConfig, {"ready_when": "never"}, "ready_when must be one of first, all, got 'never'"),
    (HPUConfig, {"first_buckets": 0}, "first_buckets must be an integer of at least 1, got 0"),
    (HPUConfig, {"warm_up_share": 1.5}, "warm_up_share must be between 0 and 1, got 1.5"),
    (HPUConfig, {"warm_up_share": float("nan")}, "warm_up_share must be between 0 and 1, got nan"),
    (
        HPUConfig,
        {"warm_up_max_delay": -1.0},
        "warm_up_max_delay must be at least 0 seconds, got -1.0",
    ),
    (
        HPUConfig,
        {"ready_when": "first", "full_warmup": True},
        "ready_when='first' cannot be used with VLLM_FULL_WARMUP=true, which allows no warm-up "
        "after the start. Leave out one of them",
    ),
    (
        HPUConfig,
        {"adapt_buckets": True, "skip_warmup": True},
        "adapt_buckets=True cannot be used with VLLM_SKIP_WARMUP=true, which allows no warm-up "
        "after the start. Leave out one of them",
    ),
    (CacheConfig, {"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
    (CacheConfig, {"block_size": True}, "block_size must be an integer of at least 1, got True"),
    (CacheConfig, {"block_size": 24}, "block_size must be a power of two, got 24"),
    (
        CacheConfig,
        {"gpu_memory_utilization": 0},
        "gpu_memory_utilization must be above 0 and at most 1, got 0",
    ),
    (
        CacheConfig,
        {"gpu_memory_utilization": 1.01},
        "gpu_memory_utilization must be above 0 and at most 1, got 1.01",
    ),
    (
        CacheConfig,
        {"gpu_memory_utilization": 90},
        "gpu_memory_utilization must be above 0 and at most 1, got 90. It is a fraction: write "
        "90 % as 0.9",
    ),
    (
        CacheConfig,
        {"gpu_memory_utilization": float("nan")},
        "gpu_memory_utilization must be above 0 and at most 1, got nan",
    ),
    (
        CacheConfig,
        {"num_gpu_blocks_override": 1},
        "num_gpu_blocks_override must be an integer of at least 2, got 1",
    ),
    (
        CacheConfig,
        {"kv_cache_memory_bytes": 0},
        "kv_cache_memory_bytes must be an integer of at least 1, got 0",
    ),
    (
        CacheConfig,
        {"kv_cache_dtype": "int8"},
        "kv_cache_dtype must be one of auto, fp8, fp8_e4m3, fp8_e5m2, fp8_inc, got 'int8'",
    ),
    (
        CacheConfig,
        {"prefix_caching_hash_algo": "md5"},
        "prefix_caching_hash_algo must be one of sha256, builtin, got 'md5'",
    ),
    (DeviceConfig, {"device": "cuda"}, "device must be one of auto, cpu, hpu, got 'cuda'"),
    (
        LoadConfig,
        {"load_format": "npz"},
        "load_format must be one of auto, safetensors, pt, dummy, sharded_state, gguf, mistral, "
        "bitsandbytes, got 'npz'",
    ),
    (
        ModelConfig,
        {"dtype": "int8"},
        "dtype must be one of auto, half, float16, bfloat16, float, float32, got 'int8'",
    ),
    (
        ModelConfig,
        {"tokenizer_mode": "fast"},
        "tokenizer_mode must be one of auto, slow, mistral, got 'fast'",
    ),
    (ModelConfig, {"max_model_len": 0}, "max_model_len must be an integer of at least 1, got 0"),
    (ModelConfig, {"max_logprobs": -2}, "max_logprobs must be an integer of at least 0, got -2"),
    (
        ParallelConfig,
        {"tensor_parallel_size": 0},
        "tensor_parallel_size must be an integer of at least 1, got 0",
    ),
    (
        ParallelConfig,
        {"pipeline_parallel_size": 0},
        "pipeline_parallel_size must be an integer of at least 1, got 0",
    ),
    (
        SchedulerConfig,
        {"max_model_len": 0},
        "max_model_len must be an integer of at least 1, got 0",
    ),
    (SchedulerConfig, {"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1, got 0"),
    (
        SchedulerConfig,
        {"max_num_batched_tokens": -1},
        "max_num_batched_tokens must be an integer of at least 1, got -1",
    ),
    (
        SchedulerConfig,
        {"max_num_partial_prefills": 0},
        "max_num_partial_prefills must be an integer of at least 1, got 0",
    ),
    (
        SchedulerConfig,
        {"max_long_partial_prefills": 0},
        "max_long_partial_prefills must be an integer of at least 1, got 0",
    ),
    (
        SchedulerConfig,
        {"long_prefill_token_threshold": -1},
        "long_prefill_token_threshold must be an integer of at least 0, got -1",
    ),
    (
        SchedulerConfig,
        {"scheduling_policy": "lifo"},
        "scheduling_policy must be one of fcfs, priority, got 'lifo'",
    ),
]


@loop_over("config_class, bad, message", REFUSED)
def test_a_bad_value_is_refused_with_name_and_accepted_values(config_class, bad, message):
    with pytest.raises(ConfigError) as failure:
        config_class(**{**COMPLETE[config_class], **bad})
    assert str(failure.value) == message


RELATIONS = [
    (
        {"max_num_batched_tokens": 3},
        "max_num_batched_tokens (3) is less than max_num_seqs (4)",
    ),
    (
        {"enable_chunked_prefill": False},
        "max_num_batched_tokens (32) is less than max_model_len (64) and chunked prefill is off",
    ),
    (
        {"max_long_partial_prefills": 2},
        "max_long_partial_prefills (2) must not exceed max_num_partial_prefills (1)",
    ),
    (
        {"long_prefill_token_threshold": 65},
        "long_prefill_token_threshold (65) must not exceed max_model_len (64)",
    ),
    (
        {"max_step_ms": 100, "enable_chunked_prefill": False, "max_num_batched_tokens": 64},
        "max_step_ms must be 0 with enable_chunked_prefill=False, got 100",
    ),
    ({"max_step_ms": -1}, "max_step_ms must be an integer of at least 0, got -1"),
]


@pytest.mark.parametrize(("bad", "message"), RELATIONS)
def test_limits_that_contradict_each_other_are_refused_with_both_numbers(bad, message):
    with pytest.raises(ConfigError) as failure:
        SchedulerConfig(**{**SCHEDULER, **bad})
    assert message in str(failure.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "uni"},
            "^distributed_executor_backend='uni' runs one worker.*is 2. Leave",
        ),
        ({"distributed_timeout_s": 0.0}, "^distributed_timeout_s must be more than 0, got 0.0"),
    ],
)
def test_what_no_workers_can_run_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**settings)


@pytest.mark.parametrize("block_size", [1, 2, 16, 128])
def test_powers_of_two_are_block_sizes(block_size):
    assert CacheConfig(block_size=block_size).block_size == block_size


def test_a_prefill_chunk_is_limited_by_threshold_share_or_budget():
    budget = SchedulerConfig(**{**SCHEDULER, "max_model_len": 1000})
    assert budget.prefill_chunk_limit == 32
    assert replace(budget, max_num_partial_prefills=2).prefill_chunk_limit == 40
    assert replace(budget, long_prefill_token_threshold=7).prefill_chunk_limit == 7


def test_the_chunk_limit_is_never_zero():
    tiny = SchedulerConfig(**{**SCHEDULER, "max_model_len": 10, "max_num_partial_prefills": 2})
    assert tiny.prefill_chunk_limit == 1


@pytest.mark.parametrize(("max_model_len", "num_blocks"), [(64, 4), (65, 5), (1, 1)])
def test_a_block_table_holds_the_longest_request(max_model_len, num_blocks):
    config = make_vllm_config()
    scheduler = replace(config.scheduler, max_model_len=max_model_len)
    assert replace(config, scheduler=scheduler).max_blocks_per_request == num_blocks


def test_the_world_is_tensor_times_pipeline():
    assert ParallelConfig().world_size == 1
    assert ParallelConfig(tensor_parallel_size=4).world_size == 4


@pytest.mark.parametrize(
    ("size", "sizes", "failed", "fitting"),
    [
        (7, (32, 8, 14336), "attention heads, KV heads", "1, 2, 4, 8, 16, 32"),
        (3, (6, 2, 1024), "intermediate_size, KV heads", "1, 2"),
        (6, (12, 4, 96), "KV heads", "1, 2, 4, 12"),
        (4, (28, 4, 18), "intermediate_size", "1, 2"),
    ],
)
def test_a_size_that_does_not_divide_the_model_names_what_fails_and_what_fits(
    size, sizes, failed, fitting
):
    heads, kv_heads, intermediate = sizes
    given = {"num_heads": heads, "num_kv_heads": kv_heads, "intermediate_size": intermediate}
    message = (
        rf"^tensor_parallel_size \({size}\) must .* does not fit {failed}\. .* fit: {fitting}$"
    )
    with pytest.raises(ConfigError, match=message):
        check_tensor_split(size, **given)
    for other in map(int, fitting.split(", ")):
        check_tensor_split(other, **given)


def test_more_stages_than_layers_are_refused_with_the_most_that_fit():
    with pytest.raises(ConfigError, match=r"size=4: the model has 3 layers.* to 3 or less$"):
        even_partition(3, 4)
