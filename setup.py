"""Builds the package: what cannot be said in pyproject.toml.

Two things: the requirements depend on the device and on the torch that is there, and csrc/cpu
becomes a plain shared library (no Python or torch headers, so one build serves every Python and
every torch). Only setuptools is needed; torch must never be a build requirement, because build
isolation would download it.
"""

import contextlib
import importlib.util
import os
import platform
import runpy
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = Path("csrc") / "cpu"

# No -fopenmp and no OpenMP library: the kernels run on the threads of the runtime that torch has
# loaded (csrc/cpu/parallel.h). -ffp-contract=off: rounding is written out, not chosen.
CXX_FLAGS = [
    *("-std=c++17", "-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-exceptions", "-fno-rtti"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas"),
]


class InstructionSet(NamedTuple):
    """For which the kernels are compiled once more; the best that the processor has is used."""

    name: str
    flags: str
    """What the compiler is told."""
    runs_here: str
    """C++: whether this processor has it, with the macros of csrc/cpu/processor.h."""
    is_for_tests: bool = False
    """Never the best: it runs only when it is asked for by its name."""


_AVX2 = "-mavx2 -mfma"
_HAS_AVX2 = 'HAS("avx2") && HAS("fma")'
_AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mprefer-vector-width=512"
_HAS_AVX512 = 'HAS("avx512f") && HAS("avx512bw") && HAS("avx512vl") && HAS("avx512dq")'
_HAS_VNNI = _HAS_AVX512 + ' && HAS("avx512vnni")'
_AVX512_BF16 = _AVX512 + " -mavx512vnni -mavx512bf16"
_HAS_AVX512_BF16 = _HAS_VNNI + ' && HAS("avx512bf16")'

# Best first. `base`, what the compiler targets without flags, comes after them.
X86_ISAS = [
    InstructionSet(
        "amx",
        _AVX512_BF16 + " -mamx-tile -mamx-bf16 -mamx-int8",
        _HAS_AVX512_BF16 + " && HAS_AMX",
    ),
    InstructionSet("avx512_bf16", _AVX512_BF16, _HAS_AVX512_BF16),
    InstructionSet("avx512_vnni", _AVX512 + " -mavx512vnni", _HAS_VNNI),
    InstructionSet("avx512", _AVX512, _HAS_AVX512),
    InstructionSet("avx_vnni", _AVX2 + " -mavxvnni", _HAS_AVX2 + " && HAS_AVX_VNNI"),
    InstructionSet("avx2", _AVX2, _HAS_AVX2),
    # The kernels of amx on tiles written in C++, to test them where there is no AMX.
    InstructionSet(
        "amx_portable",
        _AVX512_BF16 + " -DVLLM_PORTABLE_TILES",
        _HAS_AVX512_BF16,
        is_for_tests=True,
    ),
]
ARM_ISAS = [
    InstructionSet("arm_bf16", "-march=armv8.2-a+fp16+dotprod+bf16+i8mm", "HAS_ARM_BF16"),
]
ISAS = {"x86_64": X86_ISAS, "amd64": X86_ISAS, "aarch64": ARM_ISAS, "arm64": ARM_ISAS}
"""By the name of the machine."""


class BuildError(Exception):
    """The kernels cannot be built here; the message says why."""


def target_device() -> str:
    """The device whose requirements are installed: VLLM_TARGET_DEVICE, or hpu where the vendor's
    software is installed, or cpu."""
    value = os.environ.get("VLLM_TARGET_DEVICE", "").strip().lower()
    if value in ("cpu", "hpu"):
        return value
    if value:
        raise SystemExit(f"VLLM_TARGET_DEVICE={value!r}: it must be 'cpu' or 'hpu'")
    return "hpu" if has_habana() else "cpu"


def has_habana() -> bool:
    """True when habana_frameworks.torch is installed. Build isolation hides it from the import
    system, so the folders of the interpreter are searched as well. Other packages of the vendor
    are in habana_frameworks too."""
    with contextlib.suppress(ModuleNotFoundError):  # there is no habana_frameworks at all
        if importlib.util.find_spec("habana_frameworks.torch") is not None:
            return True
    return any((folder / "habana_frameworks" / "torch").is_dir() for folder in package_folders())


def package_folders() -> list[Path]:
    """Where the packages of this interpreter are, also inside an isolated build."""
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    return [Path(path) for path in dict.fromkeys(paths)]


def triton_requirement() -> list[str]:
    """One that keeps to the torch that is installed: xgrammar would bring the newest triton.

    Empty where no torch is installed, or where nothing is known of it.
    """
    path = [*sys.path, *map(str, package_folders())]
    torch = next(iter(distributions(name="torch", path=path)), None)
    table = runpy.run_path(str(ROOT / "vllm" / "utils" / "triton_range.py"))
    wanted = table["triton_range"](torch.version) if torch is not None else None
    if wanted is None:
        return []
    return [f"triton{wanted}; platform_system == 'Linux' and platform_machine == 'x86_64'"]


def read_requirements(path: Path) -> list[str]:
    """The requirements of a file and of those that its `-r` lines name, without constraints."""
    requirements = []
    for line in path.read_text().splitlines():
        requirement = line.split("#")[0].strip()
        if requirement.startswith("-r"):
            requirements += read_requirements(path.parent / requirement[2:].strip())
        elif requirement and not requirement.startswith("-c"):
            requirements.append(requirement)
    return requirements


def find_compiler() -> list[str]:
    """The C++ compiler as a command: $CXX, or the first that is installed.

    Raises:
        BuildError: there is none.
    """
    if os.environ.get("CXX"):
        command = shlex.split(os.environ["CXX"])
        if shutil.which(command[0]) is None:
            raise BuildError(f"CXX is {command[0]!r}, which is not a program")
        return command
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name) is not None:
            return [name]
    raise BuildError("no C++ compiler (c++, g++ or clang++) was found, and CXX is not set")


