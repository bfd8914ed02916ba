"""Compare settings of the machine with the settings in the vendor's guides.

Most can only be changed by root on the host, so the engine only names them. Reads files of the
system; opens no card and runs no program.
"""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from vllm.platforms.habana import nodes

_MEMINFO = Path("/proc/meminfo")
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
_NUMA_BALANCING = Path("/proc/sys/kernel/numa_balancing")
_SHARED_MEMORY = Path("/dev/shm")

_PASSTHROUGH = "identity"
"""Type of an IOMMU group whose devices use the addresses of the memory as they are."""
_KERNEL_WITH_PASSTHROUGH = "6.8."
"""Versions of Linux for which the guides ask for passthrough."""
_NUM_HUGE_PAGES = 15000
_SMALL_SHARED_MEMORY = 64 * 2**20
"""Size of /dev/shm, in bytes, in a Docker container without --ipc=host and --shm-size."""


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """Settings of this machine or container; None: the system does not report one."""

    kernel: str
    iommu: str | None = None
    """Type of the IOMMU groups of the cards; several types with commas in between."""
    num_huge_pages: int | None = None
    governor: str | None = None
    """Frequency governor of the processor."""
    balances_numa: bool | None = None
    """Linux moves memory between NUMA nodes."""
    shared_memory_bytes: int | None = None

    def __str__(self) -> str:
        parts = (
            f"Linux {self.kernel}",
            self.iommu and f"IOMMU {self.iommu}",
            self.num_huge_pages is not None and f"{self.num_huge_pages} huge pages",
            self.governor and f"frequency governor {self.governor}",
            self.balances_numa is not None
            and f"NUMA balancing {'on' if self.balances_numa else 'off'}",
        )
        return ", ".join(part for part in parts if part)

    def problems(self, num_ranks: int) -> list[str]:
        """Return sentences about settings with which cards may fail.

        Args:
            num_ranks: processes of the engine on this machine.
        """
        found = []
        is_translated = self.iommu not in (None, _PASSTHROUGH)
        if is_translated and self.kernel.startswith(_KERNEL_WITH_PASSTHROUGH):
            found.append(
                f"the IOMMU translates the addresses of the cards ({self.iommu}). With Linux "
                f"{self.kernel} the vendor asks for passthrough: add `iommu=pt intel_iommu=on` to "
                f"the command line of the kernel on the host, and restart it"
            )
        size = self.shared_memory_bytes
        if num_ranks > 1 and size is not None and size <= _SMALL_SHARED_MEMORY:
            found.append(
                f"{_SHARED_MEMORY} has only {size // 2**20} MiB, and libraries for several cards "
                f"may need more. Start the container with --ipc=host, as the vendor does, or with "
                f"--shm-size=16g"
            )
        return found

    def advice(self) -> list[str]:
        """Return sentences about settings that may make cards slow."""
        found = []
        if self.num_huge_pages is not None and self.num_huge_pages < _NUM_HUGE_PAGES:
            found.append(
                f"the host has {self.num_huge_pages} huge pages, and the vendor's guides set "
                f"{_NUM_HUGE_PAGES} for some models: `sysctl -w vm.nr_hugepages={_NUM_HUGE_PAGES}`"
            )
        if self.governor not in (None, "performance"):
            found.append(
                f"the frequency governor of the processor is {self.governor}, and the guides set "
                f"performance: `cpupower frequency-set -g performance`"
            )
        if self.balances_numa:
            found.append(
                "Linux moves memory between NUMA nodes, and the guides switch that off: `sysctl -w "
                "kernel.numa_balancing=0`"
            )
        return found


def read_host() -> HostSettings:
    """Return the settings of this machine."""
    balancing = _read(_NUMA_BALANCING)
    pages = re.search(r"^HugePages_Total:\s*(\d+)", _read(_MEMINFO) or "", re.MULTILINE)
    return HostSettings(
        kernel=os.uname().release,
        iommu=", ".join(sorted(set(filter(None, map(_iommu_type, nodes.card_devices()))))) or None,
        num_huge_pages=int(pages[1]) if pages else None,
        governor=_read(_GOVERNOR),
        balances_numa=None if balancing is None else balancing != "0",
        shared_memory_bytes=(
            shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else None
        ),
    )


def _iommu_type(device: Path) -> str | None:
    return _read(device / "iommu_group" / "type")


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
