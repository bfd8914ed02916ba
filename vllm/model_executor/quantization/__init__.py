"""Weight formats other than dense: how the layers of a checkpoint are stored."""

from vllm.model_executor.quantization.interface import CheckpointNames, Quantization
from vllm.model_executor.quantization.registry import (
    head_quantization_of,
    quantization_of,
    register_quantization,
)

__all__ = [
    "CheckpointNames",
    "Quantization",
    "head_quantization_of",
    "quantization_of",
    "register_quantization",
]
