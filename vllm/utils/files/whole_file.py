"""Write a file so that no reader sees a part of it."""

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under another name and rename it: readers see either the old or the new content.

    Args:
        path: path of the file; its folder exists.
        content: the new content.

    Raises:
        OSError: the folder cannot be written, or is full. The old file stays.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
