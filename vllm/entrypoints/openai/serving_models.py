"""The module of this name in vLLM; the route is in `routes.models`."""

from vllm.entrypoints.openai.routes.models import BaseModelPath
from vllm.entrypoints.shared.served_adapters import LoRAModulePath

__all__ = ["BaseModelPath", "LoRAModulePath"]
