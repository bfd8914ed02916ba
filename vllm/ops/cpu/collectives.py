"""Collectives through shared memory, for the ranks of one machine."""

import ctypes
import mmap
from typing import Any, cast

import torch
from torch import Tensor

from vllm.errors import CollectiveError
from vllm.ops.cpu.library import CPUKernels
from vllm.ops.cpu.symbols import Rows


class SharedMemoryCollectives:
    """Exchanges tensors through the arena of a group; see csrc/cpu/collectives.h.

    While a model is recorded, an exchange becomes an operation of its program.

    Args:
        kernels: kernels of the CPU.
        arena_fd: memory, zeros at first.
        arena_offset: offset in the memory of the group's header_bytes + 2 * size * buffer_bytes
            bytes; a multiple of the page size.
        rank, size: of this process in the group.
        header_bytes, buffer_bytes: of the arena.
        timeout_s: longest wait for another rank.
        first_rank: rank in the engine of the group's first rank, for messages.
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
        arena_offset: int = 0,
        first_rank: int = 0,
    ) -> None:
        plain = kernels.plain
        if size > plain.kMaxRanks:
            raise ValueError(
                f"shared memory has room for at most {plain.kMaxRanks} ranks, got {size}"
            )
        self.size = size
        self._first_rank, self._rank, self._timeout_s = first_rank, first_rank + rank, timeout_s
        num_bytes = header_bytes + 2 * size * buffer_bytes
        self._memory = mmap.mmap(arena_fd, num_bytes, offset=arena_offset)
        self._arena = plain.Arena(
            memory=ctypes.addressof(ctypes.c_char.from_buffer(self._memory)),
            rank=rank,
            num_ranks=size,
            header_bytes=header_bytes,
            buffer_bytes=buffer_bytes,
            timeout_us=int(timeout_s * 1e6),
        )
        self.address = ctypes.addressof(self._arena)
        """Address of the Arena that kernels take, valid while this object lives."""
        self._sums = {dtype: of.all_reduce for dtype, of in kernels.of.items()}
        self._all_gather = plain.all_gather
        self._exchanged, self._aborted = plain.kExchanged, plain.kAborted
        self._missing = plain.kMissing

    def all_reduce(self, x: Any) -> Tensor:
        """Sum a tensor over the ranks, in float; in place if the kernels support its dtype."""
        if isinstance(x, Rows):
            return cast(Tensor, x.recorder.all_reduce(x, self))
        run = self._sums.get(x.dtype)
        if run is None or not x.is_contiguous():
            dtype = x.dtype if run is not None else torch.float32
            return self.all_reduce(x.to(dtype).contiguous()).to(x.dtype)
        status = run(self.address, x.data_ptr(), x.numel(), torch.get_num_threads())
        if status != self._exchanged:
            raise self.failure("all_reduce", status)
        return cast(Tensor, x)

    def all_gather(self, x: Any) -> Tensor:
        """Concatenate [..., n] of all ranks to [..., n * size], in rank order."""
        if isinstance(x, Rows):
            return cast(Tensor, x.recorder.all_gather(x, self))
        x = x.contiguous()
        row_bytes = x.shape[-1] * x.element_size()
        out = x.new_empty((*x.shape[:-1], x.shape[-1] * self.size))
        rows = x.numel() // max(1, x.shape[-1])
        status = self._all_gather(self.address, x.data_ptr(), out.data_ptr(), rows, row_bytes)
        if status != self._exchanged:
            raise self.failure("all_gather", status)
        return cast(Tensor, out)

    def failure(self, operation: str, status: int) -> CollectiveError:
        """Create the error for the status that an operation of csrc/cpu/collectives.h has
        returned.
        """
        if status == self._aborted:
            return CollectiveError(operation, self._rank, "another rank has failed")
        missing = self._first_rank + status - self._missing
        text = f"rank {missing} has not arrived within {self._timeout_s} s"
        return CollectiveError(operation, self._rank, text)
