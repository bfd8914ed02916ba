"""Loads the C++ kernels that setup.py builds from csrc/cpu.

The library describes itself: its kernels, their types, and the fields of the structs that they
take. All of this is read from it here, so none of it is repeated in Python. The meaning of the
operators is in `vllm.ops.cpu.operators`.
"""

import ctypes
import functools
from collections.abc import Callable
from ctypes import CDLL, CFUNCTYPE, c_bool, c_char_p, c_float, c_int, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path
from struct import Struct
from types import SimpleNamespace
from typing import Any

import torch

from vllm import envs
from vllm.errors import ConfigError
from vllm.logger import init_logger
from vllm.ops.cpu.source_hash import hash_sources
from vllm.ops.cpu.threads import find_openmp
from vllm.version import __version__

logger = init_logger(__name__)

_ROOT = Path(__file__).parents[3]
LIBRARY_PATH = _ROOT / "vllm" / "ops" / "_cpu_kernels.so"

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
_C_TYPES: dict[str, Any] = {"v": None, "p": c_void_p, "q": c_int64, "i": c_int, "f": c_float}
"""C types by the letters of csrc/cpu/kernels.cpp."""


class CPUKernels:
    """The kernels of a library, ready to be called on the threads of torch.

    Attributes:
        of: dtype -> its kernels, and everything in `plain`.
        plain: the kernels without a dtype, structs, enums and constants, as attributes. A struct
            is a `ctypes` class whose fields are given by name; a field that C++ does not have
            raises AttributeError.

    Raises:
        ConfigError: the library was not built from the sources of this package.
    """

    def __init__(self, path: Path) -> None:
        self._library = library = CDLL(str(path))
        text = None
        if hasattr(library, "vllm_cpu_abi"):
            library.vllm_cpu_abi.restype = c_char_p
            text = library.vllm_cpu_abi()
        lines = [line.split(" ", 1) for line in (text or b"").decode().splitlines()]
        _refuse_stale(path, lines[0][1] if lines else "")
        # `Any`, because functions and structs of ctypes have no precise type.
        self.of: dict[torch.dtype, Any] = {dtype: SimpleNamespace() for dtype in _DTYPES.values()}
        self.plain: Any = SimpleNamespace()
        for kind, description in lines[1:]:
            self._add(*_DESCRIBED[kind](description))
        library.vllm_cpu_isa.restype = c_char_p
        library.vllm_cpu_set_isa.argtypes = [c_char_p]
        library.vllm_cpu_set_isa.restype = c_bool
        library.vllm_cpu_set_isa(None)
        library.vllm_cpu_notice.restype = c_char_p
        notice = library.vllm_cpu_notice()
        if notice is not None:
            logger.warning("%s. The %s kernels run instead.", notice.decode(), self.isa)
        library.vllm_cpu_set_openmp.argtypes = [c_void_p, c_void_p]
        library.vllm_cpu_set_openmp.restype = None
        functions = [find_openmp(name) for name in ("GOMP_parallel", "omp_get_thread_num")]
        if None in functions:
            logger.warning(
                "torch does not use a GNU-compatible OpenMP on this machine: CPU kernels run on "
                "one thread"
            )
            return
        library.vllm_cpu_set_openmp(*(ctypes.cast(found, c_void_p) for found in functions))

    def _add(self, name: str, described: Any, dtype: torch.dtype | None) -> None:
        holders = (self.plain, *self.of.values()) if dtype is None else (self.of[dtype],)
        for holder in holders:
            setattr(holder, name, described)

    @property
    def isa(self) -> str:
        """The instruction set in use: the best one, unless `set_isa` has chosen another one."""
        isa: bytes = self._library.vllm_cpu_isa()
        return isa.decode()

    def set_isa(self, name: str) -> bool:
        """Use another instruction set; must not be called while a kernel runs.

        Return False, and change nothing, if this build lacks it or this processor cannot run it.
        """
        return self._library.vllm_cpu_set_isa(name.encode())


def load_cpu_kernels() -> CPUKernels | None:
    """Load the kernels, once per process; None if there are none.

    None if VLLM_CPU_KERNELS is 0, or if they were not built or cannot be loaded here. The reason is
    logged once, and the torch operators are used instead.

    Raises:
        ConfigError: the library was not built from the sources of this package, or it
            cannot run on the instruction set VLLM_CPU_ISA here.
    """
    return _load() if envs.get().VLLM_CPU_KERNELS else None


