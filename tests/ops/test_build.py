"""Test how the C++ kernels are built and loaded, and running without them."""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vllm.ops.cpu.library import LIBRARY_PATH
from vllm.ops.cpu.operators import load_cpu_kernels

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def setup_module() -> ModuleType:
    """Import setup.py as a module; it builds only when it is run."""
    spec = importlib.util.spec_from_file_location("vllm_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_python(code: str, **env: str) -> str:
    """Return the standard output of a new interpreter that imports this checkout."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.skipif(load_cpu_kernels() is None, reason="the C++ kernels are not built")
def test_kernels_run_on_the_threads_of_torch_and_a_forked_child_on_one():
    """One process for both, because its imports take most of the time."""
    out = run_python(
        """
import os, re, signal, torch
from vllm.ops.cpu.operators import CPUOps
from vllm.ops.cpu.weights.linear import PackedWeight
torch.set_num_threads(3)
x, weight = torch.randn(2000, 1000), torch.ones(1000)
x.mul(2), x @ x.T  # torch starts its threads
num_threads = len(os.listdir("/proc/self/task"))
CPUOps().rms_norm(x, weight, 1e-5)
print(num_threads, len(os.listdir("/proc/self/task")))
maps = open("/proc/self/maps").read()
print(*sorted(set(re.findall(r"/\\S*lib(?:gomp|iomp|omp)\\S*", maps))))
packed, x = PackedWeight.pack(torch.ones(1024, 1024)), torch.ones(64, 1024)
packed.linear(x)
pid = os.fork()
if pid == 0:
    signal.alarm(30)  # a child that waits for threads it does not have is killed
    torch.set_num_threads(1)
    os._exit(int(packed.linear(x)[0, 0]) // 512)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
        OMP_NUM_THREADS="3",
    )
    (before, after), runtimes, (code,) = (line.split() for line in out.splitlines())
    assert int(before) >= 3
    assert before == after, "the kernel started threads of its own"
    assert len(runtimes) == 1, f"more than one OpenMP runtime: {runtimes}"
    assert code == "2"


@pytest.mark.parametrize("compiler", ["/nonexistent/c++", "false"])
def test_without_a_working_compiler_the_build_succeeds_and_says_what_is_missing(compiler, tmp_path):
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", f"--build-lib={tmp_path}",
         f"--build-temp={tmp_path}"],
        cwd=ROOT,
        env={**os.environ, "CXX": compiler},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0
    assert "installed WITHOUT its C++ CPU kernels" in done.stderr
    assert compiler in done.stderr
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_kernels_build_from_source_and_need_no_library_but_the_c_ones(setup_module, tmp_path):
    # This library loads only if it was built from these sources, and a build takes a minute.
    library = LIBRARY_PATH
    if load_cpu_kernels() is None:
        library = tmp_path / "kernels.so"
        setup_module.build_kernels(tmp_path, library)
    out = run_python(f"import ctypes; print(ctypes.CDLL({str(library)!r}).vllm_cpu_isa() != 0)")
    assert out == "True\n"
    assert b"GOMP_" not in library.read_bytes()
    assert b"libgomp" not in library.read_bytes()


