"""Export the base class for reasoning parsers that were written for vLLM."""

from vllm.reasoning.manager import ReasoningParserManager
from vllm.reasoning.parsers import ReasoningParser

__all__ = ["ReasoningParser", "ReasoningParserManager"]
