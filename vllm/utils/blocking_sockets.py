"""Sockets whose calls wait for as long as it takes, also in a program that has called
`socket.setdefaulttimeout`, after which the kernel would not let anybody wait who uses the socket.
"""

import os
import socket
import struct

_TIMEVAL = struct.Struct("ll")


def blocking_pair() -> tuple[socket.socket, socket.socket]:
    """Two sockets that are connected."""
    pair = socket.socketpair()
    for each in pair:
        each.settimeout(None)
    return pair


def blocking_socket(descriptor: int) -> socket.socket:
    """The socket of a file descriptor, which it owns from here on."""
    found = socket.socket(fileno=descriptor)
    found.settimeout(None)
    return found


def limit_waits(connection: socket.socket, option: int, timeout_s: float) -> None:
    """Let the kernel end a call that waits for longer, with EAGAIN. It holds for all that use the
    socket: a copy of this process, or a library.

    Args:
        connection: blocks.
        option: `SO_RCVTIMEO` or `SO_SNDTIMEO`.
        timeout_s: seconds, above 0.
    """
    seconds, part = divmod(timeout_s, 1)
    value = _TIMEVAL.pack(int(seconds), max(1, int(part * 1e6)))  # both 0: no limit
    connection.setsockopt(socket.SOL_SOCKET, option, value)


def limit_waits_of(descriptor: int, port: int, option: int, timeout_s: float) -> None:
    """The same for a socket that a library owns, if it is connected to this port.

    Raises:
        OSError: it is not connected, or has been closed.
    """
    is_blocking = os.get_blocking(descriptor)
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        os.set_blocking(descriptor, is_blocking)  # the line before may have changed it
        if connection.getpeername()[1:2] == (port,):
            limit_waits(connection, option, timeout_s)
