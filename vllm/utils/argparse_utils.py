"""Keep the module name of newer releases of vLLM for imports; the class is in `arguments`."""

from vllm.utils.arguments import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
