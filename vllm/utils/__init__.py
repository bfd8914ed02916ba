"""Helpers that are independent of inference."""

from vllm.utils.arguments import FlexibleArgumentParser
from vllm.utils.counter import Counter, random_uuid

__all__ = ["Counter", "FlexibleArgumentParser", "random_uuid"]
