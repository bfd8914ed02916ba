"""Represent the process of one rank in the engine that started it."""

import os
import socket
import subprocess
import sys

from vllm import envs
from vllm.distributed import Rendezvous
from vllm.env import ranks as env_ranks
from vllm.executor.ranks import rank_process
from vllm.executor.ranks.rank_wire import RankFailed
from vllm.logger import configure_again, current_format
from vllm.utils.process.blocking_sockets import blocking_pair, set_socket_timeout
from vllm.utils.process.child_process import describe_exit, is_stopped
from vllm.utils.process.forked_process import ForkedProcess
from vllm.utils.process.frames import FrameReader

END_TIMEOUT_S = 5.0
"""Seconds to wait for the end of a process that was told to end, or killed."""
_SEND_BUFFER_BYTES = 4 * 2**20


class ChildRank:
    """The process of a rank, with a connection to it.

    The kernel kills the process when the *thread* that created this object exits.

    Args:
        rank: rank of the process.
        rendezvous: rendezvous of rank 0; the process inherits its memory.
        is_copy: fork this process (allowed if `can_fork`). False: start a new interpreter, which
            takes over a second for imports.

    Attributes:
        connection, reader: socket to the process, and the reader of its messages.
        last_words: why the rank has failed, if it could report that.
    """

    def __init__(self, rank: int, rendezvous: Rendezvous, *, is_copy: bool) -> None:
        self.rank = rank
        self.connection, theirs = blocking_pair()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        set_socket_timeout(self.connection, socket.SO_SNDTIMEO, rendezvous.timeout_s)
        self.reader = FrameReader(self.connection)
        self.last_words: RankFailed | None = None
        assert rendezvous.arena_fd is not None, "the ranks are on one machine"
        descriptors = (theirs.fileno(), rendezvous.arena_fd)
        numbers = (*descriptors, rendezvous.address[1])
        variables = {
            **env_ranks.rank_variables(rank, rendezvous.layout.world_size),
            "VLLM_LOGGING_PREFIX": f"{envs.get().VLLM_LOGGING_PREFIX}[rank {rank}] ",
        }
        self.process: ForkedProcess | subprocess.Popen[bytes]
        if is_copy:
            log_format = current_format()

            def run() -> int:
                for name, value in variables.items():
                    envs.export(name, value)
                envs.get.cache_clear()
                configure_again(log_format)
                return rank_process.main(*numbers)

            self.process = ForkedProcess(run, descriptors)
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-m", rank_process.__name__, *map(str, (*numbers, os.getpid()))],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                env=envs.child_environment(
                    {"KINETO_LOG_LEVEL": "99"},
                    {"VLLM_LOGGING_FORMAT": current_format(), **variables},
                ),
            )
        theirs.close()

    @property
    def name(self) -> str:
        """Rank and process id, for messages."""
        return f"rank {self.rank} (process {self.process.pid})"

    def end(self) -> str:
        """Wait until the process exits, and describe how it has exited."""
        try:
            code = self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "has closed its connection"
        return f"has ended: {describe_exit(code)}"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process (SIGSTOP, a debugger)."""
        return is_stopped(self.process.pid)
