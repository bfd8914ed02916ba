"""Accounts for device memory in bytes per class, within a budget for each class.

    total = weights + workspace + margin + graphs + KV cache + unassigned

    free     what is left after loading the model and the profiling run
    usable   free * gpu_memory_utilization; the rest is the margin
    graphs   usable * VLLM_GRAPH_RESERVED_MEM, of it VLLM_GRAPH_PROMPT_RATIO for prompts
    KV       the rest of usable, in whole blocks

It measures nothing: the caller passes the values of the device.
"""

from dataclasses import dataclass
from enum import Enum

GIB = 1 << 30


class MemoryClass(Enum):
    """Classes of memory use."""

    WEIGHTS = "weights"
    WORKSPACE = "workspace"
    PREFILL_GRAPHS = "prompt graphs"
    DECODE_GRAPHS = "decode graphs"
    KV_CACHE = "KV cache"
    MARGIN = "margin"

    def __str__(self) -> str:
        return self.value


GRAPHS = (MemoryClass.PREFILL_GRAPHS, MemoryClass.DECODE_GRAPHS)


def format_bytes(num_bytes: float) -> str:
    """Format bytes with four significant digits, in the largest unit with a value above 1.

    >>> [format_bytes(n) for n in (0, 1024, 1025, 65536, -258048)]
    ['0 B', '1024 B', '1.001 KiB', '64 KiB', '-252 KiB']
    """
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) <= 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


