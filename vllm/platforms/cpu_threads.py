"""Choose the cores and the number of threads for the CPU device.

Reads the machine and the container; handles only counts and cores, and does not import torch.
"""

import math
import os
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from vllm.errors import ConfigError
from vllm.platforms.cgroup import ControlGroups
from vllm.platforms.numa import node_of_cores

_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
_SYSTEM = Path("/sys/devices/system")

UNBOUND = ("auto", "all", "nobind")
"""auto: threads are counted here, and run on any core; all and nobind: OpenMP decides."""

SMALL_MODEL_BYTES = 64 << 20
"""A model with less weights than this leaves one core to the API process. Its steps take as long as
what that process does between them: on two cores, one thread of the bundled model makes 13 to 21 %
more tokens/s of 64 streams than two. Larger models are faster with all cores. So are models that
pool prompts: 32 clients get 1.35 times as many embeddings/s from an encoder of 43 MiB
(all-MiniLM-L6-v2, Xeon with AMX, 2026-11-28)."""


def parse_cores(
    text: str, usable: frozenset[int], num_ranks: int = 1
) -> tuple[tuple[int, ...], ...] | None:
    """Return the cores of each rank in a value of VLLM_CPU_OMP_THREADS_BIND; None for a value in
    `UNBOUND`.

    Args:
        text: one list for all ranks, such as "0-3" or "0,2,4-7", or a list for each rank,
            "0-1|2-3".
        usable: cores that this process may use.
        num_ranks: number of workers of the engine.

    Raises:
        ConfigError: the value is malformed, names a core that is not usable, or has the wrong
            number of lists.
    """
    text = text.strip().lower()
    if text in UNBOUND:
        return None
    lists = text.split("|")
    if len(lists) not in (1, num_ranks):
        raise ConfigError(
            f"{_VARIABLE}={text!r} has {len(lists)} lists of cores, and the engine has {num_ranks} "
            f"worker{'s' if num_ranks > 1 else ''}. Give one list for all of them, or one for "
            f"each worker with | between"
        )
    cores = tuple(_parse_list(text, each, usable) for each in lists)
    return cores if len(cores) == num_ranks else cores * num_ranks


def _parse_list(text: str, cores_of_rank: str, usable: frozenset[int]) -> tuple[int, ...]:
    cores: set[int] = set()
    for part in cores_of_rank.split(","):
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


def divide_cores(
    text: str, usable: frozenset[int], num_replicas: int, num_ranks: int = 1
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Divide the cores of VLLM_CPU_OMP_THREADS_BIND among the ranks of each replica; empty for a
    value in `UNBOUND`.

    Args:
        text: a list for each replica, or for each rank of each replica, separated by `|`; or one
            list, which is divided equally.
        usable: cores that this process may use.
        num_replicas: number of replicas.
        num_ranks: number of workers of each replica.

    Raises:
        ConfigError: the value is malformed, names a core that is not usable, has the wrong number
            of lists, or has too few cores.
    """
    lists = text.split("|")
    if len(lists) == 1:
        (cores,) = parse_cores(text, usable) or [()]
        if not cores:
            return ()
        if len(cores) < num_replicas:
            raise ConfigError(
                f"{_VARIABLE}={text!r} names {len(cores)} cores for --data-parallel-size "
                f"{num_replicas}. Name at least one core for each replica"
            )
        return tuple((share,) * num_ranks for share in equal_shares(cores, num_replicas))
    if len(lists) not in (num_replicas, num_replicas * num_ranks):
        raise ConfigError(
            f"{_VARIABLE}={text!r} has {len(lists)} lists of cores, and --data-parallel-size "
            f"is {num_replicas}. Give one list for each replica, or for each of its workers, or a "
            f"single one, which is divided"
        )
    size = len(lists) // num_replicas
    parts = ("|".join(lists[start : start + size]) for start in range(0, len(lists), size))
    found = [parse_cores(part, usable, num_ranks) for part in parts]
    if any(cores is None for cores in found):
        raise ConfigError(f"{_VARIABLE}={text!r}: {', '.join(UNBOUND)} must be the only list")
    return tuple(cores for cores in found if cores is not None)


def equal_shares(cores: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Divide cores among replicas, so that each gets neighbouring ones. With fewer cores than
    replicas, replicas share cores.

    >>> equal_shares([0, 1, 2, 3, 4], 2)
    ((0, 1, 2), (3, 4))
    """
    if len(cores) < count:
        return tuple((cores[index % len(cores)],) for index in range(count))
    size, rest = divmod(len(cores), count)
    ends = [size * index + min(index, rest) for index in range(count + 1)]
    return tuple(tuple(cores[a:b]) for a, b in pairwise(ends))


def by_topology(cores: Iterable[int], system: Path = _SYSTEM) -> list[int]:
    """Sort cores by memory node, socket and physical core, so that neighbours share memory and
    caches.

    Args:
        cores: ids of the cores.
        system: folder where the system describes the cores; cores without a description keep their
            order.
    """

    def number(core: int, name: str) -> int:
        text = _topology(core, name, system)
        return int(text) if text.isdecimal() else 0

    nodes = node_of_cores(system / "node")
    return sorted(
        cores,
        key=lambda core: (
            nodes.get(core, 0),
            number(core, "physical_package_id"),
            number(core, "core_id"),
            core,
        ),
    )


def count_physical(cores: Collection[int], system: Path = _SYSTEM) -> int:
    """Count the physical cores among some cores. Hardware threads of one core count once, because
    they share the units that the kernels keep busy.

    Args:
        cores: ids of cores in the system.
        system: name of the system, as for `by_topology`.
    """
    return len({_topology(core, "thread_siblings_list", system) or core for core in cores})


def _topology(core: int, name: str, system: Path) -> str:
    """Return a topology file of a core in the system; empty if there is none."""
    file = system / "cpu" / f"cpu{core}" / "topology" / name
    return file.read_text().strip() if file.is_file() else ""


def format_cores(cores: "frozenset[int] | set[int] | tuple[int, ...]") -> str:
    """Format cores as the shortest list of ranges.

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
    """Return the cores that this process may use: its affinity, or all cores if the system has no
    affinity.
    """
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def quota_cores() -> int | None:
    """Return the CPU time limit of the container in cores, rounded up; None: no limit."""
    quota = ControlGroups().cpu_quota()
    return None if quota is None else max(1, math.ceil(quota))


def count_cores(num_replicas: int = 1) -> int:
    """Return the number of cores that this process can use, limited by its affinity and the
    container.

    Args:
        num_replicas: number of processes that share the CPU time of the container, each with its
            own cores.
    """
    num_usable = len(usable_cores())
    quota = quota_cores()
    return num_usable if quota is None else min(num_usable, max(1, quota // num_replicas))


def count_threads(
    num_threads: int, num_cores: int, weight_bytes: int, *, runs_with_server: bool, is_pooling: bool
) -> int:
    """Return the default number of threads for the forward pass.

    Args:
        num_threads: number that OpenMP would start, or the number of physical cores if that is
            less; never exceeded.
        num_cores: number of cores for all processes of the engine; hardware threads count
            separately, because the API process can use them.
        weight_bytes: memory of the weights.
        runs_with_server: whether a process that serves requests needs a core at the same time.
        is_pooling: whether the model pools prompts, so that each step is a lot of work.
    """
    if runs_with_server and not is_pooling and weight_bytes < SMALL_MODEL_BYTES:
        num_cores -= 1
    return max(1, min(num_threads, num_cores))
