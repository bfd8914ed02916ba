"""Store KV blocks as files in a folder, which several engines may share.

    FOLDER/NAMESPACE/ab/abcd...ef.kv     one block; the name is its key in hexadecimal

A file (`block_format`) becomes visible when it is complete, by renaming, and is never changed. A
damaged file is removed, and its block counts as missing. Other files below the folder are not
touched.
"""

import contextlib
import itertools
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm.distributed.kv_transfer.block_format import compose, parse
from vllm.distributed.kv_transfer.interface import BlockData
from vllm.errors import ConfigError
from vllm.logger import init_logger

logger = init_logger(__name__)

_SUFFIX = ".kv"
_SUBFOLDER = re.compile(r"[0-9a-f]{2}")
_BLOCK_FILE = re.compile(r"[0-9a-f]{64}\.kv")
_TEMPORARY_FILE = re.compile(r"\.[0-9a-f]{16}-[0-9]+\.tmp")

_SCAN_SHARE = 20
"""The size of the folder is checked when a 20th of the limit was written since the last check."""
_KEPT_SHARE = 0.9
"""Fraction of the limit that remains when files have been removed."""
_FAILURES_PER_WARNING = 1000
_HOUR_S = 3600.0


class BlockFolder:
    """Reads and writes the files of blocks in one folder.

    Args:
        path: path of the folder, which is created if it does not exist.
        max_bytes: approximate limit for all files. Beyond it, the least recently used files are
            removed, whoever has written them.
        saves: whether files are written. False: the folder may be read-only.
        clock: returns seconds, as `time.time`.

    Raises:
        ConfigError: the folder cannot be created or used.
    """

    def __init__(
        self, path: str, max_bytes: int, saves: bool = True, clock: Callable[[], float] = time.time
    ) -> None:
        self._root = Path(path).expanduser().absolute()
        self._max_bytes = max_bytes
        self._clock = clock
        # Random and not the process id: engines in two containers may have the same process id.
        self._own_name = secrets.token_hex(8)
        self._names = itertools.count()
        self._num_failures = 0
        self._unscanned_bytes = max_bytes  # the first write scans the folder
        self._folder = self._root
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            if saves:
                probe = self._root / f".{self._own_name}.probe"
                probe.touch()
                probe.unlink()
            else:
                os.scandir(self._root).close()
            _warn_of_others(self._root)
        except OSError as error:
            raise ConfigError(
                f"kv_transfer_config: the folder '{path}' cannot be "
                f"{'written' if saves else 'read'}: {error.strerror}. Give a folder that this "
                f"user may use"
            ) from None

    def open(self, namespace: str) -> None:
        """Use the files of this namespace."""
        self._folder = self._root / namespace

    def has(self, key: bytes) -> bool:
        """Return whether a block has a file, which may be damaged."""
        return self._path(key).is_file()

    def read(self, key: bytes) -> BlockData | None:
        """Return the block of a key; None if it has no file, or the file is damaged."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):  # the folder may be read-only
            os.utime(path)  # records the time of use, for eviction
        block = parse(key, data)
        if block is None:
            logger.warning(
                "the file %s of a KV block is damaged: the block is computed again", path
            )
            self.remove(key)
        return block

    def write(self, key: bytes, block: BlockData) -> None:
        """Write the file of a block. If it fails, the failure is logged and the block is
        dropped.
        """
        path = self._path(key)
        temporary = path.parent / f".{self._own_name}-{next(self._names)}.tmp"
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with temporary.open("wb") as file:
                file.writelines(compose(key, block))
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if self._num_failures % _FAILURES_PER_WARNING == 0:
                logger.warning("a KV block could not be written to %s: %s", self._root, error)
            self._num_failures += 1
            return
        self._unscanned_bytes += sum(map(len, block))
        if self._unscanned_bytes > self._max_bytes // _SCAN_SHARE:
            self._unscanned_bytes = 0
            self.remove_oldest()

    def remove(self, key: bytes) -> None:
        """Remove the file of a block, if there is one."""
        _remove(self._path(key))

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / f"{name}{_SUFFIX}"

    def remove_oldest(self) -> None:
        """Remove unfinished files of engines that exited while writing, and the oldest files until
        the folder has room again.
        """
        now, total, files = self._clock(), 0, []
        for entry in _entries(self._root):
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # another engine has removed it meanwhile
            used_at = found.st_mtime
            if entry.name.endswith(_SUFFIX):
                # A time in the future comes from a wrong clock: treat the file as the oldest one.
                files.append((used_at if used_at < now + _HOUR_S else 0.0, found.st_size, entry))
            elif used_at < now - _HOUR_S and _remove(entry):
                continue
            total += found.st_size
        if total <= self._max_bytes:
            return
        for _, size, entry in sorted(files, key=lambda file: file[:2]):
            if total <= _KEPT_SHARE * self._max_bytes:
                return
            if _remove(entry):
                total -= size


def _warn_of_others(root: Path) -> None:
    """Log a warning if other users can write to the folder."""
    found = root.stat()
    if found.st_uid != os.geteuid():
        logger.warning(
            "the folder %s for KV blocks belongs to user %d, who can change answers by writing "
            "files there. Give a folder of the user that runs the engine",
            root,
            found.st_uid,
        )
    elif found.st_mode & stat.S_IWOTH:
        logger.warning(
            "every user of this machine can write files into the folder %s for KV blocks, and "
            "change answers that way. Take the permission away (chmod o-w), or give another folder",
            root,
        )


def _remove(path: "os.PathLike[str]") -> bool:
    """Remove a file, and return whether it is gone."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True  # already removed by another engine
    except OSError:
        return False  # not permitted
    return True


def _entries(root: Path) -> Iterator["os.DirEntry[str]"]:
    """Yield the files of blocks in all namespaces, including unfinished ones."""
    for namespace in _listed(root):
        if not namespace.is_dir(follow_symlinks=False):
            continue
        for folder in _listed(namespace):
            if not (_SUBFOLDER.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False)):
                continue
            for entry in _listed(folder):
                if _BLOCK_FILE.fullmatch(entry.name) or _TEMPORARY_FILE.fullmatch(entry.name):
                    yield entry


def _listed(folder: "os.PathLike[str]") -> "list[os.DirEntry[str]]":
    """Return the entries of a folder; an empty list if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []  # removed meanwhile, or it belongs to another user
