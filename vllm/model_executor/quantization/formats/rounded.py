"""Quantizes linear layers and experts of dense checkpoints while they are loaded.

Heads, embeddings and routers stay dense. If a device has no kernel for a format, it uses dense
weights with the quantized values.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from vllm.model_executor.layers.experts import Experts, ExpertsMethod
from vllm.model_executor.layers.linear import LinearMethod, ParallelLinear
from vllm.model_executor.layers.stored.stored_experts import RoundedExperts
from vllm.model_executor.layers.stored.stored_linear import RoundedLinear
from vllm.model_executor.quantization.format_lines import log_formats
from vllm.model_executor.quantization.interface import Quantization
from vllm.ops.stored_weight import (
    StoredWeight,
    round_to_fp8,
    round_to_int4,
    round_to_int8,
    round_to_nf4,
)


class Rounded(Quantization):
    """Quantizes all weights by one function.

    Args:
        round_weight: quantizes a dense weight [out_features, in_features].
    """

    def __init__(self, round_weight: Callable[[Tensor], StoredWeight]) -> None:
        self.round_weight = round_weight

    def linear_method(self, name: str, layer: ParallelLinear) -> LinearMethod | None:
        return None if layer.keeps_precision else RoundedLinear(name, self.round_weight)

    def experts_method(self, name: str, layer: Experts) -> ExpertsMethod | None:
        num_first = len(layer.options.parts) - 1

        def round_expert(number: int, gate_up: Tensor, down: Tensor) -> tuple[StoredWeight, ...]:
            return tuple(self.round_weight(part) for part in (*gate_up.chunk(num_first), down))

        return RoundedExperts(name, round_expert)

    def finish_model(self, model: nn.Module) -> None:
        log_formats(model)


def _creates(round_weight: Callable[[Tensor], StoredWeight]) -> Callable[[Any], Rounded]:
    """Return a function that creates the format. It ignores the settings: there are none."""
    return lambda settings: Rounded(round_weight)


create_fp8, create_int8 = _creates(round_to_fp8), _creates(round_to_int8)
"""Formats of `--quantization fp8` and `int8`: a scale for each output feature."""
create_int4, create_nf4 = _creates(round_to_int4), _creates(round_to_nf4)
"""Formats of `--quantization int4`, with a scale for each 32 inputs, and `bitsandbytes` (NF4)."""
