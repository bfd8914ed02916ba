"""The hash of the C++ kernels' sources, which tells whether a built library is up to date.

Imports nothing of the package: setup.py runs this file without it.
"""

import hashlib
from pathlib import Path


def hash_sources(root: Path) -> str | None:
    """Hash the files that decide the content of the library: setup.py and csrc/cpu under `root`.

    None if they do not exist, because the package is not installed from a checkout in place.
    """
    setup, sources = root / "setup.py", sorted((root / "csrc" / "cpu").glob("*.[hc]*"))
    if not sources or not setup.is_file():
        return None
    digest = hashlib.sha256()
    for path in (setup, *sources):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]
