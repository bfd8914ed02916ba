"""Reasoning parsers: what of a model's text are its thoughts, and what is the answer."""

from vllm.reasoning.parsers import ReasoningParser, ReasoningParserManager

__all__ = ["ReasoningParser", "ReasoningParserManager", "names"]

names = ReasoningParserManager.names
"""Names of all parsers, in the order of the alphabet."""
