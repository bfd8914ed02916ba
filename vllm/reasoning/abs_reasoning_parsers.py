"""The module from which parsers written for vLLM import their base class."""

from vllm.reasoning.parsers import ReasoningParser, ReasoningParserManager

__all__ = ["ReasoningParser", "ReasoningParserManager"]
