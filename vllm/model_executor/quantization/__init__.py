"""Weight formats other than dense: which `LinearMethod` a checkpoint's layers need."""

from vllm.model_executor.quantization.registry import (
    Quantization,
    quantization_of,
    register_quantization,
)

__all__ = ["Quantization", "quantization_of", "register_quantization"]
