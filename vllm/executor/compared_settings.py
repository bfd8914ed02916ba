"""Compare the settings of processes of one server or engine that were started separately and must
agree.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from vllm.config.vllm import VllmConfig
from vllm.version import __version__


class Difference(NamedTuple):
    """A setting that differs between two processes."""

    name: str
    """Name of a flag, or "version"."""
    ours: str
    theirs: str


def settings_of_replica(config: VllmConfig) -> dict[str, str]:
    """Return the settings that all replicas of a server must have in common, by name."""
    model, parallel = config.model, config.parallel
    return {
        "version": __version__,
        "model": repr(replace(model.resolved_arch, hf_config={})),
        "dtype": model.dtype_name,
        "quantization": str(model.quantization),
        "lm_head_quantization": model.lm_head_quantization,
        "max_model_len": str(config.scheduler.max_model_len),
        "max_num_seqs": str(config.scheduler.max_num_seqs),
        "enable_lora": str(config.lora.enable_lora),
        "speculative_config": str(dict(config.speculative.speculative_config)),
        "data_parallel_size": str(parallel.data_parallel_size),
    }


def settings_of_rank(config: VllmConfig) -> dict[str, str]:
    """Return the settings that the ranks of an engine must have in common if each plans its own
    steps.
    """
    scheduler, cache, parallel = config.scheduler, config.cache, config.parallel
    return settings_of_replica(config) | {
        "tensor_parallel_size": str(parallel.tensor_parallel_size),
        "pipeline_parallel_size": str(parallel.pipeline_parallel_size),
        "pipeline_steps_in_flight": str(parallel.num_pipelined_steps),
        "VLLM_PP_LAYER_PARTITION": str(parallel.pipeline_layer_partition),
        "max_num_batched_tokens": str(scheduler.max_num_batched_tokens),
        "num_scheduler_steps": str(scheduler.num_scheduler_steps),
        "block_size": str(cache.block_size),
        "enable_prefix_caching": str(cache.enable_prefix_caching),
        "num_gpu_blocks_override": str(cache.num_gpu_blocks_override),
        "seed": str(config.model.seed),
    }


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Difference | None:
    """Return the first setting that differs; None if all agree.

    >>> difference({"dtype": "float32"}, {"dtype": "bfloat16"})
    Difference(name='dtype', ours='float32', theirs='bfloat16')
    """
    for name, value in ours.items():
        if (found := theirs.get(name, "not known")) != value:
            return Difference(name, value, found)
    return None
