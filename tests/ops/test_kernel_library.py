"""Test how the kernel library describes itself, and that a library of other sources is refused."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.reach import load_kernels_again
from vllm import envs
from vllm.errors import ConfigError
from vllm.ops.cpu import library as library_module
from vllm.ops.cpu.library import LIBRARY_PATH, CPUKernels, load_cpu_kernels
from vllm.ops.cpu.source_hash import hash_sources
from vllm.ops.cpu.weights.weight_format import WeightFormat
from vllm.version import __version__

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")


@pytest.fixture
def copy_with(tmp_path) -> Callable[[str, str], Path]:
    """Return a function that copies the library and replaces a text by another one of the same
    length.
    """

    def copy(old: str, new: str) -> Path:
        content = LIBRARY_PATH.read_bytes()
        assert old.encode() in content and len(old) == len(new)
        path = tmp_path / "kernels.so"
        path.write_bytes(content.replace(old.encode(), new.encode()))
        return path

    return copy


def test_a_library_of_other_sources_is_refused_with_the_command_that_builds_it(copy_with):
    built = hash_sources(ROOT)
    path = copy_with(built, built[::-1])
    command = re.escape(f"cd {ROOT} && python setup.py build_ext --inplace")
    with pytest.raises(ConfigError, match=f"kernels.so was not built from .*{command}"):
        CPUKernels(path)


def test_a_library_that_does_not_describe_itself_is_refused(copy_with):
    """Libraries without a compiled-in hash were like this."""
    path = copy_with("vllm_cpu_abi", "vllm_cpu_old")
    assert not hasattr(ctypes.CDLL(str(path)), "vllm_cpu_abi")
    with pytest.raises(ConfigError, match=r"python setup\.py build_ext --inplace"):
        CPUKernels(path)


def test_without_sources_the_version_of_the_library_decides(copy_with, monkeypatch):
    """A package that was installed from a wheel has no sources."""
    monkeypatch.setattr(library_module, "hash_sources", lambda folder: None)
    assert CPUKernels(LIBRARY_PATH).isa == load_cpu_kernels().isa
    build = f"{__version__} {hash_sources(ROOT)}"
    path = copy_with(build, "9" + build[1:])
    with pytest.raises(ConfigError, match=f"9.* but this is {__version__}. Install vllm again"):
        CPUKernels(path)


def test_a_stale_library_is_not_looked_at_when_the_kernels_are_switched_off(monkeypatch):
    def refuse(path) -> None:
        raise AssertionError("the library was loaded")

    monkeypatch.setattr(library_module, "CPUKernels", refuse)
    monkeypatch.setenv("VLLM_CPU_KERNELS", "0")
    envs.get.cache_clear()
    try:
        assert load_cpu_kernels() is None
    finally:
        monkeypatch.undo()
        envs.get.cache_clear()


@pytest.mark.parametrize("isa", ["base", "mmx"])
def test_the_instruction_set_of_the_variable_runs_or_is_refused(monkeypatch, isa):
    monkeypatch.setenv("VLLM_CPU_ISA", isa)
    best = load_cpu_kernels().isa
    envs.get.cache_clear()
    try:
        if isa == "base":
            assert load_kernels_again().isa == "base"
        else:
            with pytest.raises(
                ConfigError, match=f"VLLM_CPU_ISA='mmx': .*best set on this machine is '{best}'"
            ):
                load_kernels_again()
    finally:
        monkeypatch.undo()
        envs.get.cache_clear()
        assert load_cpu_kernels().set_isa(best)


def test_each_change_of_a_source_changes_the_hash(tmp_path):
    assert hash_sources(tmp_path) is None
    folder = tmp_path / "csrc" / "cpu"
    folder.mkdir(parents=True)
    hashes = set()
    for path in (folder / "a.h", folder / "b.cpp", tmp_path / "setup.py"):
        (tmp_path / "setup.py").touch()
        path.write_text("int x;")
        hashes.add(hash_sources(tmp_path))
        path.write_text("int y;")
        hashes.add(hash_sources(tmp_path))
    assert len(hashes) == 6


def test_structs_have_the_fields_of_csrc_and_no_others():
    weight = load_cpu_kernels().plain.LinearWeight(in_features=5, format=2)
    assert (weight.in_features, weight.format, weight.panels) == (5, 2, None)
    with pytest.raises(AttributeError, match="num_inputs"):
        weight.num_inputs = 5
    with pytest.raises(AttributeError, match="num_inputs"):
        load_cpu_kernels().plain.LinearWeight(num_inputs=5)


def test_a_kernel_takes_as_many_arguments_as_its_function_has():
    rotary_embedding = load_cpu_kernels().of[torch.float32].rotary_embedding
    with pytest.raises(TypeError, match="at least 14 argument"):
        rotary_embedding(None, None)


def test_formats_of_weights_are_those_of_csrc():
    known = load_cpu_kernels().plain.WeightFormat
    assert [f.value for f in WeightFormat] == [f.name for f in known]
