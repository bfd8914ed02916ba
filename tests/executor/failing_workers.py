"""Workers whose second rank fails, for the tests of what the others make of it."""

from vllm.errors import ConfigError
from vllm.worker.cpu.worker import CPUWorker
from vllm.worker.hpu.worker import HPUWorker
from vllm.worker.interface import WarmUpStep


class RaisesInLoad(CPUWorker):
    """Rank 1 cannot load."""

    def load(self, rank: int) -> None:
        super().load(rank)
        if rank == 1:
            raise ConfigError("no memory for the weights of this rank")


class RaisesInWarmUp(CPUWorker):
    """Rank 1 fails in its warm-up."""

    def next_warm_up(self, given_up=None, seconds=None, longest_s=None) -> WarmUpStep | None:
        if self.rank == 1:
            raise RuntimeError("no memory for a graph")
        return super().next_warm_up(given_up, seconds, longest_s)


class RunsOutOfMemory(HPUWorker):
    """The card of one rank is full from a moment on, which a subclass chooses."""

    full_rank = 1

    def fill(self) -> None:
        """Leave no free byte on the card of that rank."""
        if self.rank == self.full_rank:
            pool = self.bridge.card.memory  # type: ignore[attr-defined]
            pool.limit_bytes = pool.in_use_bytes


class RunsOutOfMemoryInWarmUp(RunsOutOfMemory):
    """In the first launch after the KV cache was allocated."""

    def warm_up(self) -> str | None:
        self.fill()
        return super().warm_up()


class FirstRunsOutOfMemoryInWarmUp(RunsOutOfMemoryInWarmUp):
    """The same in the engine's own process."""

    full_rank = 0
