"""Memory of this process that is given back to the system while its addresses stay valid.

Whoever holds an address of such memory, kernels of C++ for example, never points to memory that
is not there: what was given back reads as zeros, and takes memory again when it is written.
"""

import ctypes
import functools
import mmap
import os
import sys
from typing import Any

_CAN_DISCARD = sys.platform == "linux"
"""Elsewhere the call may keep the memory, or keep what is in it."""


def can_discard() -> bool:
    """Whether this system takes memory back and leaves the addresses."""
    return _CAN_DISCARD


def discard(address: int, num_bytes: int) -> None:
    """Give memory back; all of its bytes are 0 afterwards.

    The system has whole pages only: parts of a page at both ends are cleared and kept.

    Args:
        address: of memory that this process has allocated and does not use meanwhile.
        num_bytes: of it.

    Raises:
        OSError: the system does not take it back, as for memory that is locked.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first >= end:
        ctypes.memset(address, 0, num_bytes)
        return
    ctypes.memset(address, 0, first - address)
    ctypes.memset(end, 0, address + num_bytes - end)
    if _libc().madvise(first, end - first, mmap.MADV_DONTNEED):
        error = ctypes.get_errno()
        raise OSError(error, f"madvise of {end - first} bytes: {os.strerror(error)}")


def trim_heap() -> None:
    """Give freed memory back that the C library keeps for later, where it has a call for that."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
