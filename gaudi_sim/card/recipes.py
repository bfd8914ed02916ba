"""A folder of compiled recipes on disk, which later processes use again. Gaudi's bridge keeps such
a folder too.

A simulated recipe is the text of its operators. Each recipe is one file, named after the digest of
this text. Recipes differ between two cards, and between two modes. Captured graphs are not kept:
every process captures again.
"""

import hashlib
import os
from pathlib import Path

from vllm.env.recipe_folder import RecipeFolder
from vllm.logger import init_logger
from vllm.utils.files.whole_file import write_whole

logger = init_logger(f"vllm.{__name__}")  # the log shows loggers of `vllm` only

_VARIABLE = "PT_HPU_RECIPE_CACHE_CONFIG"
_SUFFIX = ".recipe"


class RecipeCache:
    """A folder of recipes; if it is full, the oldest are deleted.

    Any number of processes may use a folder at the same time.
    """

    def __init__(self, folder: Path, *, max_bytes: int = 2**30) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._has_failed = False

    @classmethod
    def from_config(cls, config: str) -> "RecipeCache | None":
        """Open the folder that PT_HPU_RECIPE_CACHE_CONFIG describes; None if it names none.

        Raises:
            ConfigError: the text has another format, or the folder cannot be created.
        """
        folder = RecipeFolder.parse(config)
        if folder is None:
            return None
        folder.make()
        cache = cls(folder.path, max_bytes=folder.max_bytes)
        if folder.is_emptied:
            cache.clear()
        return cache

    def __contains__(self, text: str) -> bool:
        return self._path(text).is_file()

    def add(self, text: str) -> None:
        """Save a recipe that was just compiled. If that fails, warn once."""
        path = self._path(text)
        try:
            write_whole(path, text.encode())
        except OSError as error:
            if not self._has_failed:
                logger.warning(
                    "the simulated card cannot keep recipes in %s (%s): %s. The next start "
                    "compiles them again",
                    *(self._folder, _VARIABLE, error.strerror or error),
                )
            self._has_failed = True
            return
        self._make_room()

    def clear(self) -> None:
        """Delete every recipe, but no other file."""
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
    """Return the status of a file; None if another process has deleted it."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None
