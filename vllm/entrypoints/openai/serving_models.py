"""The module of this name in vLLM; the route is in `routes.models`."""

from vllm.entrypoints.openai.routes.models import BaseModelPath

__all__ = ["BaseModelPath"]