@dataclass(frozen=True)
class MemorySplit:
    """Division of the free memory: usable + margin, and of usable: graphs + KV cache."""

    free_bytes: int
    usable_bytes: int
    margin_bytes: int
    graph_bytes: int
    kv_bytes: int

    def num_blocks(self, block_bytes: int) -> int:
        """Return the number of whole KV blocks that fit."""
        return max(0, self.kv_bytes // block_bytes)


def split_memory(free_bytes: int, utilization: float, graph_reserved: float) -> MemorySplit:
    """Divide the memory that is free after the profiling run.

    Args:
        free_bytes: free device memory.
        utilization: fraction of it to use, 0 to 1.
        graph_reserved: fraction of the usable part for graphs; 0 if none are captured.
    """
    if not (0 <= utilization <= 1 and 0 <= graph_reserved <= 1):
        raise ValueError(
            f"utilization and graph_reserved must be fractions from 0 to 1, got {utilization} and "
            f"{graph_reserved}"
        )
    usable = int(free_bytes * utilization)
    graphs = int(usable * graph_reserved)
    return MemorySplit(
        free_bytes=free_bytes,
        usable_bytes=usable,
        margin_bytes=free_bytes - usable,
        graph_bytes=graphs,
        kv_bytes=usable - graphs,
    )


def split_graph_memory(graph_bytes: int, prompt_ratio: float) -> tuple[int, int]:
    """Divide graph memory into bytes for prompt graphs and for decode graphs."""
    if not 0 <= prompt_ratio <= 1:
        raise ValueError(f"prompt_ratio must be a fraction from 0 to 1, got {prompt_ratio}")
    prompt = int(graph_bytes * prompt_ratio)
    return prompt, graph_bytes - prompt


class MemoryLedger:
    """Budgets of memory per class, and the bytes booked against them.

    At all times 0 <= booked <= budget for every class, and the budgets add up to the total at most.
    Single-threaded.

    Args:
        total_bytes: memory of the device.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = _checked(total_bytes)
        self._budget = dict.fromkeys(MemoryClass, 0)
        self._booked = dict.fromkeys(MemoryClass, 0)

    @property
    def unassigned_bytes(self) -> int:
        """Bytes that are in the budget of no class."""
        return self.total_bytes - sum(self._budget.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes in use while no forward pass runs: weights, KV cache and graphs."""
        return sum(map(self.booked, (MemoryClass.WEIGHTS, MemoryClass.KV_CACHE, *GRAPHS)))

    @property
    def launch_bytes(self) -> int:
        """Bytes that a forward pass may use."""
        return self.booked(MemoryClass.WORKSPACE) + self.unassigned_bytes

    def budget(self, cls: MemoryClass) -> int:
        """Return the budget of the class in bytes."""
        return self._budget[cls]

    def booked(self, cls: MemoryClass) -> int:
        """Return the bytes in use by the class."""
        return self._booked[cls]

    def left(self, cls: MemoryClass) -> int:
        """Return the bytes that the class may still use."""
        return self._budget[cls] - self._booked[cls]

    def assign(self, cls: MemoryClass, budget_bytes: int) -> None:
        """Set the budget of a class.

        Raises:
            ValueError: less than is booked, or more than other classes leave; the message has
                both numbers.
        """
        most = self.unassigned_bytes + self._budget[cls]
        if not self._booked[cls] <= _checked(budget_bytes) <= most:
            raise ValueError(
                f"the memory budget for {cls} must be at least {format_bytes(self._booked[cls])} "
                f"(in use now) and at most {format_bytes(most)} (not assigned to other uses), got "
                f"{format_bytes(budget_bytes)}; there are {format_bytes(self.total_bytes)} in total"
            )
        self._budget[cls] = budget_bytes

    def move(self, source: MemoryClass, target: MemoryClass, num_bytes: int) -> None:
        """Move unused budget from one class to another.

        Raises:
            ValueError: the class has less unused budget.
        """
        if _checked(num_bytes) > self.left(source):
            raise ValueError(
                f"cannot take {format_bytes(num_bytes)} from {source}: only "
                f"{format_bytes(self.left(source))} are left"
            )
        self._budget[source] -= num_bytes
        self._budget[target] += num_bytes

    def book(self, cls: MemoryClass, num_bytes: int) -> bool:
        """Book bytes of a class. Return False and book nothing if its budget has fewer left."""
        if _checked(num_bytes) > self.left(cls):
            return False
        self._booked[cls] += num_bytes
        return True

    def release(self, cls: MemoryClass, num_bytes: int) -> None:
        """Release booked bytes.

        Raises:
            ValueError: fewer bytes are booked.
        """
        if _checked(num_bytes) > self._booked[cls]:
            raise ValueError(
                f"cannot release {format_bytes(num_bytes)} of {cls}: only "
                f"{format_bytes(self._booked[cls])} are in use"
            )
        self._booked[cls] -= num_bytes


def open_ledger(
    *,
    total_bytes: int,
    weight_bytes: int,
    workspace_bytes: int,
    split: MemorySplit,
    prompt_ratio: float,
    block_bytes: int,
) -> MemoryLedger:
    """Make the ledger at the time before the KV cache is allocated and the first graph captured.

    Weights, workspace and margin are booked, since they are in use. The KV budget is whole blocks;
    the rest of the last one stays unassigned.

    Raises:
        ValueError: the parts are more than the device has.
    """
    prompt, decode = split_graph_memory(split.graph_bytes, prompt_ratio)
    ledger = MemoryLedger(total_bytes)
    for cls, num_bytes, is_in_use in (
        (MemoryClass.WEIGHTS, weight_bytes, True),
        (MemoryClass.WORKSPACE, workspace_bytes, True),
        (MemoryClass.MARGIN, split.margin_bytes, True),
        (MemoryClass.PREFILL_GRAPHS, prompt, False),
        (MemoryClass.DECODE_GRAPHS, decode, False),
        (MemoryClass.KV_CACHE, split.num_blocks(block_bytes) * block_bytes, False),
    ):
        ledger.assign(cls, num_bytes)
        if is_in_use:
            ledger.book(cls, num_bytes)
    return ledger


def _checked(num_bytes: int) -> int:
    if num_bytes < 0:
        raise ValueError(f"a number of bytes must not be negative, got {num_bytes}")
    return num_bytes


def assign_graphs(
    ledger: MemoryLedger, prompt_ratio: float, max_bytes: int | None = None
) -> tuple[int, int]:
    """Assign all unassigned memory to graphs; return the bytes for prompts and for decodes.

    Args:
        ledger: has no graphs yet.
        prompt_ratio: fraction for prompts, 0 to 1.
        max_bytes: limit for both; None: no limit.
    """
    found = sum(ledger.left(cls) for cls in GRAPHS) + ledger.unassigned_bytes
    max_bytes = found if max_bytes is None else min(found, max_bytes)
    parts = split_graph_memory(max(0, max_bytes), prompt_ratio)
    for cls in GRAPHS:
        ledger.assign(cls, 0)
    for cls, num_bytes in zip(GRAPHS, parts, strict=True):
        ledger.assign(cls, num_bytes)
    return parts
