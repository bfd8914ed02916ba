"""Helpers that know nothing about inference."""

from vllm.utils.arguments import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
