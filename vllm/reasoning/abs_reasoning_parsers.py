"""The module from which parsers written for vLLM import their base class."""

from vllm.reasoning.manager import ReasoningParserManager
from vllm.reasoning.parsers import ReasoningParser

__all__ = ["ReasoningParser", "ReasoningParserManager"]
