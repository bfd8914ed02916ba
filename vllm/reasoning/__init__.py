"""Split a model's text into reasoning and answer."""

from vllm.reasoning.manager import ReasoningParserManager
from vllm.reasoning.parsers import ReasoningParser

__all__ = ["ReasoningParser", "ReasoningParserManager", "names"]

names = ReasoningParserManager.names
"""Names of all parsers in alphabetical order."""
