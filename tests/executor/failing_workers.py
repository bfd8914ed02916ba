"""Workers whose second rank fails, for the tests of what the others make of it."""

from vllm.errors import ConfigError
from vllm.worker.cpu.worker import CPUWorker
from vllm.worker.interface import WarmUpStep


class RaisesInLoad(CPUWorker):
    """Rank 1 cannot load."""

    def load(self, rank: int) -> None:
        super().load(rank)
        if rank == 1:
            raise ConfigError("no memory for the weights of this rank")


class RaisesInWarmUp(CPUWorker):
    """Rank 1 fails in its warm-up."""

    def next_warm_up(self, given_up: str | None = None) -> WarmUpStep | None:
        if self.rank == 1:
            raise RuntimeError("no memory for a graph")
        return super().next_warm_up(given_up)
