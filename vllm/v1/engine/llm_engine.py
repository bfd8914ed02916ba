"""The synchronous engine."""

from vllm.engine.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
