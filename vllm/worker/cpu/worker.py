"""The worker of the CPU."""

import os

import torch

from vllm.config import VllmConfig
from vllm.distributed import CheckedCollectives, Collectives, Meeting
from vllm.distributed.meeting import ARENA_BUFFER_BYTES, ARENA_HEADER_BYTES
from vllm.logger import init_logger
from vllm.messages import SchedulerOutput
from vllm.model_executor.loader import load_model
from vllm.model_executor.model_memory import model_storages
from vllm.model_executor.models.interface import CausalLM, PoolingModel
from vllm.model_executor.quantization import Quantization
from vllm.model_executor.quantization.cpu_packed import CPUPacked
from vllm.ops import set_ops
from vllm.ops.cpu.collectives import SharedMemoryCollectives
from vllm.ops.cpu.library import load_cpu_kernels
from vllm.ops.cpu.operators import CPUOps
from vllm.platforms import resolve_platform
from vllm.platforms.cpu_threads import count_cores, count_threads, format_cores, usable_cores
from vllm.utils.imports import load_class
from vllm.worker.cpu.model_runner import CPUModelRunner
from vllm.worker.cpu.sleep import HostCache, HostWeights, check_can_sleep
from vllm.worker.interface import MemoryReport
from vllm.worker.kv_cache import (
    bind_kv_caches,
    cache_dtype,
    count_blocks,
    log_cache,
)
from vllm.worker.model_runner import ModelRunner, StepHandle
from vllm.worker.pooling.runner import PoolingRunner
from vllm.worker.worker_base import WorkerBase

logger = init_logger(__name__)


class CPUWorker(WorkerBase):
    """Runs the model in this process, on torch's threads.

    Args:
        config: of the engine.
    """

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config, torch.device("cpu"))
        self.platform = resolve_platform("cpu")
        self._ops = load_class(self.platform.ops_class)()
        set_ops(self._ops)
        cores = config.device.bound_cores
        if cores is not None:
            # Threads that this one starts from now on, those of OpenMP among them, inherit it.
            os.sched_setaffinity(0, cores)
            if config.device.counts_threads:
                torch.set_num_threads(len(cores))

    def load(self, rank: int) -> None:
        """Build the model, read its weights and pack them for the kernels.

        Raises:
            ConfigError: the weights are to be quantized and there are no kernels for that.
        """
        if self.config.model.enable_sleep_mode:
            check_can_sleep()
        super().load(rank)

    def _load_model(self) -> None:
        self.model = self._read_model(self.config)
        self._count_threads(sum(len(storage) for storage in model_storages(self.model)))
        self.runner = self._make_runner(self.model)

    def _read_model(self, config: VllmConfig) -> CausalLM | PoolingModel:
        return load_model(config, self.tp, self.device, self._dense_format())

    def _count_threads(self, weight_bytes: int) -> None:
        device = self.config.device
        if device.counts_threads and device.bound_cores is None:
            found = torch.get_num_threads()
            num_cores = max(1, count_cores() // self.config.parallel.world_size)
            wanted = count_threads(
                found, num_cores, weight_bytes, is_beside_server=device.is_beside_server
            )
            if wanted != found:
                torch.set_num_threads(wanted)
        logger.info(
            "%.2f GiB of weights, %d threads on the cores %s",
            weight_bytes / 2**30,
            torch.get_num_threads(),
            format_cores(usable_cores()),
        )

    def _dense_format(self) -> Quantization | None:
        """How the kernels take dense weights; None: they stay as torch takes them."""
        # torch reads bfloat16 weights at half the speed of the memory. Its float32 is as fast as
        # the kernels on small layers, which is where that type is used.
        is_packed = isinstance(self._ops, CPUOps) and self.config.model.dtype_name == "bfloat16"
        return CPUPacked() if is_packed else None

    def _make_runner(self, model: CausalLM | PoolingModel) -> ModelRunner | PoolingRunner:
        if isinstance(model, PoolingModel):
            return PoolingRunner(self.config, model, self.device)
        return CPUModelRunner(self.config, model, self.device, self.grammars)

    def _make_collectives(self, meeting: Meeting) -> Collectives:
        kernels = load_cpu_kernels()
        if kernels is not None and meeting.layout.pipeline_size == 1:
            return SharedMemoryCollectives(
                kernels,
                meeting.arena_fd,
                self.tp.rank,
                self.tp.size,
                header_bytes=ARENA_HEADER_BYTES,
                buffer_bytes=ARENA_BUFFER_BYTES,
                timeout_s=meeting.timeout_s,
            )
        meeting.join(self.platform.collectives_backend)
        group = meeting.open_groups(meeting.layout.tensor_groups)
        return CheckedCollectives(self.rank, self.tp.size, group)

    def measure(self) -> MemoryReport:
        """Count the KV blocks for which there is memory; launches are not measured."""
        layout = self.runner.cache_layout
        # All ranks take from the same memory, and measure it before any of them does.
        free_bytes = self.platform.free_memory_bytes() // self.config.parallel.world_size
        return MemoryReport(
            free_bytes=free_bytes,
            block_bytes=layout.block_bytes,
            windows=tuple(group.window for group in layout.groups),
            num_blocks=count_blocks(
                self.config, layout.block_bytes, free_bytes, len(layout.groups)
            ),
        )

    def allocate(self, num_blocks: int) -> None:
        """Allocate a KV cache of so many blocks, the null block included."""
        layers, layout = self.runner.attention_layers, self.runner.cache_layout
        log_cache(self.config, num_blocks, layout)
        bind_kv_caches(layers, self.platform, num_blocks, layout, cache_dtype(self.config))
        can_sleep = self.config.model.enable_sleep_mode
        folder = self.config.model.path or ""
        self._set_memory(
            HostWeights(self.model, folder, self._build_model, can_sleep=can_sleep),
            HostCache(layers),
        )

    def execute_model(self, step: SchedulerOutput) -> StepHandle:
        """Start a step; at most one other is in flight."""
        with self.profile.step(step):
            return self.runner.execute(step)
