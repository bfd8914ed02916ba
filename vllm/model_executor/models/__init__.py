"""One file per model family, and the registry that finds them."""

from vllm.model_executor.models.registry import ModelRegistry

__all__ = ["ModelRegistry"]
