"""Plans an engine on a CPU: its weights have no values, and the machine's memory is an argument."""

from vllm.bucketing import format_bytes
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError
from vllm.ops import get_ops, set_ops
from vllm.planning.engine_plan import planned_config
from vllm.platforms.cpu import CPUPlatform
from vllm.worker.cpu.worker import CPUWorker
from vllm.worker.interface import MemoryReport
from vllm.worker.kv_cache import states_bytes
from vllm.worker.parts.memory_use import MemoryUse, states_use


class _PlannedMachine(CPUPlatform):
    """A planned machine whose memory is otherwise unused.

    Attributes:
        free_bytes: the memory that is left.
    """

    def __init__(self, total_bytes: int) -> None:
        super().__init__()
        self.free_bytes = total_bytes

    def free_memory_bytes(self) -> int:
        return self.free_bytes


class PlannedCPUWorker(CPUWorker):
    """One rank of a planned engine on a CPU.

    Args:
        config: config of the engine.
        machine: has the memory.

    Attributes:
        report: the measured memory; set by `measure`.
    """

    has_values = False
    report: MemoryReport

    def __init__(self, config: VllmConfig, machine: _PlannedMachine) -> None:
        super().__init__(config, machine)
        self._machine = machine

    def _bind(self, rank: int) -> None:
        """Do nothing: planning does not bind this process to cores."""

    def _count_threads(self, weight_bytes: int) -> None:
        """Subtract the weights of all ranks from the free memory."""
        self._machine.free_bytes -= weight_bytes * self.num_local_ranks

    def measure(self) -> MemoryReport:
        """Return how many KV blocks fit in the memory of the planned machine.

        Raises:
            ConfigError: the machine does not hold the weights, or one request.
        """
        free_bytes, config = self._machine.free_bytes, self.config
        if free_bytes < 0:
            weights = self._weight_bytes * self.num_local_ranks
            raise ConfigError(
                f"{config.model.model} in {config.model.dtype_name} takes "
                f"{format_bytes(weights)}, but the machine has only "
                f"{format_bytes(weights + free_bytes)}. Use a machine with more memory, "
                "--quantization int8 or int4, or a quantized checkpoint"
            )
        self.report = super().measure()
        return self.report

    @property
    def memory_uses(self) -> list[MemoryUse]:
        """The uses of memory of each rank, except its KV cache."""
        states = states_bytes(self.config, self._layout)
        states += (self._num_kept_states or 0) * self._layout.state_bytes
        return [*self._uses(self.num_local_ranks), states_use(self.config, states)]


def start_on_host(args: EngineArgs, num_ranks: int, total_bytes: int) -> PlannedCPUWorker:
    """Start the first rank of an engine up to the point where its memory is measured.

    Args:
        args: arguments of the engine.
        num_ranks: number of ranks that share each layer.
        total_bytes: memory of the machine.

    Raises:
        ConfigError: the engine cannot start with these arguments, or the machine is too small.
    """
    machine, ops = _PlannedMachine(total_bytes), get_ops()
    config = planned_config(args, machine, num_ranks)
    try:
        worker = PlannedCPUWorker(config, machine)
        worker.load(0)
        worker.measure()
    finally:
        set_ops(ops)
    return worker
