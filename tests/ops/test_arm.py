"""Test the ARM kernels with a cross compiler and an emulator, if both are installed.

Debian has them as g++-aarch64-linux-gnu and qemu-user.
"""

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CXX, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="setup_module")
FLAGS = {"base": "", **{isa.name: isa.flags for isa in SETUP["ARM_ISAS"]}}

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(CXX is None, reason="no cross compiler for ARM"),
]


def compile_for_arm(name: str, *arguments: str) -> None:
    flags = [*SETUP["CXX_FLAGS"], "-O1", *FLAGS[name].split(), f"-DVLLM_ISA=vllm_{name}"]
    command = [CXX, *flags, f"-I{ROOT / 'csrc' / 'cpu'}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.parametrize("name", FLAGS)
def test_all_kernels_compile_for_arm_without_a_warning(name, tmp_path):
    compile_for_arm(name, "-c", str(ROOT / "csrc/cpu/kernels.cpp"), "-o", str(tmp_path / "k.o"))


@pytest.mark.skipif(EMULATOR is None, reason="no emulator of ARM")
@pytest.mark.parametrize("name", FLAGS)
def test_products_and_attention_are_right_under_emulation(name, tmp_path):
    program = str(tmp_path / "driver")
    sources = [str(HERE / "kernel_driver.cpp"), str(ROOT / "csrc/cpu/runtime.cpp")]
    compile_for_arm(name, "-static", *sources, "-o", program)
    done = subprocess.run([EMULATOR, "-cpu", "max", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right") == 17
