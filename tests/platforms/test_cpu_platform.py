"""Test the answers of the CPU platform."""

import psutil
import pytest
import torch

from vllm import envs
from vllm.errors import ConfigError
from vllm.platforms import resolve_platform
from vllm.platforms.cgroup import ControlGroups

MIB = 2**20


def test_free_memory_is_what_the_machine_has_available():
    free = resolve_platform("cpu").free_memory_bytes()
    assert 0 < free <= psutil.virtual_memory().total


def test_a_container_limit_counts_when_it_is_less(monkeypatch):
    for left in (200 * MIB, None):
        monkeypatch.setattr(ControlGroups, "free_memory_bytes", lambda self, left=left: left)
        free = resolve_platform("cpu").free_memory_bytes()
        assert free == left if left is not None else free > 200 * MIB


def test_cache_memory_reads_as_zero_and_is_committed_only_when_written():
    process = psutil.Process()
    before = process.memory_info().rss
    cache = resolve_platform("cpu").allocate_cache((1024, 1024, 256), torch.bfloat16)
    assert process.memory_info().rss - before < 64 * MIB
    assert cache.dtype == torch.bfloat16 and not cache[-1].any()
    cache[3, 5] = 2.5
    assert float(cache[3, 5, 7]) == 2.5


def test_an_unknown_device_is_refused_with_the_accepted_ones():
    with pytest.raises(ConfigError, match=r"'tpu'.*auto, cpu"):
        resolve_platform("tpu")


def test_compiled_kernels_can_be_switched_off(monkeypatch):
    platform = resolve_platform("cpu")
    assert platform.ops_class.endswith("CPUOps")
    off = envs.Envs.load({"VLLM_CPU_KERNELS": "0"})
    monkeypatch.setattr(envs, "get", lambda: off)
    assert platform.ops_class.endswith("NativeOps")
