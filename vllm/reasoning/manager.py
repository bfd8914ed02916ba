"""The reasoning parsers by name."""

from vllm.reasoning.parsers import (
    DeepSeekR1ReasoningParser,
    GraniteReasoningParser,
    Qwen3ReasoningParser,
    ReasoningParser,
)
from vllm.utils.parser_registry import ParserRegistry

ReasoningParserManager = ParserRegistry[ReasoningParser](
    "reasoning_parser",
    ReasoningParser,
    {
        "deepseek_r1": DeepSeekR1ReasoningParser,
        "granite": GraniteReasoningParser,
        "qwen3": Qwen3ReasoningParser,
    },
)
"""Finds reasoning parsers by the names of `--reasoning-parser`."""
