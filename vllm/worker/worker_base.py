"""What workers of all devices can do besides loading a model and running steps.

Callers reach these methods by name; see `vllm.executor.Executor.collective_rpc`.
"""

from abc import abstractmethod

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.messages import RunnerStats
from vllm.worker.model_runner import ModelRunner
from vllm.worker.pooling_runner import PoolingRunner
from vllm.worker.torch_profile import TorchProfile


class WorkerBase:
    """A worker: one device, its model and its KV cache.

    Args:
        config: of the engine.
        device: that it computes on.

    Attributes:
        runner: runs the steps; there once the model is loaded.
        profile: traces of what it computes.
        rank, local_rank: of this worker among those that share the model, and on this machine.
    """

    runner: ModelRunner | PoolingRunner
    rank = 0
    local_rank = 0

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.profile = TorchProfile(config.observability.torch_profiler_dir, f"rank{self.rank}")

    @abstractmethod
    def load_model(self) -> None:
        """Build the model and read its weights."""

    @abstractmethod
    def initialize_cache(self) -> int:
        """Size and allocate the KV cache; the number of blocks, the null block included."""

    # ---- the model ------------------------------------------------------------------------

    @property
    def model_runner(self) -> ModelRunner | PoolingRunner:
        """What runs the steps, under the name that extensions of workers know."""
        return self.runner

    def get_model(self) -> nn.Module:
        """The model."""
        return self.runner.model

    # ---- profiling ------------------------------------------------------------------------

    def start_profile(self) -> None:
        """Begin a trace; see `TorchProfile.start`."""
        self.profile.start()

    def stop_profile(self) -> str:
        """End the trace; the path of its file."""
        return self.profile.stop()

    # ---- for the engine -------------------------------------------------------------------

    def preload(self) -> None:
        """Load in the background what only some requests need."""
        self.runner.preload()

    def stats(self) -> RunnerStats:
        """What the runner has done."""
        return self.runner.stats()
