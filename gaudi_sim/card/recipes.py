"""Compiled recipes that outlive the process, as the bridge keeps them on disk.

A simulated recipe is the text of its operators. One file each, named after its digest; two cards,
or two modes, have different ones. Captured graphs are not kept: every process captures anew.
"""

import hashlib
import os
from pathlib import Path

from vllm.errors import ConfigError

_VARIABLE = "PT_HPU_RECIPE_CACHE_CONFIG"
_DEFAULT_MAX_BYTES = 1024 * 2**20
_SUFFIX = ".recipe"


class RecipeCache:
    """A folder of recipes; when it is full, the oldest are deleted.

    Any number of processes may use a folder at the same time.
    """

    def __init__(self, folder: Path, *, max_bytes: int = _DEFAULT_MAX_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    @classmethod
    def from_config(cls, config: str) -> "RecipeCache | None":
        """Read `path,delete at start,size in MB[,on NFS]`; None when it has no path.

        Everything after the path may be left out; on NFS or not is the same here.

        Raises:
            ConfigError: the text is not written like that, or the folder cannot be made.
        """
        path, *options = [part.strip() for part in config.split(",")]
        delete, size, nfs, *rest = [*options, "", "", ""]
        flags = {"true": True, "1": True, "false": False, "0": False, "": False}
        is_size = size == "" or (size.isdecimal() and int(size) > 0)
        if any(rest) or not is_size or not {delete.lower(), nfs.lower()} <= flags.keys():
            raise ConfigError(
                f"{_VARIABLE}={config!r} is not `path,delete at start,size in MB`, "
                f"such as /tmp/recipes,false,1024"
            )
        if not path:
            return None
        cache = cls(Path(path), max_bytes=int(size) * 2**20 if size else _DEFAULT_MAX_BYTES)
        try:
            cache._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{_VARIABLE}={config!r}: {error}") from error
        if flags[delete.lower()]:
            cache.clear()
        return cache

    def __contains__(self, text: str) -> bool:
        return self._path(text).is_file()

    def add(self, text: str) -> None:
        """Keep a recipe that was just compiled."""
        path = self._path(text)
        # Write to another name first, so that no other process reads a partial recipe.
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(text)
        unfinished.replace(path)
        self._make_room()

    def clear(self) -> None:
        """Delete every recipe, and no other file."""
        for path in self._folder.glob(f"*{_SUFFIX}"):
            path.unlink(missing_ok=True)

    def _make_room(self) -> None:
        found = sorted(
            (status.st_mtime_ns, status.st_size, path)
            for path in self._folder.glob(f"*{_SUFFIX}")
            if (status := _status(path)) is not None
        )
        num_bytes = sum(size for _, size, _ in found)
        for _, size, path in found:
            if num_bytes <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            num_bytes -= size

    def _path(self, text: str) -> Path:
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return self._folder / f"{digest}{_SUFFIX}"


def _status(path: Path) -> os.stat_result | None:
    """None of a file that another process has deleted."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None
