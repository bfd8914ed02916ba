"""Find the memory node (NUMA) of each core, and set where new memory is allocated.

A core reads the memory of its own node faster than other memory, and each node has its own
bandwidth. Memory belongs to the node of the thread that first writes to it, so weights that were
read by a few threads would all be on the nodes of these threads. Does not import torch.
"""

import ctypes
import os
import platform
import re
from collections.abc import Collection
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_POLICY_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
"""Ids of the system calls set_mempolicy and get_mempolicy, by machine."""

_DEFAULT, _INTERLEAVE = 0, 3
_MASK_BITS = 1024


def node_of_cores(folder: Path = _NODES) -> dict[int, int]:
    """Return the memory node of each core; empty if the system describes none.

    Args:
        folder: folder where the system describes the nodes.
    """
    found: dict[int, int] = {}
    for path in sorted(folder.glob("node*/cpulist")):
        number = re.fullmatch(r"node(\d+)", path.parent.name)
        if number is not None:
            found.update(dict.fromkeys(_numbers(path.read_text()), int(number[1])))
    return found


def nodes_of(cores: Collection[int], folder: Path = _NODES) -> list[int]:
    """Return the memory nodes of some cores, each once.

    Args:
        cores: ids of cores; a core that the system does not describe belongs to no node.
        folder: folder, as for `node_of_cores`.
    """
    of_core = node_of_cores(folder)
    return sorted({of_core[core] for core in cores if core in of_core})


def interleave(nodes: Collection[int]) -> bool:
    """Allocate new memory pages alternately from the nodes: in this thread, and in threads that it
    starts from now on.

    Returns False and changes nothing if the process was started with a memory policy (numactl).

    Raises:
        OSError: the system or the container does not allow it.
    """
    calls = _POLICY_CALLS.get(platform.machine())
    if calls is None:
        machine = platform.machine()
        raise OSError(0, f"cannot set a NUMA memory policy on the CPU architecture {machine}")
    set_policy, get_policy = calls
    libc = ctypes.CDLL(None, use_errno=True)
    mode = ctypes.c_int(-1)
    _call(libc, get_policy, ctypes.byref(mode), None, 0, None, 0)
    if mode.value != _DEFAULT:
        return False
    words = (ctypes.c_ulong * (_MASK_BITS // 64))()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    _call(libc, set_policy, _INTERLEAVE, words, _MASK_BITS)
    return True


def _call(libc: ctypes.CDLL, number: int, *arguments: object) -> None:
    wide = [
        ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments
    ]
    if libc.syscall(ctypes.c_long(number), *wide) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _numbers(text: str) -> list[int]:
    """Parse a list from the system such as "0-3,8"; it may be empty.

    >>> _numbers("0-2,8")
    [0, 1, 2, 8]
    """
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return [n for each in ranges for n in range(int(each[0]), int(each[-1]) + 1)]
