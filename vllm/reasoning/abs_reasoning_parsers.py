"""The place where parsers written for vLLM look for their base class."""

from vllm.reasoning.manager import ReasoningParserManager
from vllm.reasoning.parsers import ReasoningParser

__all__ = ["ReasoningParser", "ReasoningParserManager"]
