"""Sockets whose calls wait without a limit, even in a program that has called
`socket.setdefaulttimeout`, after which the kernel would limit the waits of every user of the
socket."""

import ctypes
import os
import socket
import struct
from functools import cache

_TIMEVAL = struct.Struct("ll")
_ADDRESS = struct.Struct("=HH")
"""The family of an address of the internet, and its port in the order of the network."""
_ADDRESS_BYTES = 128
"""Of any address."""


def blocking_pair() -> tuple[socket.socket, socket.socket]:
    """Make two sockets that are connected."""
    pair = socket.socketpair()
    for each in pair:
        each.settimeout(None)
    return pair


def blocking_socket(descriptor: int) -> socket.socket:
    """Return the socket of a file descriptor, which it owns from here on."""
    found = socket.socket(fileno=descriptor)
    found.settimeout(None)
    return found


def set_socket_timeout(connection: socket.socket, option: int, timeout_s: float) -> None:
    """Let the kernel end a call that waits for longer, with EAGAIN. It holds for all that use the
    socket: a copy of this process, or a library.

    Args:
        connection: blocks.
        option: `SO_RCVTIMEO` or `SO_SNDTIMEO`.
        timeout_s: seconds, above 0.
    """
    connection.setsockopt(socket.SOL_SOCKET, option, _timeval(timeout_s))


def set_socket_timeouts_of(descriptor: int, port: int, option: int, timeout_s: float) -> None:
    """Set the timeouts of a socket that a library owns, if it is connected to this port.

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
