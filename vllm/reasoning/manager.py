"""The reasoning parsers by name."""

from vllm.reasoning.parsers import (
    DeepSeekR1ReasoningParser,
    GraniteReasoningParser,
    Qwen3ReasoningParser,
    ReasoningParser,
)
from vllm.utils.parser_registry import ParserRegistry, load_plugin


class ReasoningParserRegistry(ParserRegistry[ReasoningParser]):
    """Reasoning parsers, some of them from files of the user."""

    get_reasoning_parser = ParserRegistry.get

    def import_reasoning_parser(self, path: str) -> None:
        """Run a Python file that registers parsers (`--reasoning-parser-plugin`)."""
        load_plugin("reasoning_parser_plugin", path, [self])


ReasoningParserManager = ReasoningParserRegistry(
    "reasoning_parser",
    ReasoningParser,
    {
        "deepseek_r1": DeepSeekR1ReasoningParser,
        "granite": GraniteReasoningParser,
        "qwen3": Qwen3ReasoningParser,
    },
    ("feed", "starts", "ends", "extract_reasoning_content", "extract_reasoning"),
)
"""Finds reasoning parsers by the names of `--reasoning-parser`."""
