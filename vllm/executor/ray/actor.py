"""Run one rank as an actor in a Ray cluster. Only the bytes of messages are unpickled."""

import socket
import threading
import traceback

import torch

from vllm import envs
from vllm.distributed import Rendezvous, open_listener
from vllm.executor.ranks.rank_server import RankServer, failure_of, is_result_rank
from vllm.executor.ranks.rank_wire import FromRank, StartRank, decode_to_rank
from vllm.message_codec import encode
from vllm.platforms.cpu_threads import usable_cores
from vllm.version import __version__


class RankActor:
    """Handles the messages of the engine, in the order in which they arrive.

    Args:
        counts_threads: Ray has set OMP_NUM_THREADS of this process, to the number of CPUs that it
            reserves for the actor.
    """

    def __init__(self, *, counts_threads: bool = False) -> None:
        self._counts_threads = counts_threads
        self._server: RankServer | None = None
        self._answers: list[FromRank] = []
        self._listener: socket.socket | None = None

    def watch(self) -> None:
        """Block until this actor exits. The caller notices the exit as an error of this call."""
        threading.Event().wait()

    def ping(self) -> None:
        """Return at once, to show that this actor can answer."""

    def version(self) -> str:
        """Return the version of this package on the machine of the actor."""
        return __version__

    def open_address(self) -> tuple[str, int]:
        """Listen at an address of this machine where the ranks connect: VLLM_HOST_IP, or the
        address by which Ray knows the machine.
        """
        import ray.util

        host = envs.get().VLLM_HOST_IP or ray.util.get_node_ip_address()
        self._listener = open_listener(host)
        return host, self._listener.getsockname()[1]

    def start(self, data: bytes, address: tuple[str, int]) -> list[bytes]:
        """Create the worker.

        Args:
            data: an encoded `StartRank`.
            address: address of rank 0, where the ranks connect.
        """
        start = decode_to_rank(data)
        assert isinstance(start, StartRank)
        if self._counts_threads:
            # As many threads as in a process outside Ray, which limits them to 1; the worker may
            # use fewer.
            torch.set_num_threads(len(usable_cores()))

        def meet() -> Rendezvous:
            return Rendezvous.at(
                start.config.parallel,
                start.rank,
                address,
                is_host=self._listener is not None,
                listener=self._listener,
                has_whole_stage=start.assignment is not None and start.assignment.has_whole_stage,
            )

        try:
            self._server = RankServer(
                start,
                self._answers.append,
                meet,
                # Rank 0 reports the media items that failed.
                sends_results=start.rank == 0 or is_result_rank(start),
            )
        except Exception as error:  # the engine must be told about any error
            return self._fail(error)
        return []

    def handle(self, data: bytes) -> list[bytes]:
        """Execute a message and return the answers. After a failure the engine ends this actor."""
        assert self._server is not None, "the first message is StartRank"
        try:
            self._server.handle(decode_to_rank(data))
            self._server.finish_step()
        except Exception as error:  # the engine must be told about any error
            return self._fail(error)
        answers = [encode(answer) for answer in self._answers]
        self._answers.clear()
        return answers

    def _fail(self, error: Exception) -> list[bytes]:
        failure = failure_of(error)
        if not failure.is_config_error:
            traceback.print_exc()
        return [encode(failure)]
