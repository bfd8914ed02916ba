"""`int8` on the CPU: dense checkpoints whose layers are rounded to int8 as they are loaded.

One scale per output feature, and inputs rounded to int8 too, with one scale per row (W8A8).
"""

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.layers.cpu_linear_method import CPULinear
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear


class CPUInt8:
    """Every linear layer as int8. Takes no settings."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        del settings

    def linear_method(self, name: str, layer: ParallelLinear) -> LinearMethod | None:
        """A method of its own for each layer; `pack_weights` makes it int8 after loading."""
        return CPULinear("int8")
