"""Read PT_HPU_RECIPE_CACHE_CONFIG: the folder in which the bridge keeps compiled recipes.

The bridge reads the variable itself. The engine reads it too, because the bridge says nothing about
a value that it cannot use, and then compiles everything again at each start.
"""

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vllm.errors import ConfigError
from vllm.logger import init_logger

logger = init_logger(__name__)

_VARIABLE = "PT_HPU_RECIPE_CACHE_CONFIG"
_FLAGS = {"true": True, "1": True, "false": False, "0": False, "": False}
_DEFAULT_MAX_MB = 1024


@dataclass(frozen=True)
class RecipeFolder:
    """The folder, and its limits."""

    path: Path
    is_emptied: bool
    """Whether the recipes of earlier runs are deleted at the start."""
    max_bytes: int

    @classmethod
    def parse(cls, config: str | None) -> "RecipeFolder | None":
        """Parse `path,delete at start,size in MB[,on NFS]`; None if it has no path.

        Everything after the path may be left out. The engine does not use the setting of NFS.

        Raises:
            ConfigError: the text has another format.
        """
        path, *options = [part.strip() for part in (config or "").split(",")]
        delete, size, nfs, *rest = [*options, "", "", ""]
        is_size = size == "" or (size.isascii() and size.isdecimal() and int(size) > 0)
        if any(rest) or not is_size or not {delete.lower(), nfs.lower()} <= _FLAGS.keys():
            raise ConfigError(
                f"{_VARIABLE}={config!r}: expected `path,delete at start,size in MB`, where the "
                f"second part is true or false and the third a number, such as "
                f"/tmp/recipes,false,1024"
            )
        if not path:
            return None
        if path.startswith("~"):
            raise ConfigError(
                f"{_VARIABLE}={config!r}: the bridge does not replace ~ by a home folder. Write "
                f"the whole path, such as {Path(path).expanduser()}"
            )
        max_mb = int(size) if size else _DEFAULT_MAX_MB
        return cls(Path(path), _FLAGS[delete.lower()], max_mb * 2**20)

    def make(self) -> None:
        """Create the folder, and warn if recipes cannot be written into it, or not as many as it
        may have: the recipes of earlier runs may be on a volume that is read-only.

        Raises:
            ConfigError: the folder cannot be created.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{_VARIABLE}: the folder {self.path} cannot be created: "
                f"{error.strerror or error}. Name a folder that this process may write, or unset "
                f"the variable"
            ) from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            logger.warning(
                "%s: this process may not write into the folder %s, so recipes that it compiles "
                "are not kept for the next start",
                *(_VARIABLE, self.path),
            )
            return
        free_bytes = shutil.disk_usage(self.path).free
        missing_bytes = self.max_bytes - self._num_bytes() - free_bytes
        if missing_bytes > 0:
            logger.warning(
                "%s: recipes may take %d MB, but the disk of the folder %s has only %d MB free. If "
                "it fills up, recipes are lost, and the next start compiles them again. Free %d MB "
                "or lower the third part of the variable",
                *(_VARIABLE, self.max_bytes >> 20, self.path, free_bytes >> 20),
                -(-missing_bytes >> 20),
            )

    def _num_bytes(self) -> int:
        """Return the bytes of the recipes of earlier runs, unless they will be deleted."""
        if self.is_emptied:
            return 0
        num_bytes = 0
        for path in self.path.rglob("*"):
            with suppress(OSError):  # another process may delete it
                num_bytes += path.stat().st_size
        return num_bytes
