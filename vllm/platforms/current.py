"""The interface of `current_platform` for programs. The engine itself uses a `Platform`."""

import platform
import random

import numpy as np

from vllm.platforms.hpu import HPUPlatform
from vllm.platforms.interface import Platform


class CurrentPlatform:
    """The device that an engine takes where its arguments name none.

    Attributes:
        device_type: of `torch.device`: "cpu" or "hpu".
        device_name: as in `--device`.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.device_type = platform.device_type
        self.device_name = platform.name

    def is_cpu(self) -> bool:
        """Whether the device is the machine's own processor."""
        return self.device_type == "cpu"

    def is_hpu(self) -> bool:
        """Whether the device is a Gaudi card, real or simulated."""
        return self.device_type == "hpu"

    def is_cuda(self) -> bool:
        """Return False: this version has no platform for CUDA."""
        return False

    is_cuda_alike = is_rocm = is_xpu = is_tpu = is_neuron = is_cuda

    def get_device_name(self, device_id: int = 0) -> str:
        """Return the name of the device, such as GAUDI2; the processor's architecture on a CPU."""
        if isinstance(self._platform, HPUPlatform):
            return self._platform.bridge.device_name
        return platform.processor() or platform.machine()

    def seed_everything(self, seed: int | None = None) -> None:
        """Seed the generators of Python, numpy, torch and the device; None seeds nothing.

        Requests have generators of their own; their seed is `SamplingParams.seed`.
        """
        if seed is None:
            return
        import torch

        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        if isinstance(self._platform, HPUPlatform):
            self._platform.bridge.manual_seed(seed)

    def __repr__(self) -> str:
        return f"CurrentPlatform({self.device_name!r})"
