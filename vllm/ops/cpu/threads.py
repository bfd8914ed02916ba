"""Access to the OpenMP runtime whose threads torch and the C++ kernels use."""

import ctypes
from ctypes import CDLL
from pathlib import Path
from typing import Any

import torch


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
    function = find_openmp("omp_set_num_threads")
    if function is not None:
        function.argtypes, function.restype = [ctypes.c_int], None
        function(1)
