"""Finds the files of examples, in the user's folder or in the package."""

from collections.abc import Sequence
from pathlib import Path

from vllm import envs
from vllm.errors import RequestError


def find_asset(name: str, suffixes: Sequence[str], packaged: Path | None = None) -> Path:
    """Return the path of an asset.

    Args:
        name: name of the file, without its suffix.
        suffixes: endings that it may have, such as ".png"; the first existing file is used.
        packaged: the folder of the package with such files. The folder in `VLLM_ASSETS_CACHE` is
            searched first.

    Raises:
        RequestError: neither has it; the error says where to put the file. Nothing is downloaded.
    """
    own = envs.get().VLLM_ASSETS_CACHE
    folders = [Path(own).expanduser()] if own else []
    folders += [packaged] if packaged else []
    for folder in folders:
        for suffix in suffixes:
            if (path := folder / f"{name}{suffix}").is_file():
                return path
    there = sorted({p.stem for f in folders for s in suffixes for p in f.glob(f"*{s}")})
    accepted = f" (available: {', '.join(there)})" if there else ""
    raise RequestError(
        f"there is no asset {name!r}{accepted}: assets are not downloaded. Put "
        f"{name}{suffixes[0]} into a folder and name that folder in VLLM_ASSETS_CACHE"
    )
