"""Decides which HPU graphs are captured, in which order, within the memory for graphs.

First pass: prompt graphs within their part of the graph memory, then decode graphs within theirs.
Second pass: if one phase is complete and the other is not, the other continues with all the graph
memory that is left.

    min_tokens  ascending by tokens: prompts mostly run in small batches
    max_bs      largest batch first, then ascending by size: decodes mostly run in the largest

A plan is a generator that the owner of the device drives. Several ranks that run the same plan with
the same answers capture the same graphs, even if they have different amounts of memory.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from vllm.bucketing.bucket import Bucket, Phase
from vllm.bucketing.ledger import MemoryClass, MemoryLedger, format_bytes
from vllm.config.hpu import GraphOrder
from vllm.errors import ConfigError

GRAPH_CLASSES = {Phase.PREFILL: MemoryClass.PREFILL_GRAPHS, Phase.DECODE: MemoryClass.DECODE_GRAPHS}

_NO_WEIGHT = 0.001
"""Work before the first captured graph, so that its estimate is 0 bytes."""


@dataclass(frozen=True)
class OmittedGraph:
    """A bucket that runs without a graph, and the reason."""

    bucket: Bucket
    needed_bytes: int
    """Bytes that the graph needs: estimated, or measured if it was captured and thrown away."""
    was_captured: bool
    reason: str

    def __str__(self) -> str:
        shape = (self.bucket.batch, self.bucket.query_len, self.bucket.blocks)
        return f"no graph for {self.bucket.phase!s} {shape}: {self.reason}"


@dataclass(frozen=True)
class CaptureStep:
    """One graph that is to be captured next."""

    phase: Phase
    index: int
    """Position in the order of its phase, from 1."""
    total: int
    """Number of buckets of the phase."""
    bucket: Bucket
    left_bytes: int
    """Memory that graphs of the phase may still take."""
    refusal: str | None
    """Reason why the graph must not be captured: there is no memory for it. None: it may be
    captured."""

    def refusal_of(self, used_bytes: int) -> str | None:
        """Return why the graph takes too much memory to be kept; None: it can be kept."""
        if used_bytes <= self.left_bytes:
            return None
        return (
            f"the graph took {format_bytes(used_bytes)}, but only "
            f"{format_bytes(self.left_bytes)} are left for graphs"
        )


@dataclass(frozen=True)
class Capture:
    """The outcome of capturing a graph: the answer to a `CaptureStep`."""

    used_bytes: int | None
    """Memory that the graph took; None: it was not captured."""
    given_up: str | None = None
    """Reason why the graph is not kept; its memory is free again. None: it is kept, within the rest
    of the budget."""


CapturePlan = Generator[CaptureStep, Capture, dict[Phase, "PhaseGraphs"]]
"""Asks for one graph after the other, and returns the outcome."""


@dataclass(frozen=True)
class PhaseGraphs:
    """The outcome of capturing the graphs of one phase."""

    captured: tuple[Bucket, ...]
    """Buckets whose graphs were captured, in the order of capture."""
    omitted: tuple[OmittedGraph, ...]
    used_bytes: int

    @property
    def total(self) -> int:
        """Number of buckets of the phase."""
        return len(self.captured) + len(self.omitted)


def capture_order(buckets: Sequence[Bucket], order: GraphOrder) -> list[Bucket]:
    """Sort buckets of one phase in the order in which their graphs are captured.

    Raises:
        ConfigError: the order is unknown.
    """
    if order == "min_tokens":
        return sorted(buckets, key=lambda b: (b.batch * _size(b), _size(b), b.batch, b.blocks))
    if order == "max_bs":
        return sorted(buckets, key=lambda b: (-b.batch, _size(b), b.blocks))
    raise ConfigError(
        f"Unsupported graph allocation strategy: {order}; accepted: min_tokens, max_bs"
    )


def capture_graphs(
    prefill: Sequence[Bucket],
    decode: Sequence[Bucket],
    ledger: MemoryLedger,
    *,
    prefill_order: GraphOrder = "min_tokens",
    decode_order: GraphOrder = "max_bs",
    estimate: Callable[[Bucket], int] | None = None,
) -> CapturePlan:
    """Plan the capture of graphs until their memory is used up.

    Every byte is booked in the ledger. A graph that is larger than the memory that is left has to
    be given up, so the budgets of the ledger hold even if the estimates were wrong.

    Args:
        prefill: prompt buckets.
        decode: decode buckets.
        ledger: has the budgets of both classes of graphs; the second pass moves budget.
        prefill_order: order of prompts.
        decode_order: order of decodes.
        estimate: bytes that a graph will take. None: estimated from the graphs of its phase that
            were captured, in proportion to tokens (prompts) or sequences (decodes).
    """
    queues = [
        _Queue(Phase.PREFILL, capture_order(prefill, prefill_order), ledger, estimate),
        _Queue(Phase.DECODE, capture_order(decode, decode_order), ledger, estimate),
    ]
    for queue in queues:
        yield from queue.run()
    incomplete = [queue for queue in queues if not queue.is_complete]
    if len(incomplete) == 1:
        (done,) = (queue for queue in queues if queue.is_complete)
        # Also with nothing left on this rank, because another rank may have memory left and all
        # ranks must take the same steps.
        left = ledger.left(done.memory_class)
        ledger.move(done.memory_class, incomplete[0].memory_class, left)
        yield from incomplete[0].run()
    return {queue.phase: queue.result() for queue in queues}


class _Queue:
    """The graphs of one phase, with an estimate of their size from the captured ones."""

    def __init__(
        self,
        phase: Phase,
        order: list[Bucket],
        ledger: MemoryLedger,
        estimate: Callable[[Bucket], int] | None,
    ) -> None:
        self.phase = phase
        self.memory_class = GRAPH_CLASSES[phase]
        self._order = order
        self._ledger = ledger
        self._estimate = estimate
        self._captured: dict[Bucket, int] = {}
        self._omitted: dict[Bucket, OmittedGraph] = {}
        self._seen_bytes = 0
        self._seen_weight = _NO_WEIGHT

    @property
    def is_complete(self) -> bool:
        return len(self._captured) == len(self._order)

    def run(self) -> Generator[CaptureStep, Capture, None]:
        """Yield a step for every bucket without a graph, in order."""
        for index, bucket in enumerate(self._order, start=1):
            if bucket not in self._captured:
                yield from self._try(index, bucket)

    def result(self) -> PhaseGraphs:
        """Return the outcome for all buckets."""
        return PhaseGraphs(
            captured=tuple(self._captured),
            omitted=tuple(self._omitted[b] for b in self._order if b not in self._captured),
            used_bytes=sum(self._captured.values()),
        )

    def _try(self, index: int, bucket: Bucket) -> Generator[CaptureStep, Capture, None]:
        left = self._ledger.left(self.memory_class)
        needed, is_measured = self._expect(bucket)
        # With an estimate, some memory must remain, because the estimate may be too low. A measured
        # size is exact.
        is_known = is_measured or self._estimate is not None
        refusal = None
        if needed > left or (needed == left and not is_known):
            verb = "took" if is_measured else "would take about"
            refusal = (
                f"the graph {verb} {format_bytes(needed)}, but only {format_bytes(left)} are "
                "left for graphs"
            )
        step = CaptureStep(self.phase, index, len(self._order), bucket, left, refusal)
        capture = yield step
        used = capture.used_bytes
        if used is not None:
            self._seen_bytes += used
            self._seen_weight += _weight(bucket)
            needed, is_measured = used, True
        if capture.given_up is not None:
            self._omitted[bucket] = OmittedGraph(bucket, needed, is_measured, capture.given_up)
            return
        assert used is not None and self._ledger.book(self.memory_class, used)
        self._captured[bucket] = used

    def _expect(self, bucket: Bucket) -> tuple[int, bool]:
        """Return the expected bytes of the graph, and whether they are based on measurements."""
        before = self._omitted.get(bucket)
        if before is not None and before.was_captured:
            return before.needed_bytes, True
        if self._estimate is not None:
            return self._estimate(bucket), False
        return int(_weight(bucket) / self._seen_weight * self._seen_bytes), False


def _size(bucket: Bucket) -> int:
    return bucket.blocks if bucket.phase is Phase.DECODE else bucket.query_len


def _weight(bucket: Bucket) -> int:
    return bucket.batch if bucket.phase is Phase.DECODE else bucket.num_tokens
