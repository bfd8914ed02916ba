"""Create sockets whose calls block without a time limit.

`socket.setdefaulttimeout` in the program would otherwise make the kernel limit the waits of all
users of the socket.
"""

import ctypes
import os
import socket
import struct
from functools import cache

_TIMEVAL = struct.Struct("ll")
_ADDRESS = struct.Struct("=HH")
"""The family of an address of the internet, and its port in the order of the network."""
_ADDRESS_BYTES = 128
"""Maximum number of bytes of any address."""


def blocking_pair() -> tuple[socket.socket, socket.socket]:
    """Create two connected sockets."""
    pair = socket.socketpair()
    for each in pair:
        each.settimeout(None)
    return pair


def blocking_socket(descriptor: int) -> socket.socket:
    """Return a socket for a file descriptor. The socket owns the descriptor afterwards."""
    found = socket.socket(fileno=descriptor)
    found.settimeout(None)
    return found


def set_socket_timeout(connection: socket.socket, option: int, timeout_s: float) -> None:
    """Limit how long a call of a socket may block; after that the kernel lets it fail with EAGAIN.

    The limit applies to all users of the socket: forked processes and libraries.

    Args:
        connection: a blocking socket.
        option: `SO_RCVTIMEO` or `SO_SNDTIMEO`.
        timeout_s: seconds, above 0.
    """
    connection.setsockopt(socket.SOL_SOCKET, option, _timeval(timeout_s))


def set_socket_timeouts_of(descriptor: int, port: int, option: int, timeout_s: float) -> None:
    """Set a timeout of a socket that a library owns, if the socket is connected to `port`.

    Raises:
        OSError: it is not connected, or has been closed.
    """
    # Call the C library: a Python socket object may change whether the socket blocks, and another
    # thread may be changing that while it connects.
    address, size = ctypes.create_string_buffer(_ADDRESS_BYTES), ctypes.c_uint32(_ADDRESS_BYTES)
    _check(_libc().getpeername(descriptor, address, ctypes.byref(size)))
    family, found = _ADDRESS.unpack_from(address)
    if family in (socket.AF_INET, socket.AF_INET6) and socket.ntohs(found) == port:
        value = _timeval(timeout_s)
        _check(_libc().setsockopt(descriptor, socket.SOL_SOCKET, option, value, len(value)))


def _timeval(timeout_s: float) -> bytes:
    seconds, part = divmod(timeout_s, 1)
    # At least 1 microsecond, because 0 means no limit.
    return _TIMEVAL.pack(int(seconds), max(1, int(part * 1e6)))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
