"""Implement `vllm collect-env`: print facts about the machine for a bug report."""

import argparse
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from vllm import envs
from vllm.env.bridge import has_vendor_library
from vllm.errors import ConfigError
from vllm.platforms.cgroup import ControlGroups
from vllm.platforms.habana import nodes
from vllm.platforms.habana.host import read_host
from vllm.platforms.hpu import LOAD_ERRORS, absent_parts, simulated_card
from vllm.utils import FlexibleArgumentParser
from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.platforms.habana.card_reading import CardReading

_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "numpy",
    "msgspec",
    "habana-torch-plugin",
    "habana-pyhlml",
)
DESCRIPTION = "Print versions, machine and settings for a bug report."
_CPUINFO = Path("/proc/cpuinfo")
_SHARED_MEMORY = Path("/dev/shm")
_CPU_FLAGS = (
    "avx",
    "avx2",
    "f16c",
    "fma",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "bf16",
)


def add_flags(parser: FlexibleArgumentParser) -> None:
    """Declare no flags: the command has none."""


def run(args: argparse.Namespace) -> None:
    """Print the report to stdout, one fact per line."""
    for name, value in _facts():
        sys.stdout.write(f"{name + ':':<22} {value}\n")


def _facts() -> Iterator[tuple[str, str]]:
    yield "vllm", __version__
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "OS", platform.platform()
    yield from _cpu_facts()
    yield from _memory_facts()
    for package in _PACKAGES:
        yield package, _version(package)
    yield from _gaudi_facts()
    yield from _engine_facts()
    yield from (envs.reportable() | _bridge_settings()).items()


def _cpu_facts() -> Iterator[tuple[str, str]]:
    keys: dict[str, str] = {}
    if _CPUINFO.is_file():
        for line in _CPUINFO.read_text().splitlines():
            key, _, value = line.partition(":")
            keys.setdefault(key.strip(), value.strip())
    flags = set((keys.get("flags") or keys.get("Features") or "").split())
    yield "CPU", keys.get("model name") or platform.processor() or platform.machine()
    yield "CPU flags", " ".join(flag for flag in _CPU_FLAGS if flag in flags) or "none of interest"
    usable = f"{len(os.sched_getaffinity(0))} of " if hasattr(os, "sched_getaffinity") else ""
    yield "CPU cores", f"{usable}{os.cpu_count()}"


def _memory_facts() -> Iterator[tuple[str, str]]:
    import psutil

    memory = psutil.virtual_memory()
    yield "Memory", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available"
    if (limit := ControlGroups().memory_limit_bytes()) is not None:
        yield "Memory limit", f"{limit / 2**30:.1f} GiB (of the container or job)"
    if _SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(_SHARED_MEMORY).free
        yield "Shared memory", f"{free / 2**30:.1f} GiB free in {_SHARED_MEMORY}"
    files = _limit(resource.RLIMIT_NOFILE, 1, "")
    yield "Limits", f"{files} open files, {_limit(resource.RLIMIT_MEMLOCK, 2**10, ' KiB')} locked"


def _limit(name: int, unit: int, suffix: str) -> str:
    """Return a soft limit of this process as text."""
    value, _ = resource.getrlimit(name)
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value // unit}{suffix}"


def _gaudi_facts() -> Iterator[tuple[str, str]]:
    """Yield the driver, the device nodes, and what is wrong with them; nothing on a machine without
    software of the vendor.
    """
    count = nodes.num_cards()
    if not has_vendor_library() and not count:
        return
    from vllm.platforms.habana.versions import find_installed

    installed = find_installed()
    yield "Gaudi driver", installed.driver or "not loaded"
    modules = ", ".join(map(str, nodes.card_modules()))
    cards = f"{count} (modules {modules or 'unknown'})" if count else ""
    yield "Gaudi cards", cards or nodes.why_no_card(envs.of_launcher("HABANA_VISIBLE_DEVICES"))
    is_lazy = envs.get().PT_HPU_LAZY_MODE is True
    host = read_host()
    yield "Gaudi host", str(host)
    problems = (
        nodes.why_not_permitted(),
        installed.why_not_loadable(is_lazy=is_lazy),
        installed.driver_mismatch(),
        *host.problems(num_ranks=count),
        *nodes.holders(),
    )
    yield from (("Gaudi problem", problem) for problem in problems if problem)
    yield from (("Gaudi advice", advice) for advice in host.advice())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _engine_facts() -> Iterator[tuple[str, str]]:
    import torch

    from vllm.platforms import resolve_platform

    threads = f"{torch.get_num_threads()} intra-op, {torch.get_num_interop_threads()} inter-op"
    yield "torch threads", threads
    try:
        yield "Platform", resolve_platform("auto").name
    except ConfigError as error:
        yield "Platform", f"none: {error}"
    yield "CPU kernels", _describe_kernels()
    if simulated_card() is not None or has_vendor_library():
        yield "Gaudi kernels", _describe_gaudi_kernels()
    yield from _card_facts()


def _card_facts() -> Iterator[tuple[str, str]]:
    """Yield the sensor readings of the Gaudi cards; nothing without cards."""
    from vllm.platforms import resolve_platform

    try:
        read = resolve_platform("auto").card_reader(1)
    except ConfigError:
        return
    for card in [] if read is None else read():
        yield f"Card {card.index}", _describe_card(card)


def _describe_card(card: "CardReading") -> str:
    used, total = card.memory_used_bytes, card.memory_total_bytes
    facts = [card.name or "unknown"]
    if card.module is not None:
        facts.append(f"module {card.module}")
    if used is not None and total is not None:
        facts.append(f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB used")
    for value, unit in ((card.power_watts, "W"), (card.temperature_celsius, "degrees Celsius")):
        if value is not None:
            facts.append(f"{value:.0f} {unit}")
    if card.utilization is not None:
        facts.append(f"{card.utilization:.0%} busy")
    return ", ".join(facts)


def _bridge_settings() -> dict[str, str]:
    return envs.described_bridge_settings() if has_vendor_library() else {}


def _describe_gaudi_kernels() -> str:
    try:
        absent = absent_parts()
    except LOAD_ERRORS as error:
        return f"habana_frameworks cannot be loaded: {error}"
    return f"absent, with torch operators instead: {', '.join(absent)}" if absent else "all"


def _describe_kernels() -> str:
    from vllm.ops.cpu.library import LIBRARY_PATH, load_cpu_kernels

    if not envs.get().VLLM_CPU_KERNELS:
        return "off: VLLM_CPU_KERNELS=0"
    try:
        library = load_cpu_kernels()  # logs the reason if it fails
    except ConfigError as error:
        return f"refused: {error}"
    if library is None:
        return "not built" if not LIBRARY_PATH.exists() else "built, but they cannot be loaded"
    return f"loaded, instruction set {library.isa}"
