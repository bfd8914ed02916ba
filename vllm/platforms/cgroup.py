"""Read the cgroup limits of this process, set by a container, a systemd unit or a Slurm job.

Supports cgroup versions 1 and 2. All groups from the process up to the outermost visible one are
read, because each may have a limit. Does not import torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60
"""Version 1 says a number of bytes near 2^63 where version 2 says max."""


@dataclass(frozen=True)
class ControlGroups:
    """The control groups of one process.

    Attributes:
        root: folder where cgroups are mounted.
        membership: file that names the groups of the process.
    """

    root: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")

    def cpu_quota(self) -> float | None:
        """Return the CPU time limit in cores; None: no limit."""
        found = []
        for folder in self._folders("cpu"):
            quota, _, period = _text(folder / "cpu.max").partition(" ")
            if not quota:
                quota = _text(folder / "cpu.cfs_quota_us")  # -1 means no limit
                period = _text(folder / "cpu.cfs_period_us")
            if quota.isdecimal() and period.isdecimal() and int(period) > 0:
                found.append(int(quota) / int(period))
        return min(found, default=None)

    def memory_limit_bytes(self) -> int | None:
        """Return the memory limit in bytes; None: no limit."""
        limits = (_memory_limit(folder) for folder in self._folders("memory"))
        return min((limit for limit in limits if limit is not None), default=None)

    def free_memory_bytes(self) -> int | None:
        """Return the memory that is left below the limits; None: no limit.

        It includes inactive page cache, which the system frees when memory is needed.
        """
        found = []
        for folder in self._folders("memory"):
            limit, used = _memory_limit(folder), _number(folder / "memory.current")
            if used is None:
                used = _number(folder / "memory.usage_in_bytes")
            if limit is not None and used is not None:
                found.append(max(0, limit - max(0, used - _idle_file_bytes(folder))))
        return min(found, default=None)

    def _folders(self, controller: str) -> Iterator[Path]:
        """Yield the folders of the process's groups that may have limits, innermost first."""
        for line in _text(self.membership).splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controllers == "":
                bases = [self.root, self.root / "unified"]
            elif controller in controllers.split(","):
                bases = [self.root / controller, self.root / controllers]
            else:
                continue
            for base in bases:
                group = base / path.lstrip("/")
                # The path of a group outside of the visible tree begins with /.. or does not exist.
                inside = [] if ".." in group.parts else [group, *group.parents]
                yield from (each for each in inside if each != base and base in each.parents)
                yield base


def _memory_limit(folder: Path) -> int | None:
    limit = _number(folder / "memory.max")
    if limit is None:
        limit = _number(folder / "memory.limit_in_bytes")
    return None if limit is None or limit >= _NO_LIMIT else limit


def _idle_file_bytes(folder: Path) -> int:
    values = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines())
    # cgroup version 1 has the total of all subgroups under another name.
    value = values.get("total_inactive_file", values.get("inactive_file", "0"))
    return int(value) if value.isdecimal() else 0


def _number(path: Path) -> int | None:
    """Read an integer from a file; None if the file does not exist or contains "max"."""
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    """Return the content of a file; empty if it does not exist or may not be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
