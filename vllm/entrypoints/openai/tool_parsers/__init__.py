"""Tool parsers: find the tool calls in a model's text."""

from vllm.entrypoints.openai.tool_parsers.base import ParsedDelta, ToolParser
from vllm.entrypoints.openai.tool_parsers.manager import ToolParserManager

__all__ = ["ParsedDelta", "ToolParser", "ToolParserManager", "names"]

names = ToolParserManager.names
"""Names of all parsers in alphabetical order."""
