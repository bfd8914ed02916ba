"""Access to the OpenMP runtime whose threads torch and the C++ kernels use."""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path
from typing import Any

import torch


@functools.cache
def find_openmp(name: str) -> Any:
    """Return a function of the OpenMP runtime that torch itself calls, or None.

    The global scope is searched first, as the dynamic linker does for torch: a preloaded runtime
    (LD_PRELOAD=libiomp5.so) is the one that torch uses.
    """
    torch_lib = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for path in (None, str(torch_lib)):
        try:
            return getattr(CDLL(path), name)
        except (OSError, AttributeError):
            continue
    return None


def compute_alone() -> None:
    """Let torch use only one thread when called from the calling thread.

    Background work with a whole team of threads would take a core from running steps, and each step
    waits for all of its threads. `torch.set_num_threads` would also affect threads that start
    later.
    """
    torch.get_num_threads()  # the first call in each thread sets its number of threads
    _set_num_threads(1)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use only the calling thread for small operations.

    With several threads, an operation ends when the last one has had a core. In a server, the API
    process often has that core: all-MiniLM-L6-v2 answers 1.07 times as many texts when one thread
    pools them (two cores, 32 clients, 2026-11-28).
    """
    before = torch.get_num_threads()
    _set_num_threads(1)
    try:
        yield
    finally:
        _set_num_threads(before)


def _set_num_threads(number: int) -> None:
    """Set the number of threads of parallel regions that the calling thread starts."""
    function = find_openmp("omp_set_num_threads")
    if function is not None:
        function.argtypes, function.restype = [ctypes.c_int], None
        function(number)
