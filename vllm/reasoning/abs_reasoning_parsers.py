"""The place where parsers written for vLLM look for their base class."""

from vllm.reasoning.parsers import ReasoningParser, ReasoningParserManager

__all__ = ["ReasoningParser", "ReasoningParserManager"]
