"""Define the messages between a server and the machines that run some of its replicas, over TCP.
Each replica has one connection.

    machine -> server    HandshakeRequest
    server -> machine    StartCore: start the core. Then messages to the core.
    machine -> server    messages from the core, and CoreExited when its process has ended

All are frames (`utils/frames`). Their content is msgpack: `HandshakeRequest`, `StartCore`,
unchanged messages of `wire`, or `CoreExited`. No pickle, no code.
"""

import asyncio
import socket

import msgspec

from vllm.version import __version__

HELLO, BEGIN, MESSAGE, ENDED = range(4)
"""Kinds of frames."""

_KEEPALIVE_S = 5
_KEEPALIVE_PROBES = 3


class RemoteProtocolError(Exception):
    """The peer speaks another protocol, or another version of this one, or refuses; str() says
    why.
    """


class HandshakeRequest(msgspec.Struct, frozen=True, array_like=True):
    """A machine reports that it can start a core."""

    replica: int
    version: str = __version__


class StartCore(msgspec.Struct, frozen=True, array_like=True):
    """Start the core."""

    settings: dict[str, str]
    """Settings that must be equal in the configs of both machines."""


class CoreExited(msgspec.Struct, frozen=True, array_like=True):
    """The process of the core has exited."""

    cause: str


def check_kind(kind: int, expected: int) -> None:
    """Raise RemoteProtocolError if a frame has a different kind than expected."""
    if kind != expected:
        raise RemoteProtocolError(
            f"expected a message of kind {expected}, got kind {kind}: is the peer another "
            "program, or another version of vllm?"
        )


def enable_keepalive(writer: asyncio.StreamWriter) -> None:
    """Let the system close a connection within about 20 s if the other machine no longer
    answers.
    """
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_S),
        ("TCP_KEEPINTVL", _KEEPALIVE_S),
        ("TCP_KEEPCNT", _KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", 1000 * _KEEPALIVE_S * (_KEEPALIVE_PROBES + 1)),
    ):
        if hasattr(socket, name):  # the options differ between operating systems
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
