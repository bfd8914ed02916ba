"""Where the threads of the CPU device run, and how many there are.

Knows the machine and the container; counts and cores only, no torch.
"""

import os
from pathlib import Path

from vllm.errors import ConfigError

_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")

UNBOUND = ("auto", "all", "nobind")
"""auto: threads are counted here, and run on any core; all and nobind: OpenMP decides."""

SMALL_MODEL_BYTES = 64 << 20
"""A model with less weights than this leaves one core to the API process. Its steps take as long as
what that process does between them: on two cores, one thread of the bundled model makes 13 to 21 %
more tokens/s of 64 streams than two. Larger models are faster with all cores."""


def parse_cores(text: str, usable: frozenset[int]) -> tuple[int, ...] | None:
    """The cores of a value of VLLM_CPU_OMP_THREADS_BIND; None for those of `UNBOUND`.

    Args:
        text: such as "0-3" or "0,2,4-7".
        usable: cores that this process may use.

    Raises:
        ConfigError: it does not parse, or names a core that is not usable.
    """
    text = text.strip().lower()
    if text in UNBOUND:
        return None
    if "|" in text:
        raise ConfigError(
            f"{_VARIABLE}={text!r}: there is one list of cores for each rank of tensor "
            f"parallelism, and this version has one rank"
        )
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)):
            raise ConfigError(
                f"{_VARIABLE}={text!r}: expected {', '.join(UNBOUND)} or cores such as 0-3 or 0,2,4"
            )
        start, end = int(first), int(last or first)
        if end < start:
            raise ConfigError(
                f"{_VARIABLE}={text!r}: the range {part.strip()} ends before it begins"
            )
        cores.update(range(start, min(end, 1 << 16) + 1))
    if not cores <= usable:
        raise ConfigError(
            f"{_VARIABLE}={text!r}: this process cannot use the cores "
            f"{format_cores(cores - usable)}; usable: {format_cores(usable)}"
        )
    return tuple(sorted(cores))


def format_cores(cores: "frozenset[int] | set[int] | tuple[int, ...]") -> str:
    """The shortest list of ranges.

    >>> format_cores({0, 1, 2, 5})
    '0-2,5'
    """
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def usable_cores() -> frozenset[int]:
    """Cores that this process may use: its affinity, where the system has that."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def quota_cores() -> int | None:
    """Cores' worth of time that the container gets, rounded up; None: no limit."""
    if not _CPU_MAX.is_file():
        return None
    quota, _, period = _CPU_MAX.read_text().partition(" ")
    if not (quota.isdecimal() and period.strip().isdecimal()):
        return None  # "max"
    return max(1, -(-int(quota) // int(period)))


def count_cores() -> int:
    """Cores' worth of time that this process can use."""
    num_usable = len(usable_cores())
    quota = quota_cores()
    return num_usable if quota is None else min(num_usable, quota)


def count_threads(
    num_threads: int, num_cores: int, weight_bytes: int, *, is_beside_server: bool
) -> int:
    """The default number of threads for the forward pass.

    Args:
        num_threads: that OpenMP would start; never exceeded.
        num_cores: that there are for the engine and all that belongs to it.
        weight_bytes: memory of the weights.
        is_beside_server: a process that serves requests needs a core at the same time.
    """
    if is_beside_server and weight_bytes < SMALL_MODEL_BYTES:
        num_cores -= 1
    return max(1, min(num_threads, num_cores))
