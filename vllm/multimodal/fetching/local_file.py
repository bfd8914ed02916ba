"""Opens files below one folder, so that no link leads out of it."""

import os
import stat
from pathlib import Path
from urllib.parse import SplitResult, unquote

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_FILE_FLAGS = _FLAGS | os.O_NONBLOCK | os.O_NOCTTY
"""A FIFO or a terminal is opened without waiting, and refused then."""


def local_path(url: SplitResult) -> str:
    """Return the path in a file: URL.

    Raises:
        ValueError: it names another host, or has no absolute path.
    """
    path = unquote(url.path)
    if url.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise ValueError("a file: URL must be file:// and an absolute path")
    return path


def read_below(folder: Path, path: str, max_bytes: int) -> bytes:
    """Read a regular file below a folder.

    Args:
        folder: result of `os.path.realpath`. The file must be below it after resolving links.
        path: absolute.
        max_bytes: limit of its size.

    Raises:
        PermissionError: it is not below the folder. Whether it exists is not checked then.
        OSError: it does not exist, cannot be read, or is not a regular file.
        ValueError: it is larger than the limit.
    """
    try:
        parts = Path(os.path.realpath(path)).relative_to(folder).parts
    except ValueError:
        raise PermissionError("it is not in the folder whose files may be read") from None
    with os.fdopen(_open_below(folder, parts), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        data = b"" if status.st_size > max_bytes else file.read(max_bytes + 1)
    if status.st_size > max_bytes or len(data) > max_bytes:
        raise ValueError(f"it must have at most {max_bytes} bytes, and has more")
    return data


def _open_below(folder: Path, parts: tuple[str, ...]) -> int:
    """Open a file by opening each folder of its path, without following links.

    This refuses a link that was created after the path had been resolved.
    """
    descriptor = os.open(folder, _FLAGS | os.O_DIRECTORY)
    for i, part in enumerate(parts):
        flags = _FILE_FLAGS if i == len(parts) - 1 else _FLAGS | os.O_DIRECTORY
        try:
            inner = os.open(part, flags, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = inner
    return descriptor
