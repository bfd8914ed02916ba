"""Provide the store through which ranks exchange addresses and small values: a torch `TCPStore`
whose waits are all limited.

The time-out of a `TCPStore` applies only to connections, and to keys that were not set yet. It
waits for the answer of its host without a limit, even when it gives up a key. That wait never ends
if the host is stopped or another program has its port, and takes 15 minutes, until TCP gives up, if
its machine cannot be reached any more.
"""

import contextlib
import os
import socket
import stat
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta

import torch
from torch.torch_version import TorchVersion

from vllm.utils.process.blocking_sockets import set_socket_timeouts_of

_LIBUV_TAKES_LISTENERS = TorchVersion(torch.__version__) >= "2.8"
"""Before, only the older server of torch.distributed can listen with a socket that is there."""
_EAGAIN = "Socket Timeout"
"""Message of torch when a limit of the kernel is over."""


def open_store(
    address: tuple[str, int], *, is_host: bool, listener: socket.socket | None, timeout_s: float
) -> "torch.distributed.TCPStore":
    """Open the store at an address.

    Args:
        address: host and port.
        is_host: this process serves the store.
        listener: socket of the host that already listens there; None: the store opens the address
            itself.
        timeout_s: longest wait for a connection, a key or an answer.

    Raises:
        torch.distributed.DistError: the store cannot be served, or no process serves it.
    """
    host, port = address
    before = own_sockets()
    opened: Future[torch.distributed.TCPStore] = Future()

    def open_it() -> None:
        try:
            store = torch.distributed.TCPStore(
                host,
                port,
                is_master=is_host,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,  # the rendezvous itself waits, and can name missing ranks
                master_listen_fd=None if listener is None else listener.detach(),
                use_libuv=listener is None or _LIBUV_TAKES_LISTENERS,
            )
        except BaseException as error:
            opened.set_exception(error)
        else:
            opened.set_result(store)

    # In a thread, because torch has no time limit for the first answer of the store.
    threading.Thread(target=open_it, name="store", daemon=True).start()
    try:
        store = opened.result(2 * timeout_s)  # once for connecting, once for the first answer
    except FutureTimeoutError:
        raise torch.distributed.DistNetworkError(_EAGAIN) from None
    for descriptor in own_sockets() - before:
        with contextlib.suppress(OSError):  # not the socket of this connection
            set_socket_timeouts_of(descriptor, port, socket.SO_RCVTIMEO, timeout_s)
    return store


def has_no_answer(error: "torch.distributed.DistError") -> bool:
    """Return whether a store operation failed because its host did not answer in time."""
    return _EAGAIN in str(error)


def own_sockets() -> set[int]:
    """Return the file descriptors of this process's sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                found.add(int(name))
    return found
