"""The worker of the CPU."""

import torch

from vllm.config import VllmConfig
from vllm.distributed import TPGroup
from vllm.messages import RunnerStats, SchedulerOutput
from vllm.model_executor.layers.cpu_linear_method import pack_weights
from vllm.model_executor.loader import load_model
from vllm.model_executor.models.interface import CausalLM, PoolingModel
from vllm.ops import set_ops
from vllm.ops.cpu import CPUOps
from vllm.platforms import resolve_platform
from vllm.utils.imports import load_class
from vllm.worker.kv_cache import bind_kv_caches, bytes_per_block, count_blocks
from vllm.worker.model_runner import ModelRunner, StepHandle
from vllm.worker.pooling_runner import PoolingRunner


class CPUWorker:
    """Runs the model in this process, on torch's threads.

    Args:
        config: of the engine.
    """

    def __init__(self, config: VllmConfig) -> None:
        self.config = config
        self.device = torch.device("cpu")
        self.platform = resolve_platform("cpu")
        self._ops = load_class(self.platform.ops_class)()
        set_ops(self._ops)

    def load_model(self) -> None:
        """Build the model and read its weights."""
        model = load_model(self.config, TPGroup(), self.device)
        # torch reads bfloat16 weights at half the speed of the memory. Its float32 is as fast as
        # the kernels on small layers, which is where that type is used.
        if isinstance(self._ops, CPUOps) and self.config.model.dtype_name == "bfloat16":
            pack_weights(model)
        self.runner = self._make_runner(model)

    def _make_runner(self, model: CausalLM | PoolingModel) -> ModelRunner | PoolingRunner:
        if isinstance(model, PoolingModel):
            return PoolingRunner(self.config, model, self.device)
        return ModelRunner(self.config, model, self.device)

    def initialize_cache(self) -> int:
        """Size and allocate the KV cache; the number of blocks, the null block included."""
        layers = self.runner.attention_layers
        dtype = getattr(torch, self.config.model.dtype_name)
        block_size = self.config.cache.block_size
        num_blocks = count_blocks(
            self.config,
            bytes_per_block(layers, block_size, dtype),
            self.platform.free_memory_bytes(),
        )
        bind_kv_caches(layers, self.platform, num_blocks, block_size, dtype)
        return num_blocks

    def execute_model(self, step: SchedulerOutput) -> StepHandle:
        """Start a step; at most one is in flight."""
        return self.runner.execute(step)

    def preload(self) -> None:
        """Load in the background what only some requests need."""
        self.runner.preload()

    def stats(self) -> RunnerStats:
        """What the runner has done."""
        return self.runner.stats()