def run(command: list[str]) -> str:
    """Run a command of the compiler, or a program of it, and return its output; print the command.

    Raises:
        BuildError: it failed; has the last lines of what it said.
    """
    print(shlex.join(command), flush=True)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        said = "\n".join(done.stderr.splitlines()[-20:])
        raise BuildError(f"{shlex.join(command)}\nfailed with exit code {done.returncode}:\n{said}")
    if done.stderr:
        print(done.stderr, file=sys.stderr, flush=True)
    return done.stdout


def build_identity() -> str:
    """What `vllm.ops.cpu.library` accepts: this version, and the hash of these sources."""
    version = runpy.run_path(str(ROOT / "vllm" / "version.py"))["__version__"]
    source_hash = runpy.run_path(str(ROOT / "vllm" / "ops" / "cpu" / "source_hash.py"))
    return f"{version} {source_hash['hash_sources'](ROOT)}"


def requires_kernels() -> bool:
    """Return whether REQUIRE_CPU_KERNELS is 1: a wheel for other machines must have all kernels."""
    value = os.environ.get("REQUIRE_CPU_KERNELS", "0")
    if value not in ("0", "1"):
        raise SystemExit(f"REQUIRE_CPU_KERNELS={value!r}: it must be 0 or 1")
    return value == "1"


def isas_here(compiler: list[str], objects_dir: Path) -> list[InstructionSet]:
    """Return the instruction sets that this processor runs; all, if the compiler is too old to ask
    for some of them.
    """
    isas = ISAS.get(platform.machine().lower(), [])
    program, source = str(objects_dir / "native_isas"), str(CSRC / "native_isas.cpp")
    rows = " ".join(f"ISA({isa.name}, {isa.runs_here})" for isa in isas)
    try:
        run([*compiler, "-std=c++17", f"-DVLLM_ISAS={rows}", source, "-o", program])
        names = run([program]).split()
    except BuildError as error:
        print(f"compiling for all processors: {error}", file=sys.stderr, flush=True)
        return isas
    return [isa for isa in isas if isa.name in names]


