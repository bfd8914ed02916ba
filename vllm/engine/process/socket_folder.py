"""Create and remove the folder of the socket between a client and its core.

The client creates it. The core removes it as soon as it has connected, so that nothing is left if a
process is killed; the client removes it if no core connected.
"""

import contextlib
import tempfile
from pathlib import Path

from vllm.errors import ConfigError

_PREFIX = "vllm-core-"
_SOCKET = "core"
_SCHEME = "ipc://"

_MAX_SOCKET_PATH = 100
"""Maximum number of bytes of a path; the kernel accepts 107."""


def make_address() -> str:
    """Create a folder and return the address of a socket in it, which is not bound yet.

    Raises:
        ConfigError: there is no folder for temporary files that can be written.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        if len(bytes(folder / _SOCKET)) > _MAX_SOCKET_PATH:
            folder.rmdir()
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
    except OSError as error:
        raise ConfigError(
            f"no folder for temporary files can be written: {error.strerror or error}. The engine "
            f"process needs one for its socket. Set TMPDIR to a folder that can be written; in a "
            f"container with a read-only file system, mount a volume at /tmp"
        ) from None
    return f"{_SCHEME}{folder / _SOCKET}"


def remove(address: str) -> None:
    """Remove the socket and the folder that `make_address` created.

    Any other address is ignored. A folder with other files is not removed.
    """
    socket = Path(address.removeprefix(_SCHEME))
    is_ours = socket.name == _SOCKET and socket.parent.name.startswith(_PREFIX)
    if not address.startswith(_SCHEME) or not is_ours:
        return
    with contextlib.suppress(OSError):  # not empty, not permitted, or removed by the other process
        if socket.is_socket():
            socket.unlink(missing_ok=True)
        socket.parent.rmdir()
