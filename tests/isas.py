"""The instruction sets on which tests run the C++ kernels; `tests/conftest.py` has the fixtures."""

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.exhaustive import exhaustive

_X86_ISAS = (
    "amx",
    "amx_portable",
    "avx512_bf16",
    "avx512_vnni",
    "avx512",
    "avx_vnni",
    "avx2",
    "base",
)
_IS_ARM = platform.machine() in ("aarch64", "arm64")
ISAS = ("arm_bf16", "base") if _IS_ARM else _X86_ISAS

_CPUINFO = Path("/proc/cpuinfo")
_HAS_AMX = _CPUINFO.exists() and "amx_tile" in _CPUINFO.read_text()

ONE_BY_ONE: list[Any] = [
    exhaustive(isa) if isa == "amx_portable" and _HAS_AMX else isa for isa in ISAS
]
"""For kernels with a matmul. test_amx.py tests that `amx_portable` has the bits of `amx`."""

_DISTINCT = ("avx512", "avx2", "base", "arm_bf16")
VECTORS: list[Any] = [isa if isa in _DISTINCT else exhaustive(isa) for isa in ISAS]
"""For kernels without a matmul. On x86, the other sets compile the same source as these three."""


class InstructionSets:
    """Switch between the instruction sets of a build, and back to the best one at the end."""

    def __init__(self) -> None:
        from vllm.ops.cpu.library import load_cpu_kernels  # imports torch

        library = load_cpu_kernels()
        if library is None:
            pytest.skip("the C++ kernels are not built")
        self._library, self._best = library, library.isa

    def use(self, isa: str) -> None:
        """Switch to this set; skip the test if the build or the processor does not have it."""
        if not self._library.set_isa(isa):
            pytest.skip(f"no {isa} in this build or on this processor")

    def __iter__(self) -> Iterator[str]:
        for isa in ISAS:
            if self._library.set_isa(isa):
                print(f"instruction set: {isa}")  # of a test that fails, pytest shows the last one
                yield isa

    def restore(self) -> None:
        """Switch back to the best instruction set."""
        self._library.set_isa(self._best)
