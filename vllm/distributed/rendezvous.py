"""Connect the ranks of one engine, so that they can exchange tensors.

The collective libraries exchange addresses through a store, which rank 0 serves at a port. Ranks
that are processes of one machine also share memory. It has no name in any folder, so nothing is
left of it after the processes have exited, however that happened.
"""

import contextlib
import mmap
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from vllm.config import ParallelConfig
from vllm.distributed.layout import RankLayout, ranks_text
from vllm.distributed.pipeline import CardLink, GlooLink
from vllm.distributed.store import has_no_answer, open_store
from vllm.env.interfaces import check_interfaces
from vllm.errors import CollectiveError, ConfigError
from vllm.utils.process.memory_file import memory_file

ARENA_HEADER_BYTES = 4096
"""Bytes of the header of the shared memory; see csrc/cpu/collectives.h. The first byte says that a
rank has failed."""
ARENA_BUFFER_BYTES = 2**20
"""Bytes that a rank can exchange at a time."""


@dataclass(kw_only=True)
class Rendezvous:
    """The addresses and memory that a rank needs to find the others."""

    rank: int
    layout: RankLayout
    timeout_s: float
    """Longest wait for another rank in one exchange."""
    address: tuple[str, int]
    """Host and port of the store."""
    is_host: bool = False
    """This rank serves the store."""
    listener: socket.socket | None = None
    """Socket of the host, which listens at the address already; None: the store opens the address
    itself."""
    name: str = ""
    """Name of the engine, where several may use the address one after the other."""
    arena_fd: int | None = None
    """Memory through which ranks on the CPU exchange tensors: for each stage a header, and two
    buffers for each of its ranks. None: they were not started by one process."""
    has_whole_stage: bool = False
    """Whether all ranks of the stage are on this machine, if they have no shared memory."""
    has_joined: bool = False
    """Whether `join` has made the default process group of torch.distributed."""
    _link: CardLink | GlooLink | None = None
    _store: "torch.distributed.Store | None" = None

    @classmethod
    def create(cls, parallel: ParallelConfig) -> "Rendezvous":
        """Create the rendezvous of a new engine on one machine, for rank 0.

        Raises:
            ConfigError: the system has no anonymous shared memory.
        """
        arena_fd = memory_file("arena")
        listener = open_listener("127.0.0.1")
        rendezvous = cls.of(parallel, 0, arena_fd, listener.getsockname()[1])
        rendezvous.is_host, rendezvous.listener = True, listener
        os.ftruncate(arena_fd, rendezvous.layout.pipeline_size * rendezvous.arena_bytes)
        return rendezvous

    @classmethod
    def of(cls, parallel: ParallelConfig, rank: int, arena_fd: int, port: int) -> "Rendezvous":
        """Create the rendezvous of a rank that has inherited the memory, and was told the port."""
        return cls(
            rank=rank,
            layout=RankLayout.of(parallel),
            timeout_s=parallel.distributed_timeout_s,
            address=("127.0.0.1", port),
            arena_fd=arena_fd,
        )

    @classmethod
    def at(
        cls,
        parallel: ParallelConfig,
        rank: int,
        address: tuple[str, int],
        *,
        is_host: bool,
        listener: socket.socket | None = None,
        name: str = "",
        has_whole_stage: bool = False,
    ) -> "Rendezvous":
        """Create a rendezvous for ranks that were started separately or run on several machines.

        Args:
            parallel: config of the engine.
            rank: rank of this process.
            address: address at which the ranks connect.
            is_host: whether this rank serves the store there.
            listener: socket of the host, if it listens at the address already.
            name: name of the engine, if others use the same address.
            has_whole_stage: all ranks of the stage of this rank are on this machine; the same on
                all ranks.
        """
        return cls(
            rank=rank,
            layout=RankLayout.of(parallel),
            timeout_s=parallel.distributed_timeout_s,
            address=address,
            is_host=is_host,
            listener=listener,
            name=name,
            has_whole_stage=has_whole_stage,
        )

    @property
    def arena_bytes(self) -> int:
        """Size of the part of the shared memory (arena) that the ranks of one stage share."""
        return ARENA_HEADER_BYTES + 2 * self.layout.tensor_size * ARENA_BUFFER_BYTES

    @property
    def stage_ranks(self) -> list[int]:
        """The ranks that share layers with this rank, itself included."""
        return self.layout.tensor_groups[self.layout.pipeline_rank(self.rank)]

    @property
    def arena_offset(self) -> int:
        """Offset in the shared memory of the part for this rank's stage."""
        return self.layout.pipeline_rank(self.rank) * self.arena_bytes

    def stage_memory(self) -> tuple[int, int] | None:
        """Return the memory that the ranks of one stage share. Call this on all ranks.

        The memory is inherited if one process has started the ranks; otherwise they open it through
        `/proc`.

        Returns:
            Its file descriptor, and the offset of the stage's part in it; None: the ranks are on
            several machines, or cannot see each other's processes.
        """
        if self.arena_fd is not None:
            return self.arena_fd, self.arena_offset
        if not self.has_whole_stage:
            return None
        store: Any = self.store  # its type stubs only allow strings
        first = self.rank - self.layout.tensor_rank(self.rank)
        found = -1
        if self.rank == first:
            found = memory_file("arena")
            os.ftruncate(found, self.arena_bytes)
            store.set(f"arena/{first}", f"/proc/{os.getpid()}/fd/{found}")
        else:
            with contextlib.suppress(OSError):
                found = os.open(store.get(f"arena/{first}"), os.O_RDWR)
        all_have_it = self.minimum("shared memory", int(found >= 0))
        if all_have_it:
            self.arena_fd = found
            return found, 0
        if found >= 0:
            os.close(found)
        return None

    def abort(self) -> None:
        """Abort the exchanges of all ranks through the shared memory, if there is one, because a
        rank has failed.
        """
        if self.arena_fd is None:
            return
        for stage in range(self.layout.pipeline_size):
            offset = stage * self.arena_bytes
            with mmap.mmap(self.arena_fd, ARENA_HEADER_BYTES, offset=offset) as header:
                header[0] = 1

    @property
    def store(self) -> "torch.distributed.Store":
        """Store through which the collective libraries exchange addresses."""
        if self._store is None:
            self._store = self._open_store()
        return self._store

    def _open_store(self) -> "torch.distributed.Store":
        # Not a FileStore on a file descriptor: its destructor opens the path again, possibly long
        # after the engine has ended, when the descriptor number belongs to another file.
        listener, self.listener = self.listener, None
        try:
            store = open_store(
                self.address, is_host=self.is_host, listener=listener, timeout_s=self.timeout_s
            )
        except torch.distributed.DistError as error:
            what = "connection with the other ranks"
            raise CollectiveError(what, self.rank, self.reason_of(error)) from None
        return torch.distributed.PrefixStore(self.name, store) if self.name else store

    def reason_of(self, error: "torch.distributed.DistError") -> str:
        """Describe an error of the store."""
        if not has_no_answer(error):
            return str(error)
        host, port = self.address
        return (
            f"the process that listens at {host}:{port} has not answered within {self.timeout_s} s"
        )

    def minimum(self, name: str, value: int) -> int:
        """Return the minimum of the values of all ranks. Waits for all ranks to call it.

        Args:
            name: name of the value, used once in an engine.
            value: value of this rank.

        Raises:
            CollectiveError: a rank has not called it in time.
        """
        return min(map(int, self.exchange(name, str(value).encode())))

    def exchange(
        self,
        name: str,
        value: bytes,
        what: str | None = None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> list[bytes]:
        """Return the values of several ranks. Waits for these ranks to call it.

        Args:
            name: name of the value, used once in an engine.
            value: value of this rank.
            what: description of the value, for messages; None: its name.
            ranks: ranks that call it, this one included; None: all.

        Raises:
            CollectiveError: some ranks have not called it in time; names all of them.
        """
        store: Any = self.store  # its type stubs only allow strings
        ranks = range(self.layout.world_size) if ranks is None else ranks
        try:
            self.arrive(name, value)
            return [store.get(f"{name}/{rank}") for rank in ranks]
        except torch.distributed.DistError as error:
            reason = None if has_no_answer(error) else self._missing(name, ranks)
            reason = reason or self.reason_of(error)
            raise CollectiveError(f"exchange of {what or name}", self.rank, reason) from None

    def _missing(self, name: str, ranks: Sequence[int]) -> str | None:
        """Describe which ranks have not called yet; None if all have by now, or the store has
        ended.
        """
        store: Any = self.store
        try:
            missing = [rank for rank in ranks if not store.check([f"{name}/{rank}"])]
        except torch.distributed.DistError:
            return None
        return (
            (f"{ranks_text(missing)} did not arrive within {self.timeout_s} s") if missing else None
        )

    def is_stage_here(self, name: str, patience_s: float) -> bool:
        """Return whether all ranks that share layers with this one have called `arrive` with this
        name.

        Args:
            name: name of a point in the program.
            patience_s: seconds to wait for them.
        """
        keys = [f"{name}/{rank}" for rank in self.stage_ranks]
        try:
            self.store.wait(keys, timedelta(seconds=patience_s))
        except torch.distributed.DistError:
            return False
        return True

    def arrive(self, name: str, value: bytes = b"") -> None:
        """Report that this rank has reached a point in the program, without waiting for others.

        Args:
            name: name of the point, used once in an engine.
            value: value of this rank.
        """
        store: Any = self.store  # its type stubs only allow strings
        store.set(f"{name}/{self.rank}", value)

    def close(self) -> None:
        """Leave the groups, and close the memory. A second call does nothing."""
        self.leave()
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        if self.arena_fd is not None:
            os.close(self.arena_fd)
            self.arena_fd = None

    def leave(self) -> None:
        """Close the groups that `join` and `open_link` have opened."""
        if self._link is not None:
            self._link.close()
            self._link = None
        if self.has_joined and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self.has_joined = False
        self._store = None

    def join(self, backend: str) -> None:
        """Open the default process group of torch.distributed over all ranks. Returns when all
        ranks have joined.

        Args:
            backend: such as gloo.

        Raises:
            ConfigError: this process already belongs to such a group, or a variable names a
                network interface that this machine lacks.
            CollectiveError: a rank has not joined in time.
        """
        distributed = torch.distributed
        if distributed.is_initialized():
            raise ConfigError(
                "torch.distributed is initialised in this process already, so the engine cannot "
                "join its workers. Shut the other engine down, or call "
                "vllm.distributed.cleanup_dist_env_and_memory(), first"
            )
        check_interfaces(backend)
        self.minimum(
            "addresses for tensors", 0
        )  # reports ranks that do not arrive by name; init_process_group does not
        distributed.init_process_group(
            backend,
            store=distributed.PrefixStore("world", self.store),
            rank=self.rank,
            world_size=self.layout.world_size,
            timeout=timedelta(seconds=self.timeout_s),
        )
        self.has_joined = True

    def open_link(
        self, card: "torch.device | None" = None, before: Callable[[], None] | None = None
    ) -> CardLink | GlooLink:
        """Connect the stages of the pipeline. Returns when all ranks have joined.

        Args:
            card: device of this rank; hidden states are sent from card to card, through the default
                group, which must be open. None: through gloo, in a separate group.
            before: called before each exchange of two cards; None: no call.

        Raises:
            CollectiveError: a rank has not joined in time.
        """
        around = self.layout.stages_around(self.rank)
        if card is not None:
            self._link = link = CardLink(self.rank, *around, before=before)
            link.connect(card)
            return link
        self.minimum("addresses of stages", 0)
        distributed = torch.distributed
        group: Any = distributed.ProcessGroupGloo(
            distributed.PrefixStore("stages", self.store),
            self.rank,
            self.layout.world_size,
            timedelta(seconds=self.timeout_s),
        )
        self._link = GlooLink(group, self.rank, *around)
        return self._link

    def open_groups(self, members: list[list[int]]) -> "torch.distributed.ProcessGroup | None":
        """Open process groups, on every rank in the same order, and return the group of this rank.

        Args:
            members: ranks of each group. For a group of all ranks None is returned, which means
                for the default group.
        """
        if members == [list(range(self.layout.world_size))]:
            return None
        found = None
        for ranks in members:
            group = torch.distributed.new_group(ranks)
            if self.rank in ranks:
                found = group
        return found


def open_listener(host: str) -> socket.socket:
    """Open a socket that listens at a free port, for the host of a rendezvous.

    The port is reserved until the rendezvous has ended.

    Args:
        host: address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=1024)
