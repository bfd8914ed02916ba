"""The module from which parsers written for vLLM import their base class."""

from vllm.entrypoints.openai.tool_parsers.base import ToolParser
from vllm.entrypoints.openai.tool_parsers.manager import ToolParserManager

__all__ = ["ToolParser", "ToolParserManager"]
