"""Register the reasoning parsers by name, of this package and of plug-ins."""

from vllm.reasoning.harmony import HarmonyReasoningParser
from vllm.reasoning.parsers import (
    ApertusReasoningParser,
    AppendThinkReasoningParser,
    CohereReasoningParser,
    DeepSeekR1ReasoningParser,
    DeepSeekV3ReasoningParser,
    Ernie45ReasoningParser,
    Gemma4ReasoningParser,
    GraniteReasoningParser,
    HunyuanReasoningParser,
    KimiK2ReasoningParser,
    MistralReasoningParser,
    Qwen3ReasoningParser,
    ReasoningParser,
    SeedOssReasoningParser,
)
from vllm.utils.parser_registry import ParserRegistry, load_plugin


class ReasoningParserRegistry(ParserRegistry[ReasoningParser]):
    """Registry of reasoning parsers, including parsers from files of the user."""

    get_reasoning_parser = ParserRegistry.get

    def import_reasoning_parser(self, path: str) -> None:
        """Run a Python file that registers parsers (`--reasoning-parser-plugin`)."""
        load_plugin("reasoning_parser_plugin", path, [self])


ReasoningParserManager = ReasoningParserRegistry(
    "reasoning_parser",
    ReasoningParser,
    {
        "apertus": ApertusReasoningParser,
        "cohere_command3": CohereReasoningParser,
        "deepseek_r1": DeepSeekR1ReasoningParser,
        "deepseek_v3": DeepSeekV3ReasoningParser,
        "ernie45": Ernie45ReasoningParser,
        "gemma4": Gemma4ReasoningParser,
        "glm45": Qwen3ReasoningParser,
        "granite": GraniteReasoningParser,
        "holo2": DeepSeekR1ReasoningParser,
        "hunyuan_a13b": HunyuanReasoningParser,
        "kimi_k2": KimiK2ReasoningParser,
        "minimax_m2": DeepSeekR1ReasoningParser,
        "minimax_m2_append_think": AppendThinkReasoningParser,
        "mistral": MistralReasoningParser,
        "nemotron_v3": DeepSeekR1ReasoningParser,
        "olmo3": DeepSeekR1ReasoningParser,
        "openai_gptoss": HarmonyReasoningParser,
        "qwen3": Qwen3ReasoningParser,
        "seed_oss": SeedOssReasoningParser,
        "step3": DeepSeekR1ReasoningParser,
        "step3p5": DeepSeekR1ReasoningParser,
    },
    (
        *("feed", "starts", "ends", "extract_reasoning_content", "extract_reasoning"),
        *("extract_reasoning_content_streaming", "extract_reasoning_streaming"),
    ),
)
"""Finds reasoning parsers by the names of `--reasoning-parser`."""
