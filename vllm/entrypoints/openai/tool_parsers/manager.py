"""Register the tool parsers by name, including parsers of plug-ins, and check the flags that name
parsers.
"""

from vllm.entrypoints.openai.tool_parsers.base import ToolParser
from vllm.entrypoints.openai.tool_parsers.gemma import FunctionGemmaToolParser, Gemma4ToolParser
from vllm.entrypoints.openai.tool_parsers.harmony import HarmonyToolParser
from vllm.entrypoints.openai.tool_parsers.listed import DeepSeekToolParser, KimiK2ToolParser
from vllm.entrypoints.openai.tool_parsers.marked import (
    ApertusToolParser,
    CohereToolParser,
    GigaChat3ToolParser,
    Granite20bToolParser,
    GraniteToolParser,
    HermesToolParser,
    InternLMToolParser,
    JambaToolParser,
    LlamaJsonToolParser,
    MiniMaxToolParser,
    MistralToolParser,
    NemotronJsonToolParser,
    Phi4MiniToolParser,
    XlamToolParser,
)
from vllm.entrypoints.openai.tool_parsers.pythonic import (
    Lfm2ToolParser,
    Llama4PythonicToolParser,
    Olmo3ToolParser,
    PythonicToolParser,
)
from vllm.entrypoints.openai.tool_parsers.tagged import (
    DeepSeekV32ToolParser,
    Glm45ToolParser,
    LongCatToolParser,
    MiniMaxM2ToolParser,
    Qwen3CoderToolParser,
    SeedOssToolParser,
    Step3ToolParser,
)
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.reasoning import ReasoningParserManager
from vllm.utils.parser_registry import ParserRegistry, load_plugin


class ToolParserRegistry(ParserRegistry[ToolParser]):
    """Registry of tool parsers, including parsers from files of the user."""

    get_tool_parser = ParserRegistry.get

    def import_tool_parser(self, path: str) -> None:
        """Run a Python file that registers parsers (`--tool-parser-plugin`)."""
        load_plugin("tool_parser_plugin", path, [self, ReasoningParserManager])


ToolParserManager = ToolParserRegistry(
    "tool_call_parser",
    ToolParser,
    {
        "apertus": ApertusToolParser,
        "cohere_command3": CohereToolParser,
        "deepseek_v3": DeepSeekToolParser,
        "deepseek_v31": DeepSeekToolParser,
        "deepseek_v32": DeepSeekV32ToolParser,
        "deepseek_v4": DeepSeekV32ToolParser,
        "ernie45": HermesToolParser,
        "functiongemma": FunctionGemmaToolParser,
        "gemma4": Gemma4ToolParser,
        "gigachat3": GigaChat3ToolParser,
        "glm45": Glm45ToolParser,
        "glm47": Glm45ToolParser,
        "granite": GraniteToolParser,
        "granite-20b-fc": Granite20bToolParser,
        "granite4": HermesToolParser,
        "hermes": HermesToolParser,
        "hunyuan_a13b": JambaToolParser,
        "internlm": InternLMToolParser,
        "jamba": JambaToolParser,
        "kimi_k2": KimiK2ToolParser,
        "lfm2": Lfm2ToolParser,
        "llama3_json": LlamaJsonToolParser,
        "llama4_json": LlamaJsonToolParser,
        "llama4_pythonic": Llama4PythonicToolParser,
        "longcat": LongCatToolParser,
        "minimax": MiniMaxToolParser,
        "minimax_m2": MiniMaxM2ToolParser,
        "mistral": MistralToolParser,
        "nemotron_json": NemotronJsonToolParser,
        "nemotron_v3": Qwen3CoderToolParser,
        "olmo3": Olmo3ToolParser,
        "openai": HarmonyToolParser,
        "phi4_mini": Phi4MiniToolParser,
        "phi4_mini_json": Phi4MiniToolParser,
        "pythonic": PythonicToolParser,
        "qwen": HermesToolParser,
        "qwen3_coder": Qwen3CoderToolParser,
        "qwen3_xml": Qwen3CoderToolParser,
        "seed_oss": SeedOssToolParser,
        "step3": Step3ToolParser,
        "step3p5": Qwen3CoderToolParser,
        "xlam": XlamToolParser,
    },
    ("read_calls", "extract_tool_calls", "extract_tool_calls_streaming"),
)
"""Finds tool parsers by the names of `--tool-call-parser`."""


def check_parser_flags(args: ServerArgs) -> None:
    """Load the parser plug-ins that the flags name, and check that the named parsers exist.

    Raises:
        ConfigError: a plug-in cannot be used, or no parser has the given name.
    """
    if args.tool_parser_plugin is not None:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin is not None:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    if args.tool_call_parser is not None:
        ToolParserManager.get(args.tool_call_parser)
    if args.reasoning_parser is not None:
        ReasoningParserManager.get(args.reasoning_parser)
