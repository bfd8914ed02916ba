"""Reasoning parsers: split a model's text into reasoning and answer."""

from vllm.reasoning.parsers import ReasoningParser, ReasoningParserManager

__all__ = ["ReasoningParser", "ReasoningParserManager", "names"]

names = ReasoningParserManager.names
"""Names of all parsers in alphabetical order."""
