"""Limits of the kernel for waits on a socket. They hold for whoever uses it: Python, a copy of this
process, a library."""

import socket
import struct

_TIMEVAL = struct.Struct("ll")


def limit_waits(connection: socket.socket, option: int, timeout_s: float) -> None:
    """Let a call fail with EAGAIN that waits for longer.

    Args:
        connection: blocks.
        option: `SO_RCVTIMEO` or `SO_SNDTIMEO`.
        timeout_s: seconds, above 0.
    """
    seconds, part = divmod(timeout_s, 1)
    value = _TIMEVAL.pack(int(seconds), max(1, int(part * 1e6)))  # both 0: no limit
    connection.setsockopt(socket.SOL_SOCKET, option, value)
