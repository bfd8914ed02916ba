"""Recognise files of a clone whose contents Git LFS has not downloaded."""

from pathlib import Path

_BEGIN = b"version https://git-lfs.github.com/spec/"
_MAX_BYTES = 1024
"""Maximum size of a pointer."""


def pointer_problem(path: Path) -> str | None:
    """Say what to do about a file that is only a pointer of Git LFS; None if it is not one.

    A file that cannot be read is reported by the code that needs its contents.
    """
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return None
        if not path.read_bytes().startswith(_BEGIN):
            return None
    except OSError:
        return None
    return (
        f"{path} is a pointer of Git LFS, without the contents of the file. Run `git lfs pull` in "
        "its folder, or download the file again"
    )
