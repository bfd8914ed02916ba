"""Traces one forward pass instead of starting an engine, to show the cost of its operators."""

from typing import NoReturn

import torch

from vllm.bucketing import Phase
from vllm.bucketing.strategies.profiled import parse_profiled
from vllm.config import VllmConfig
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.worker.hpu.launches.execution import GraphExecution
from vllm.worker.hpu.launches.launches import PaddedRunner
from vllm.worker.torch_profile import TorchProfile

logger = init_logger(__name__)

_RUNS_BEFORE = 3
"""The first compiles, and caches of the bridge fill."""


def profile_launch(
    config: VllmConfig, bridge: HabanaBridge, runner: PaddedRunner, num_blocks: int
) -> NoReturn:
    """Write the trace that VLLM_PT_PROFILE asks for, and end the start.

    The file is written to VLLM_TORCH_PROFILER_DIR, or to the working directory.

    Args:
        config: config of the engine.
        bridge: the card.
        runner: runner with its KV cache and its bucket catalog.
        num_blocks: number of blocks of the cache, the null block included.

    Raises:
        ConfigError: always: the trace is written, or the forward pass is not possible.
    """
    text = config.hpu.profiled_launch
    assert text is not None
    bucket, as_graph = parse_profiled(text)
    scheduler, phases = config.scheduler, runner.launches.phases
    too_large = {
        f"the model decodes nothing: {bucket.phase!s}": bucket.phase not in phases,
        f"max_num_seqs is {scheduler.max_num_seqs}": bucket.batch > scheduler.max_num_seqs,
        f"max_model_len is {scheduler.max_model_len}": bucket.query_len > scheduler.max_model_len,
        f"the KV cache has {num_blocks} blocks": bucket.phase is Phase.DECODE
        and bucket.blocks > num_blocks,
    }
    for reason, is_so in too_large.items():
        if is_so:
            raise ConfigError(f"VLLM_PT_PROFILE={text!r} cannot run: {reason}")
    shape = runner.launches.launch_shapes(bucket)[0]
    execution = runner.launches.execution
    profile = TorchProfile(config.observability.torch_profiler_dir or ".", text)
    with torch.inference_mode():
        if as_graph and isinstance(execution, GraphExecution):
            runner.launches.capture(shape)
        for _ in range(_RUNS_BEFORE):
            runner.warm_up(shape, sampling="none")
        bridge.synchronize()
        profile.start()
        runner.warm_up(shape, sampling="none")
        bridge.synchronize()
    path = profile.stop()
    raise ConfigError(
        f"Finished profiling {text} ({execution.how(shape)}): the trace is in {path}. To start the "
        f"engine, unset VLLM_PT_PROFILE"
    )
