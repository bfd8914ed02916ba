"""Test the threads of the C++ kernels: more threads than cores, and how evenly they divide the
work.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.ops.test_cpu_linear import packed_of
from vllm.ops.cpu.library import load_cpu_kernels

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc" / "cpu"
CXX = shutil.which("c++")

needs_compiler = pytest.mark.skipif(CXX is None, reason="no C++ compiler")


def build(source: str, program: Path, *flags: str) -> None:
    """Compile a program of this folder with csrc/cpu/runtime.cpp."""
    common = ["-std=c++17", "-pthread", "-Wno-psabi", "-DVLLM_ISA=vllm_base", f"-I{CSRC}", *flags]
    sources = [str(HERE / source), str(CSRC / "runtime.cpp")]
    subprocess.run([CXX, *common, *sources, "-o", str(program)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build loops on a team of threads, under ThreadSanitizer where the compiler supports it."""
    program = tmp_path_factory.mktemp("team") / "team"
    try:
        build("thread_driver.cpp", program, "-O1", "-fsanitize=thread")
        subprocess.run([str(program), "2", "1"], check=True, capture_output=True)
    # The compiler has no library for the sanitizer, or this kernel does not support it.
    except subprocess.CalledProcessError:
        build("thread_driver.cpp", program, "-O1")
    return program


@needs_compiler
@pytest.mark.parametrize(
    ("num_threads", "num_loops"), [(2, 100), (8, 50), (16, 40), (64, 15), (600, 1)]
)
def test_each_index_is_visited_once_and_no_memory_is_raced_for(team, num_threads, num_loops):
    command = [str(team), str(num_threads), str(num_loops)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout + done.stderr[:2000]


@pytest.mark.skipif(load_cpu_kernels() is None, reason="the C++ kernels are not built")
def test_64_threads_have_the_bits_of_one(restore_threads):
    weight, x = torch.randn(2048, 512).bfloat16(), torch.randn(40, 512).bfloat16()
    packed = packed_of(weight, None)
    torch.set_num_threads(1)
    alone = packed.linear(x)
    for num_threads in (8, 64):
        torch.set_num_threads(num_threads)
        assert torch.equal(packed.linear(x), alone)


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[tuple[str, int], float]]:
    """Return number of threads -> (layer, rows) -> the largest work of a thread divided by the
    mean.
    """
    program = tmp_path_factory.mktemp("shares") / "shares"
    build("work_shares.cpp", program, "-O0")
    found: dict[int, dict[tuple[str, int], float]] = {}
    for num_threads in (8, 32, 64, 128):
        command = [str(program), str(num_threads)]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found[num_threads] = {}
        for line in map(json.loads, lines.splitlines()):
            found[num_threads][line["name"], line["rows"]] = line["largest_over_mean"]
    return found


SIZES = {
    "1b": {"qkv": 3072 * 2048, "o": 2048 * 2048, "gate_up": 16384 * 2048, "down": 8192 * 2048},
    "8b": {"qkv": 6144 * 4096, "o": 4096 * 4096, "gate_up": 28672 * 4096, "down": 14336 * 4096},
}
"""Weights of a layer, of Llama 3."""


@needs_compiler
@pytest.mark.parametrize(
    ("model", "rows", "num_threads", "most"),
    [
        ("1b", 1, 8, 1.01),
        ("1b", 1, 32, 1.05),
        ("1b", 1, 64, 1.4),  # a matmul with 2,048 outputs has work for 32 threads
        ("1b", 1, 128, 2.5),
        ("1b", 1024, 64, 1.02),
        ("1b", 1024, 128, 1.05),
        ("8b", 1, 32, 1.01),
        ("8b", 1, 64, 1.05),
        ("8b", 16, 64, 1.05),
        ("8b", 1, 128, 1.5),
        ("8b", 1024, 128, 1.02),
    ],
)
def test_threads_have_equal_shares_of_a_layer(shares, model, rows, num_threads, most):
    assert 1 <= share_of_a_layer(shares[num_threads], model, rows) <= most


@needs_compiler
@pytest.mark.parametrize("model", SIZES)
@pytest.mark.parametrize("num_threads", [8, 32, 64, 128])
def test_threads_have_equal_shares_of_a_prompt_on_matrix_tiles(shares, model, num_threads):
    assert 1 <= share_of_a_layer(shares[num_threads], model, 1024, " on tiles") <= 1.03


def share_of_a_layer(
    shares: dict[tuple[str, int], float], model: str, rows: int, kind: str = ""
) -> float:
    """Return the largest work of a thread divided by the mean, by the sizes of the weights."""
    sizes = SIZES[model]
    time = sum(size * shares[f"{model} {name}{kind}", rows] for name, size in sizes.items())
    return time / sum(sizes.values())


@needs_compiler
@pytest.mark.parametrize(
    ("name", "rows", "num_threads", "most"),
    [
        ("1b head", 1, 128, 1.05),
        ("1 x 8192 keys", 1, 128, 1.01),
        ("1 x 2048 keys", 1, 64, 1.01),
        ("16 x 1024 keys", 16, 128, 1.01),
        ("tiny gate_up", 1024, 128, 1.1),
    ],
)
def test_threads_have_equal_shares_of_other_work(shares, name, rows, num_threads, most):
    assert 1 <= shares[num_threads][name, rows] <= most
