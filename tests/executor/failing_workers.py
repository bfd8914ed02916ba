"""Workers whose second rank fails, for the tests of what the others make of it."""

from vllm.errors import ConfigError
from vllm.worker.cpu.worker import CPUWorker


class RaisesInLoad(CPUWorker):
    """Rank 1 cannot load."""

    def load(self, rank: int) -> None:
        super().load(rank)
        if rank == 1:
            raise ConfigError("no memory for the weights of this rank")
