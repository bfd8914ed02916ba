"""Collectives through shared memory, for the ranks of one machine."""

import ctypes
import mmap

import torch
from torch import Tensor

from vllm.errors import CollectiveError
from vllm.ops.cpu.library import CPUKernels


class SharedMemoryCollectives:
    """Exchanges tensors through the arena of a group; see csrc/cpu/collectives.h.

    Args:
        kernels: of the CPU.
        arena_fd: memory of header_bytes + 2 * size * buffer_bytes, zeros at first.
        rank, size: of this process in the group.
        header_bytes, buffer_bytes: of the arena.
        timeout_s: longest wait for another rank.
    """

    def __init__(
        self,
        kernels: CPUKernels,
        arena_fd: int,
        rank: int,
        size: int,
        *,
        header_bytes: int,
        buffer_bytes: int,
        timeout_s: float,
    ) -> None:
        plain = kernels.plain
        if size > plain.kMaxRanks:
            raise ValueError(f"{size} ranks; shared memory has room for {plain.kMaxRanks}")
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._memory = mmap.mmap(arena_fd, header_bytes + 2 * size * buffer_bytes)
        self._arena = plain.Arena(
            memory=ctypes.addressof(ctypes.c_char.from_buffer(self._memory)),
            rank=rank,
            num_ranks=size,
            header_bytes=header_bytes,
            buffer_bytes=buffer_bytes,
            timeout_us=int(timeout_s * 1e6),
        )
        self._address = ctypes.byref(self._arena)
        self._sums = {dtype: of.all_reduce for dtype, of in kernels.of.items()}
        self._all_gather = plain.all_gather
        self._exchanged, self._aborted = plain.kExchanged, plain.kAborted
        self._missing = plain.kMissing

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, added in float; in place where the kernels have the dtype."""
        run = self._sums.get(x.dtype)
        if run is None or not x.is_contiguous():
            dtype = x.dtype if run is not None else torch.float32
            return self.all_reduce(x.to(dtype).contiguous()).to(x.dtype)
        status = run(self._address, x.data_ptr(), x.numel(), torch.get_num_threads())
        if status != self._exchanged:
            raise self._failure("all_reduce", status)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[..., n] of each rank -> [..., n * size], in rank order."""
        x = x.contiguous()
        row_bytes = x.shape[-1] * x.element_size()
        out = x.new_empty((*x.shape[:-1], x.shape[-1] * self._size))
        rows = x.numel() // max(1, x.shape[-1])
        status = self._all_gather(self._address, x.data_ptr(), out.data_ptr(), rows, row_bytes)
        if status != self._exchanged:
            raise self._failure("all_gather", status)
        return out

    def _failure(self, operation: str, status: int) -> CollectiveError:
        if status == self._aborted:
            return CollectiveError(operation, self._rank, "another rank has failed")
        return CollectiveError(
            operation,
            self._rank,
            f"rank {status - self._missing} has not come within {self._timeout_s} s",
        )
