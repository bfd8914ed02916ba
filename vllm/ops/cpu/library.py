"""Finding and loading the C++ kernels that setup.py builds from csrc/cpu.

Knows addresses and C types. Knows no operator contract: that is `vllm.ops.cpu.operators`.
"""

import ctypes
import functools
from ctypes import CDLL, c_bool, c_char_p, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch

from vllm.logger import init_logger

logger = init_logger(__name__)

LIBRARY_PATH = Path(__file__).parents[1] / "_cpu_kernels.so"

_POINTER, _INT, _SIZE, _FLOAT = c_void_p, c_int, c_int64, c_float

# Kernel -> argument types, in the order of csrc/cpu/dispatch.cpp.
_ARGTYPES: dict[str, list[type]] = {
    "rms_norm": [_POINTER] * 3 + [_SIZE] * 4 + [_FLOAT, _INT],
    "fused_add_rms_norm": [_POINTER] * 3 + [_SIZE] * 2 + [_FLOAT, _INT],
    "layer_norm": [_POINTER] * 4 + [_SIZE] * 2 + [_FLOAT, _INT],
    "silu_and_mul": [_POINTER] * 2 + [_SIZE] * 3 + [_INT],
    "gelu_and_mul": [_POINTER] * 2 + [_SIZE] * 3 + [_INT, _INT],
    "rotary_embedding": [_POINTER] * 4 + [_SIZE] * 8 + [_INT, _INT],
    "reshape_and_cache": [_POINTER] * 5 + [_SIZE] * 5 + [_INT],
    "reshape_and_cache_fp8": [_POINTER, _INT],
    "paged_attention_decode": [_POINTER, _INT],
    "paged_attention_prefill": [_POINTER, _INT],
}
_RETURNS_BAD_ROW = {
    "rotary_embedding",
    "reshape_and_cache",
    "reshape_and_cache_fp8",
    "paged_attention_decode",
    "paged_attention_prefill",
}


@functools.cache
def load_cpu_kernels() -> CDLL | None:
    """The kernel library, ready to be called on the threads of torch.

    Loaded once per process. None when it was not built or cannot be loaded here; the reason is
    logged once, and the torch operators serve instead.
    """
    try:
        library = CDLL(str(LIBRARY_PATH))
    except OSError as error:
        reason = str(error) if LIBRARY_PATH.exists() else f"{LIBRARY_PATH} was not built"
        logger.warning("C++ CPU kernels are off, torch operators run instead: %s", reason)
        return None
    for kernel, argtypes in _ARGTYPES.items():
        for suffix in ("f32", "bf16"):
            function = getattr(library, f"vllm_{kernel}_{suffix}")
            function.argtypes = argtypes
            function.restype = c_int64 if kernel in _RETURNS_BAD_ROW else None
    library.vllm_cpu_isa.restype = c_char_p
    library.vllm_cpu_set_isa.argtypes = [c_char_p]
    library.vllm_cpu_set_isa.restype = c_bool
    library.vllm_cpu_set_openmp.argtypes = [c_void_p]
    library.vllm_cpu_set_openmp.restype = None
    address = _gomp_parallel()
    if address is None:
        logger.warning("torch uses no GNU-compatible OpenMP here: CPU kernels run on one thread")
    library.vllm_cpu_set_openmp(address)
    logger.debug("C++ CPU kernels loaded, instruction set %s", library.vllm_cpu_isa().decode())
    return library


def _gomp_parallel() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that torch itself calls, or None.

    The global scope comes first because the dynamic linker looks there first for torch too: a
    preloaded runtime (LD_PRELOAD=libiomp5.so) is the one that runs.
    """
    torch_lib = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for path in (None, str(torch_lib)):
        try:
            function = CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, c_void_p).value
    return None
