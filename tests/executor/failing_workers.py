"""Workers whose second rank fails, for tests of how the other ranks react."""

from vllm.errors import ConfigError
from vllm.worker.cpu.worker import CPUWorker
from vllm.worker.hpu.worker import HPUWorker
from vllm.worker.interface import WarmUpStep


class RaisesInLoad(CPUWorker):
    """A worker whose rank 1 fails to load."""

    def load(self, rank: int) -> None:
        super().load(rank)
        if rank == 1:
            raise ConfigError("no memory for the weights of this rank")


class RaisesInWarmUp(CPUWorker):
    """A worker whose rank 1 fails in its warm-up."""

    def next_warm_up(self, update) -> WarmUpStep | None:
        if self.rank == 1:
            raise RuntimeError("no memory for a graph")
        return super().next_warm_up(update)


class RunsOutOfMemory(HPUWorker):
    """A worker that fills the card of one rank at a moment that a subclass chooses."""

    full_rank = 1

    def fill(self) -> None:
        """Leave no free byte on the card of that rank."""
        if self.rank == self.full_rank:
            pool = self.bridge.card.memory  # type: ignore[attr-defined]
            pool.limit_bytes = pool.in_use_bytes


class RunsOutOfMemoryInWarmUp(RunsOutOfMemory):
    """Fills the card in the first forward pass after the KV cache was allocated."""

    def warm_up(self) -> str | None:
        self.fill()
        return super().warm_up()


class FirstRunsOutOfMemoryInWarmUp(RunsOutOfMemoryInWarmUp):
    """Fills the card of the engine's own process in the same forward pass."""

    full_rank = 0
