"""A simulated Gaudi behind the bridge's protocol. What runs here has not run on a card."""

import math
import mmap
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from vllm.platforms.habana.bridge import DeviceCounters, FusedKernels, MemoryInfo
from vllm.platforms.habana.sim_card import SimulatedCard
from vllm.platforms.habana.sim_device import HpuTensor, install
from vllm.platforms.habana.sim_graphs import wrap_in_hpu_graph
from vllm.platforms.habana.sim_kernels import SimulatedKernels, register
from vllm.platforms.habana.sim_spec import CARDS

_MAP_NORESERVE = 0x4000  # of Linux; Python has the name from 3.13 on


class SimBridge:
    """One simulated card. Making another one replaces the first, as the process has one device."""

    collectives_backend = "gloo"

    def __init__(self, model: str, *, is_lazy: bool = False, is_strict: bool = False) -> None:
        """
        Args:
            model: a key of `sim_spec.CARDS`.
            is_strict: what stalls a card raises inside a warmed section.

        Raises:
            ConfigError: this torch cannot register a device from Python.
        """
        self.card = SimulatedCard(CARDS[model], is_lazy=is_lazy, is_strict=is_strict)
        install(self.card)
        register()
        self._kernels = SimulatedKernels()

    @property
    def device(self) -> torch.device:
        return torch.device("hpu", 0)

    @property
    def device_name(self) -> str:
        return self.card.spec.name

    @property
    def is_lazy(self) -> bool:
        return self.card.is_lazy

    @property
    def kernels(self) -> FusedKernels:
        return self._kernels

    def memory_info(self) -> MemoryInfo:
        self.synchronize()
        pool = self.card.memory
        return MemoryInfo(pool.limit_bytes - pool.in_use_bytes, pool.limit_bytes)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        try:
            self.card.memory.check(self.card.memory.device_bytes(num_bytes, dtype))
        except RuntimeError as error:
            raise MemoryError(str(error)) from None
        # Pages appear as they are written: the host need not have as much memory as a card.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        pages = mmap.mmap(-1, max(1, num_bytes), flags=flags)
        raw = torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes].view(dtype).view(shape)
        return HpuTensor(raw)

    def synchronize(self) -> None:
        self.card.synchronize()

    def mark_step(self) -> None:
        self.card.mark_step()

    def wrap_in_hpu_graph(self, module: nn.Module) -> nn.Module:
        if not self.is_lazy:
            raise RuntimeError("HPU graphs need lazy mode (PT_HPU_LAZY_MODE=1)")
        return wrap_in_hpu_graph(module, self.card)

    def counters(self) -> DeviceCounters:
        return self.card.counters()

    def warmed_section(self) -> AbstractContextManager[None]:
        return self.card.warmed_section()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)  # the CPU generator serves the simulated device