def build_kernels(objects_dir: Path, library: Path, *, is_native: bool = False) -> None:
    """Compile csrc/cpu and link it.

    An instruction set that the compiler does not know is left out, unless all are required.

    Args:
        objects_dir: folder for compiled files.
        library: the file to write.
        is_native: leave out the instruction sets that this processor lacks, which takes most of
            the time; the library names the one that another processor misses.

    Raises:
        BuildError: there is no compiler, or the portable kernels do not compile, or
            REQUIRE_CPU_KERNELS is 1 and the compiler does not know an instruction set.
    """
    compiler = find_compiler()
    objects_dir.mkdir(parents=True, exist_ok=True)
    library.parent.mkdir(parents=True, exist_ok=True)

    def compile_source(source: str, name: str, flags: list[str]) -> str:
        target = str(objects_dir / f"{name}.o")
        run([*compiler, *CXX_FLAGS, *flags, "-c", str(CSRC / source), "-o", target])
        return target

    def compile_kernels(name: str, flags: str) -> str:
        defines = [f"-DVLLM_ISA=vllm_{name}", *flags.split()]
        return compile_source("kernels.cpp", f"kernels_{name}", defines)

    build = build_identity()  # of the sources now, not of those when they are compiled
    isas = ISAS.get(platform.machine().lower(), [])
    chosen = isas_here(compiler, objects_dir) if is_native else isas
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        base = pool.submit(compile_kernels, "base", "")
        shared = [
            pool.submit(compile_source, f"{name}.cpp", name, ["-DVLLM_ISA=vllm_base"])
            for name in ("runtime", "amx")
        ]
        pending = {isa: pool.submit(compile_kernels, isa.name, isa.flags) for isa in chosen}
    objects = [base.result(), *(source.result() for source in shared)]
    rows: dict[bool, list[str]] = {False: [], True: []}  # by is_for_tests
    for isa in isas:
        if isa not in pending:
            rows[isa.is_for_tests].append(f"LEFT_OUT({isa.name}, {isa.runs_here})")
            continue
        try:
            objects.append(pending[isa].result())
            rows[isa.is_for_tests].append(f"ISA({isa.name}, {isa.runs_here})")
        except BuildError as error:
            if requires_kernels():
                raise
            print(f"left out the {isa.name} kernels: {error}", file=sys.stderr, flush=True)
    defines = [
        f"-DVLLM_ISAS={' '.join(rows[False])}",
        f"-DVLLM_TEST_ISAS={' '.join(rows[True])}",
        f'-DVLLM_BUILD="{build}"',
    ]
    objects.append(compile_source("dispatch.cpp", "dispatch", defines))
    run([*compiler, "-shared", *objects, "-o", str(library)])


def fallback_notice(reason: str) -> str:
    """What to say when the kernels could not be built."""
    rule = "-" * 88
    return "\n".join(
        [
            rule,
            "vllm is installed WITHOUT its C++ CPU kernels.",
            *(f"  {line}" for line in reason.splitlines()),
            "Everything works: the torch operators run instead. On the CPU they are slower,",
            "above all paged attention; on Gaudi nothing changes. To get the kernels, install a",
            "C++17 compiler (g++ 9 or clang++ 12, or newer) and install vllm again, or run",
            "    python setup.py build_ext --inplace",
            "in a checkout.",
            rule,
        ]
    )


class BuildKernels(build_ext):
    """Builds `vllm/ops/_cpu_kernels.so`.

    A build in place, as of `pip install -e`, has the kernels for this processor: one that does not
    travel needs no others. A wheel has kernels for all processors of this architecture, and so has
    any build with REQUIRE_CPU_KERNELS=1. Without a compiler it builds nothing, and torch serves;
    with REQUIRE_CPU_KERNELS=1 it fails.
    """

    def run(self) -> None:
        # setuptools resets `inplace` while it builds.
        self.is_native = bool(self.inplace or self.editable_mode) and not requires_kernels()
        super().run()

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name)).resolve()
        objects_dir = Path(self.build_temp).resolve() / "cpu_kernels"
        try:
            build_kernels(objects_dir, library, is_native=self.is_native)
        except BuildError as error:
            if requires_kernels():
                raise SystemExit(f"REQUIRE_CPU_KERNELS=1: {error}") from None
            library.unlink(missing_ok=True)  # of an earlier build, perhaps of other sources
            print(fallback_notice(str(error)), file=sys.stderr, flush=True)

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"  # no Python ABI in the name


class PlatformWheel(bdist_wheel):
    """A wheel for this platform and any Python: the library knows nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    readme = ROOT / "README.md"
    setup(
        install_requires=[
            *read_requirements(ROOT / f"requirements-{target_device()}.txt"),
            *triton_requirement(),
        ],
        long_description=readme.read_text() if readme.exists() else "",
        long_description_content_type="text/markdown",
        # optional: setuptools accepts that the file was not built
        ext_modules=[Extension("vllm.ops._cpu_kernels", sources=[], optional=True)],
        cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
    )
