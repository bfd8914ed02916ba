"""Export the base class for tool parsers that were written for vLLM."""

from vllm.entrypoints.openai.tool_parsers.base import ToolParser
from vllm.entrypoints.openai.tool_parsers.manager import ToolParserManager

__all__ = ["ToolParser", "ToolParserManager"]