HAS_COMPILER = shutil.which("c++") is not None
STUB = """
#include "processor.h"
#include "abi.h"
namespace vllm_base {
extern const vllm_cpu::Kernel kernels[] = {{}};
extern const vllm_cpu::Type types[] = {{}};
}
namespace vllm_older { extern const vllm_cpu::Kernel kernels[] = {{}}; }
namespace vllm_cpu {
bool processor_has_amx() { return false; }
bool can_use_amx(const Kernel*, const Kernel*) { return false; }
const char* amx_notice() { return nullptr; }
}
"""


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("isas", "chosen", "missed"),
    [
        ("LEFT_OUT(newer, true) ISA(older, true)", b"older", b"newer"),
        ("LEFT_OUT(newer, false) ISA(older, true)", b"older", None),
        ("ISA(older, true) LEFT_OUT(oldest, true)", b"older", None),
    ],
)
def test_a_library_of_another_processor_names_the_kernels_that_are_missing(
    isas, chosen, missed, tmp_path
):
    library = tmp_path / "dispatch.so"
    (tmp_path / "stub.cpp").write_text(STUB)
    subprocess.run(
        ["c++", "-std=c++17", "-shared", "-fPIC", f"-I{ROOT}/csrc/cpu", f"-DVLLM_ISAS={isas}",
         "-DVLLM_TEST_ISAS=", '-DVLLM_BUILD="a"', str(ROOT / "csrc/cpu/dispatch.cpp"),
         str(tmp_path / "stub.cpp"), "-o", str(library)],
        check=True,
    )  # fmt: skip
    dispatch = ctypes.CDLL(str(library))
    dispatch.vllm_cpu_isa.restype = dispatch.vllm_cpu_notice.restype = ctypes.c_char_p
    assert dispatch.vllm_cpu_set_isa(None)
    assert dispatch.vllm_cpu_isa() == chosen
    assert not dispatch.vllm_cpu_set_isa(b"newer")
    notice = dispatch.vllm_cpu_notice()
    assert notice is None if missed is None else b"processor has " + missed in notice


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
def test_a_build_in_place_has_the_kernels_of_this_processor(setup_module, monkeypatch, tmp_path):
    isas = ["amx", "avx512", "avx2"]
    table = [setup_module.InstructionSet(name, "", "true") for name in isas]
    monkeypatch.setattr(setup_module, "ISAS", {setup_module.platform.machine().lower(): table})
    commands = []

    def run(command: list[str]) -> str:
        commands.append(command)
        return "avx2" if command == [str(tmp_path / "native_isas")] else ""

    monkeypatch.setattr(setup_module, "run", run)
    setup_module.build_kernels(tmp_path, tmp_path / "kernels.so", is_native=True)
    compiled = {arg for command in commands for arg in command if arg.startswith("-DVLLM_ISA=")}
    assert compiled == {"-DVLLM_ISA=vllm_base", "-DVLLM_ISA=vllm_avx2"}
    rows = "-DVLLM_ISAS=LEFT_OUT(amx, true) LEFT_OUT(avx512, true) ISA(avx2, true)"
    assert any(rows in command for command in commands)


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
def test_the_processor_is_asked_what_it_runs(setup_module, monkeypatch, tmp_path):
    machine = setup_module.platform.machine().lower()
    rows = [("has", "1 < 2"), ("lacks", "2 < 1")]
    table = [setup_module.InstructionSet(name, "", runs_here) for name, runs_here in rows]
    monkeypatch.setitem(setup_module.ISAS, machine, table)
    assert setup_module.isas_here(["c++"], tmp_path) == table[:1]
    # A compiler that does not know a feature of a new processor compiles what it can.
    table.append(setup_module.InstructionSet("unknown", "", 'HAS("avx99")'))
    assert setup_module.isas_here(["c++"], tmp_path) == table


@pytest.mark.skipif(load_cpu_kernels() is None, reason="the C++ kernels are not built")
def test_loading_the_library_runs_no_code_of_an_instruction_set():
    """A constructor of a table would be compiled for each instruction set. It would stop the
    process with SIGILL if the processor lacks one of them.
    """
    assert b"_GLOBAL__sub_I_" not in LIBRARY_PATH.read_bytes()


def test_requirement_files_are_read_with_the_files_they_include(setup_module, tmp_path):
    (tmp_path / "common.txt").write_text("# why\nnumpy>=1,<2  # arrays\n\n")
    (tmp_path / "cpu.txt").write_text("-r common.txt\ntorch>=2,<3\n")
    assert setup_module.read_requirements(tmp_path / "cpu.txt") == ["numpy>=1,<2", "torch>=2,<3"]


def test_only_the_cpu_installs_torch(setup_module):
    names = {
        device: {
            requirement.split(">")[0]
            for requirement in setup_module.read_requirements(ROOT / f"requirements-{device}.txt")
        }
        for device in ("cpu", "hpu")
    }
    assert names["cpu"] - names["hpu"] == {"torch"}


def test_target_device_is_the_variable_or_what_the_machine_has(setup_module, monkeypatch):
    for value in ("cpu", "hpu"):
        monkeypatch.setenv("VLLM_TARGET_DEVICE", value)
        assert setup_module.target_device() == value
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "tpu")
    with pytest.raises(SystemExit, match="'tpu': it must be 'cpu' or 'hpu'"):
        setup_module.target_device()


def test_build_isolation_does_not_hide_the_vendors_software(setup_module, monkeypatch, tmp_path):
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    folders = {"purelib": str(tmp_path), "platlib": str(tmp_path)}
    monkeypatch.setattr(setup_module.sysconfig, "get_path", folders.__getitem__)
    assert setup_module.target_device() == "cpu"
    (tmp_path / "habana_frameworks" / "mediapipe").mkdir(parents=True)  # another package of it
    assert setup_module.target_device() == "cpu"
    (tmp_path / "habana_frameworks" / "torch").mkdir()
    assert setup_module.target_device() == "hpu"
