"""The place where parsers written for vLLM look for their base class."""

from vllm.entrypoints.openai.tool_parsers.base import ToolParser
from vllm.entrypoints.openai.tool_parsers.manager import ToolParserManager

__all__ = ["ToolParser", "ToolParserManager"]
