"""Where the ranks of one engine meet: from here on they can exchange tensors.

The ranks are processes of one machine. They share two pieces of memory that have no name in any
folder, so nothing is left of them when the processes have ended, however that happened.
"""

import mmap
import os
from dataclasses import dataclass
from datetime import timedelta

import torch

from vllm.config import ParallelConfig
from vllm.distributed.layout import RankLayout
from vllm.errors import ConfigError

ARENA_HEADER_BYTES = 4096
"""Of the shared memory; see csrc/cpu/collectives.h. The first byte says that a rank has failed."""
ARENA_BUFFER_BYTES = 2**20
"""What a rank can exchange at a time."""


@dataclass(kw_only=True)
class Meeting:
    """What a rank needs to find the others."""

    rank: int
    layout: RankLayout
    timeout_s: float
    """Longest wait for another rank in one exchange."""
    store_fd: int
    """Memory through which the libraries of collectives exchange addresses."""
    arena_fd: int
    """Memory through which ranks on the CPU exchange tensors: a header, and two buffers for each
    rank."""
    has_joined: bool = False
    """The default process group of torch.distributed is that of `join`."""

    @classmethod
    def create(cls, parallel: ParallelConfig) -> "Meeting":
        """The meeting of a new engine, for rank 0.

        Raises:
            ConfigError: the system has no memory without a name.
        """
        num_bytes = ARENA_HEADER_BYTES + 2 * parallel.world_size * ARENA_BUFFER_BYTES
        return cls.of(parallel, 0, _shared_memory("store"), _shared_memory("arena", num_bytes))

    @classmethod
    def of(cls, parallel: ParallelConfig, rank: int, store_fd: int, arena_fd: int) -> "Meeting":
        """The same for a rank that has inherited the memory."""
        layout = RankLayout(
            tensor_size=parallel.tensor_parallel_size, pipeline_size=parallel.pipeline_parallel_size
        )
        timeout_s = parallel.distributed_timeout_s
        return cls(
            rank=rank, layout=layout, timeout_s=timeout_s, store_fd=store_fd, arena_fd=arena_fd
        )

    @property
    def descriptors(self) -> tuple[int, int]:
        """What other processes inherit."""
        return self.store_fd, self.arena_fd

    def abort(self) -> None:
        """End the exchanges of all ranks that go through the arena, as one of them has failed."""
        with mmap.mmap(self.arena_fd, ARENA_HEADER_BYTES) as header:
            header[0] = 1

    def close(self) -> None:
        """Leave: close the memory, and the process groups that `join` has opened."""
        os.close(self.store_fd)
        os.close(self.arena_fd)
        if self.has_joined and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self.has_joined = False

    def join(self, backend: str) -> None:
        """Open the default process group of torch.distributed over all ranks; returns when all have
        come.

        Args:
            backend: such as gloo.

        Raises:
            ConfigError: this process is in such a group already.
            RuntimeError: a rank has not come in time.
        """
        distributed = torch.distributed
        if distributed.is_initialized():
            raise ConfigError(
                "torch.distributed is initialised in this process already, so the engine cannot "
                "join its workers. Shut the other engine down, or call "
                "vllm.distributed.cleanup_dist_env_and_memory(), first"
            )
        store = distributed.FileStore(f"/proc/self/fd/{self.store_fd}", self.layout.world_size)
        distributed.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=self.layout.world_size,
            timeout=timedelta(seconds=self.timeout_s),
        )
        self.has_joined = True

    def open_groups(self, members: list[list[int]]) -> "torch.distributed.ProcessGroup | None":
        """Open process groups, on every rank in the same order, and return the one of this rank.

        Args:
            members: ranks of each group. None is returned for a group of all ranks, which is the
                default group.
        """
        if members == [list(range(self.layout.world_size))]:
            return None
        found = None
        for ranks in members:
            group = torch.distributed.new_group(ranks)
            if self.rank in ranks:
                found = group
        return found


def _shared_memory(name: str, num_bytes: int = 0) -> int:
    """A file descriptor of memory that processes can share; zeros.

    Args:
        name: for `/proc`, it is in no folder.
        num_bytes: its size.

    Raises:
        ConfigError: the system has no such memory.
    """
    if not hasattr(os, "memfd_create"):
        raise ConfigError(
            "tensor_parallel_size above 1 needs Linux (memfd_create). Leave it out here"
        )
    descriptor = os.memfd_create(name)
    os.ftruncate(descriptor, num_bytes)
    return descriptor
