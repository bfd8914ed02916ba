"""KV blocks as files in a folder, which several engines may share.

    FOLDER/NAMESPACE/ab/abcd...ef.kv     one block; the name is its key in hexadecimal

A file (`block_format`) appears complete, by renaming, and is never changed. One that is damaged is
removed, and its block counts as missing.
"""

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from vllm.distributed.kv_transfer.block_format import compose, parse
from vllm.distributed.kv_transfer.interface import BlockData
from vllm.errors import ConfigError
from vllm.logger import init_logger

logger = init_logger(__name__)

_SUFFIX = ".kv"

_SCAN_SHARE = 20
"""The size of the folder is checked when a 20th of the limit was written since the last check."""
_KEPT_SHARE = 0.9
"""What is left of the limit when files have been removed."""
_FAILURES_PER_WARNING = 1000


class BlockFolder:
    """The files of blocks below one folder.

    Args:
        path: of the folder; it is made if there is none.
        max_bytes: of all files, about. Beyond it, those that were not used for the longest are
            removed, whoever has written them.

    Raises:
        ConfigError: the folder cannot be made or written.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        self._root = Path(path).expanduser().absolute()
        self._max_bytes = max_bytes
        self._names = itertools.count()
        self._num_failures = 0
        self._unscanned_bytes = max_bytes  # the first file checks what is there
        self._folder = self._root
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            probe = self._root / f".{os.getpid()}.probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"kv_transfer_config: the folder '{path}' cannot be written: {error.strerror}. "
                f"Name another one"
            ) from None

    def open(self, namespace: str) -> None:
        """Use the files of this namespace."""
        self._folder = self._root / namespace

    def has(self, key: bytes) -> bool:
        """Whether there is a file; it may be damaged."""
        return self._path(key).is_file()

    def read(self, key: bytes) -> BlockData | None:
        """The block of a key; None if there is none, or it is damaged."""
        path = self._path(key)
        try:
            data = path.read_bytes()
            os.utime(path)  # used now
        except OSError:
            return None
        block = parse(key, data)
        if block is None:
            logger.warning("the file %s of a KV block is damaged: it is computed again", path)
            self.remove(key)
        return block

    def write(self, key: bytes, block: BlockData) -> None:
        """Write the file of a block. A failure is logged, and the block is dropped."""
        path = self._path(key)
        temporary = path.parent / f".{os.getpid()}-{next(self._names)}.tmp"
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
            self._remove_oldest()

    def remove(self, key: bytes) -> None:
        """Remove the file of a block, if there is one."""
        with contextlib.suppress(OSError):  # removed by another engine, or not permitted
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / f"{name}{_SUFFIX}"

    def _remove_oldest(self) -> None:
        """Remove files until the folder has room again."""
        files = sorted(_files(self._root))
        total = sum(size for _, size, _ in files)
        if total <= self._max_bytes:
            return
        for _, size, path in files:
            if total <= _KEPT_SHARE * self._max_bytes:
                return
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size


def _files(root: Path) -> Iterator[tuple[float, int, str]]:
    """(time of the last use, bytes, path) of the files of all namespaces, unfinished ones too."""
    for folder, _, names in os.walk(root):
        for name in names:
            if not name.endswith((_SUFFIX, ".tmp")):
                continue
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):  # removed meanwhile
                found = os.stat(path)
                yield found.st_mtime, found.st_size, path
