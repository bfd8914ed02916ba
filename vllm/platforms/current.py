"""Provide `current_platform` for programs. The engine itself uses a `Platform`."""

import platform
import random

import numpy as np

from vllm.platforms.hpu import HPUPlatform
from vllm.platforms.interface import Platform


class CurrentPlatform:
    """The device that an engine uses if its arguments name none.

    Attributes:
        device_type: type of the `torch.device`: "cpu" or "hpu".
        device_name: name as in `--device`.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.device_type = platform.device_type
        self.device_name = platform.name

    def is_cpu(self) -> bool:
        """Return whether the device is the machine's own processor."""
        return self.device_type == "cpu"

    def is_hpu(self) -> bool:
        """Return whether the device is a Gaudi card, real or simulated."""
        return self.device_type == "hpu"

    def is_cuda(self) -> bool:
        """Return False, because this version has no platform for CUDA."""
        return False

    is_cuda_alike = is_rocm = is_xpu = is_tpu = is_neuron = is_cuda

    def get_device_name(self, device_id: int = 0) -> str:
        """Return the name of the device, such as GAUDI2; on a CPU the processor's architecture."""
        if isinstance(self._platform, HPUPlatform):
            return self._platform.bridge.device_name
        return platform.processor() or platform.machine()

    def seed_everything(self, seed: int | None = None) -> None:
        """Seed the random generators of Python, numpy, torch and the device; None: seed nothing.

        Requests have their own generators, whose seed is `SamplingParams.seed`.
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