def require_cpu_kernels(what: str) -> CPUKernels:
    """Return the kernels, for code that does not work without them.

    Args:
        what: beginning of the error, such as "a program needs".

    Raises:
        RuntimeError: there are none.
    """
    kernels = load_cpu_kernels()
    if kernels is None:
        raise RuntimeError(f"{what} the C++ CPU kernels, which are not built or switched off")
    return kernels


@functools.cache
def _load() -> CPUKernels | None:
    try:
        kernels = CPUKernels(LIBRARY_PATH)
    except OSError as error:
        reason = str(error) if LIBRARY_PATH.exists() else f"{LIBRARY_PATH} was not built"
        logger.warning("not using the C++ CPU kernels, torch operators run instead: %s", reason)
        return None
    wanted = envs.get().VLLM_CPU_ISA
    if wanted is not None and not kernels.set_isa(wanted):
        raise ConfigError(
            f"VLLM_CPU_ISA={wanted!r}: this build has no such kernels, or this processor cannot "
            f"run them. The best set on this machine is {kernels.isa!r}; leave the variable out "
            "to use it."
        )
    logger.debug("C++ CPU kernels loaded, instruction set %s", kernels.isa)
    return kernels


def _refuse_stale(path: Path, build: str) -> None:
    """Check that a library was built from the sources of this package.

    It tells its version and the hash of its sources. With other structs or other meanings of their
    fields, kernels would write anywhere.
    """
    version, _, sources = build.partition(" ")
    expected = hash_sources(_ROOT)
    if expected is None and version != __version__:
        raise ConfigError(
            f"{path} was built for vllm {version or 'of an unknown version'}, but this is "
            f"{__version__}. Install vllm again (pip install --force-reinstall vllm), or set "
            "VLLM_CPU_KERNELS=0 to run without the C++ CPU kernels."
        )
    if expected not in (None, sources):
        raise ConfigError(
            f"{path} was not built from the sources in {_ROOT / 'csrc' / 'cpu'}. Build it again "
            f"(cd {_ROOT} && python setup.py build_ext --inplace), or set VLLM_CPU_KERNELS=0 to "
            f"run without the C++ CPU kernels."
        )


_Described = tuple[str, Any, torch.dtype | None]
"""The description of a name in the library: name, object, and the only dtype for which it
exists."""


def _read_kernel(description: str) -> _Described:
    """Parse the description of a kernel, such as "rms_norm bf16 vpppqqqqfi 139836471".

    The fields are name, dtype, C types (one letter each) and address.
    """
    name, dtype, types, address = description.split()
    function = CFUNCTYPE(*(_C_TYPES[letter] for letter in types))(int(address))
    return name, function, _DTYPES.get(dtype)


def _read_struct(description: str) -> _Described:
    """Parse the description of a struct, such as "Args 24 const T* x; int64_t n, size;"."""
    name, size, declarations = description.split(" ", 2)
    fields = []
    for declaration in declarations.split(";")[:-1]:
        # int64_t becomes ctypes.c_int64; a type that ctypes does not have is an enum of int64_t.
        number = f"c_{declaration.split()[0].removesuffix('_t')}"
        c_type = c_void_p if "*" in declaration else getattr(ctypes, number, c_int64)
        for declarator in declaration.split(","):
            fields.append((declarator.partition("=")[0].split()[-1], c_type))
    struct = type(name, (ctypes.Structure,), {"_fields_": fields, "__slots__": ()})
    if ctypes.sizeof(struct) != int(size):
        raise AssertionError(f"{name} must have {size} bytes for these fields: {declarations}")
    return name, struct, None


def _read_enum(description: str) -> _Described:
    """Parse the description of an enum, such as "Format 8 kFloat, kBf16"; members count from 0."""
    name, _, members = description.split(" ", 2)
    return name, IntEnum(name, members.replace(",", " "), start=0), None


def _read_constant(description: str) -> _Described:
    """Parse the description of a constant, such as "kPanel 64 "."""
    name, value = description.split()
    return name, int(value), None


_DESCRIBED: dict[str, Callable[[str], _Described]] = {
    "kernel": _read_kernel,
    "struct": _read_struct,
    "enum": _read_enum,
    "constant": _read_constant,
}


def packer(struct: Any, names: str) -> Callable[..., bytes]:
    """Return a function that packs field values into the bytes of a struct.

    It is faster than a `ctypes` object.

    Args:
        struct: the struct, from the kernels.
        names: names of the fields in the order in which they will be given.
    """
    fields = struct._fields_
    if names.split() != [name for name, _ in fields]:
        raise AssertionError(f"{struct.__name__} must have exactly the fields {names}")
    letters = {c_void_p: "P", c_int64: "q", c_float: "f"}
    return Struct("".join(letters[c_type] for _, c_type in fields) + "0q").pack
