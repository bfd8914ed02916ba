"""The asynchronous engine."""

from vllm.engine.async_llm_engine import AsyncLLM

__all__ = ["AsyncLLM"]
