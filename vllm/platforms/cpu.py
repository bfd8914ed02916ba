"""Implement the CPU platform: the default device, with ragged batches and the kernels of
`csrc/`.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

import numpy as np
import psutil

from vllm import envs
from vllm.config.cache import CacheDType
from vllm.platforms.cgroup import ControlGroups
from vllm.platforms.interface import Platform
from vllm.utils.process.process_memory import allocate_pages

if TYPE_CHECKING:
    import torch


class CPUPlatform(Platform):
    """The processor and memory of the machine."""

    name = "cpu"
    device_type = "cpu"
    default_block_size = 16
    default_max_num_seqs = 256
    default_max_num_batched_tokens = 2048
    default_max_step_ms = 300
    worker_class = "vllm.worker.cpu.worker:CPUWorker"
    is_asynchronous = False
    needs_static_shapes = False
    kv_cache_dtypes = get_args(CacheDType)
    has_own_memory = False
    can_copy_process = True

    @property
    def ops_class(self) -> str:
        """Class of the compiled kernels, or of plain torch operators if the kernels are switched
        off.
        """
        return (
            "vllm.ops.cpu.operators:CPUOps"
            if envs.get().VLLM_CPU_KERNELS
            else "vllm.ops.native.operators:NativeOps"
        )

    @property
    def quantizations(self) -> tuple[str, ...]:
        """Quantizations that the compiled kernels support."""
        of_kernels = ("int8", "int4", "fp8", "bitsandbytes", "inc")
        return of_kernels if envs.get().VLLM_CPU_KERNELS else ("inc",)

    @property
    def head_quantizations(self) -> tuple[str, ...]:
        return ("int8",) if envs.get().VLLM_CPU_KERNELS else ()

    @property
    def can_run_draft_models(self) -> bool:
        return True

    @property
    def can_run_speculators(self) -> bool:
        return True

    def free_memory_bytes(self) -> int:
        """Return the memory that is available on the machine, or in the container if that is
        less.
        """
        available = int(psutil.virtual_memory().available)
        left = ControlGroups().free_memory_bytes()
        return available if left is None else min(available, left)

    def allocate_cache(self, shape: tuple[int, ...], dtype: "torch.dtype") -> "torch.Tensor":
        """Allocate zeroed memory. The system commits each page when it is first written."""
        import torch

        # torch.zeros would write every page at once; with numpy the system zeroes pages at their
        # first use.
        raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)
        return torch.from_numpy(raw).view(dtype).view(shape)


_MIN_PAGES_BYTES = 64 << 10
"""Smaller weights share pages."""


def allocate_weight(shape: Sequence[int], dtype: "torch.dtype") -> "torch.Tensor":
    """Allocate memory for a weight that the kernels read from memory, with undefined content.

    It begins at a page. Matrix tiles and the prefetching of the processor read whole pages 1.1
    times as fast as memory that begins elsewhere (Xeon with AMX, 2026-11-28).
    """
    import torch

    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _MIN_PAGES_BYTES:
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer(allocate_pages(num_bytes), dtype=dtype).view(*shape)


def machine_memory_bytes() -> int:
    """Return the total memory of the machine, swap included, or of the container if that is
    less.
    """
    total = int(psutil.virtual_memory().total) + int(psutil.swap_memory().total)
    limit = ControlGroups().memory_limit_bytes()
    return total if limit is None else min(total, limit)
