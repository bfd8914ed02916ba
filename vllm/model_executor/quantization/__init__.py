"""Quantized weight formats: how checkpoints store the weights of layers."""

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
