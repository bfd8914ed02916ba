"""The OpenMP runtime whose threads torch and the C++ kernels use."""

import ctypes
from ctypes import CDLL
from pathlib import Path
from typing import Any

import torch


def find_openmp(name: str) -> Any:
    """Return a function of the OpenMP runtime that torch itself calls, or None.

    The global scope comes first because the dynamic linker looks there first for torch too: a
    preloaded runtime (LD_PRELOAD=libiomp5.so) is the one that runs.
    """
    torch_lib = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for path in (None, str(torch_lib)):
        try:
            return getattr(CDLL(path), name)
        except (OSError, AttributeError):
            continue
    return None


def compute_alone() -> None:
    """Let torch use one thread where the calling thread calls it: work in the background that
    takes a team of threads has a core less than steps, and each step waits for it.

    `torch.set_num_threads` would also count for threads that begin later.
    """
    torch.get_num_threads()  # the first call in each thread sets its number of threads
    function = find_openmp("omp_set_num_threads")
    if function is not None:
        function.argtypes, function.restype = [ctypes.c_int], None
        function(1)
