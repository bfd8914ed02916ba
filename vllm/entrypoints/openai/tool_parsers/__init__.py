"""Tool parsers: which calls a model has written into its text."""

from vllm.entrypoints.openai.tool_parsers.base import ParsedDelta, ToolParser
from vllm.entrypoints.openai.tool_parsers.manager import ToolParserManager

__all__ = ["ParsedDelta", "ToolParser", "ToolParserManager", "names"]

names = ToolParserManager.names
"""Names of all parsers, in the order of the alphabet."""
