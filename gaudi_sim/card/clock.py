"""Predicted time of a simulated card: host and device run in parallel and meet at a sync.

The time is deterministic and comes from `vllm.cost_model`; real time has no effect. The time of
element-wise operators is added as if nothing were fused, so step times are rather too high.
"""

from dataclasses import dataclass

from vllm.cost_model.cards import CardSpec
from vllm.cost_model.start import capture_seconds, compile_seconds


@dataclass
class Clock:
    """The simulated seconds since the process began, of host and device."""

    spec: CardSpec
    host_s: float = 0
    device_s: float = 0
    """When the device will have done all it was given."""
    compile_s: float = 0
    launch_s: float = 0
    compute_s: float = 0
    copy_s: float = 0

    def compile(self, num_ops: int) -> float:
        """Add the time of compiling one recipe, for which the host waits; return the seconds."""
        seconds = compile_seconds(num_ops)
        self.host_s += seconds
        self.compile_s += seconds
        return seconds

    def capture(self, num_recipes: int) -> None:
        """Add the time of capturing a graph, which every process repeats."""
        seconds = capture_seconds(num_recipes)
        self.host_s += seconds
        self.compile_s += seconds

    def launch(self, host_s: float, compute_s: float) -> None:
        """Add the time of a launch to the host, and of its computation to the device."""
        self.host_s += host_s
        self.launch_s += host_s
        self.device_s = max(self.device_s, self.host_s) + compute_s
        self.compute_s += compute_s

    def copy(self, num_bytes: int) -> None:
        """Add the time of a transfer over PCIe to the queue of the device."""
        seconds = num_bytes / self.spec.pcie_bytes_per_s
        self.device_s = max(self.device_s, self.host_s) + seconds
        self.copy_s += seconds

    def sync(self) -> None:
        """Let the host wait for the device."""
        self.host_s = max(self.host_s, self.device_s)
