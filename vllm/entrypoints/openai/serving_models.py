"""Keep the module name of vLLM for imports; the route is in `routes.models`."""

from vllm.entrypoints.openai.routes.models import BaseModelPath
from vllm.entrypoints.shared.served_adapters import LoRAModulePath

__all__ = ["BaseModelPath", "LoRAModulePath"]
