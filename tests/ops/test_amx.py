"""Test the machine code of the AMX kernels, on a processor with AMX or under an emulator."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm.ops.cpu.library import load_cpu_kernels

HERE = Path(__file__).parent
CXX = shutil.which("c++")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the output of `amx_against_portable.py`, its log, and whether it ran without the
    emulator.
    """
    library = load_cpu_kernels()
    if library is None:
        pytest.skip("the C++ kernels are not built")
    best = library.isa
    is_real = library.set_isa("amx")
    can_run = library.set_isa("amx_portable")
    library.set_isa(best)
    if not can_run:
        pytest.skip("the processor has no AVX512-BF16, or the compiler knows no AMX")
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "2"}
    if not is_real:
        if CXX is None:
            pytest.skip("no C++ compiler for the emulator")
        emulator = tmp_path_factory.mktemp("amx") / "amx_emulator.so"
        source = str(HERE / "amx_emulator.cpp")
        flags = ["-std=c++17", "-O2", "-fPIC", "-shared"]
        subprocess.run([CXX, *flags, source, "-o", str(emulator)], check=True)
        env["LD_PRELOAD"] = str(emulator)
    program = str(HERE / "amx_against_portable.py")
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "is_real": is_real, "log": done.stderr}


def test_amx_has_the_bits_of_portable_tiles(ran):
    assert ran["compared"] > 90
    assert ran["differing"] == []


def test_every_product_ran_and_threads_gave_the_tiles_back(ran):
    if ran["is_real"]:
        pytest.skip("the instructions are counted by the emulator")
    assert ran["granted"] == "amx"
    assert min(ran["counters"].values()) > 100
    assert not ran["is_configured"]


def test_without_permission_or_with_wrong_products_the_next_best_set_runs(ran):
    if ran["is_real"]:
        pytest.skip("this processor has AMX")
    assert ran["refused"] == ran["no room"] == ran["wrong"] == "avx512_bf16"
    lines = [line for line in ran["log"].splitlines() if "AMX is not used" in line]
    assert len(lines) == 3
    assert "refuses this process the tiles (arch_prctl: Operation not permitted)" in lines[0]
    assert "a thread has an alternate signal stack that is too small for them)" in lines[1]
    assert "its product of int8 weights is wrong on this processor" in lines[2]
    assert all(line.endswith("The avx512_bf16 kernels run instead.") for line in lines)
