"""A disk that is full, for tests of programs that must continue."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

_NUM_BYTES = 10


@contextmanager
def full_disk() -> Iterator[None]:
    """Let each file of this process accept only its first 10 bytes in this context. Writing more
    fails in the middle, as on a full disk, with EFBIG (file too large) instead of ENOSPC.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_NUM_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
