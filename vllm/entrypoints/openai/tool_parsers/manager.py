"""The tool parsers by name, those that plug-ins add, and the check of the flags that name them."""

from vllm.entrypoints.openai.tool_parsers.base import ToolParser
from vllm.entrypoints.openai.tool_parsers.deepseek import DeepSeekToolParser
from vllm.entrypoints.openai.tool_parsers.marked import (
    Granite20bToolParser,
    GraniteToolParser,
    HermesToolParser,
    InternLMToolParser,
    JambaToolParser,
    LlamaJsonToolParser,
    MistralToolParser,
    Phi4MiniToolParser,
    XlamToolParser,
)
from vllm.entrypoints.openai.tool_parsers.pythonic import (
    Llama4PythonicToolParser,
    PythonicToolParser,
)
from vllm.entrypoints.openai.tool_parsers.qwen3_coder import Qwen3CoderToolParser
from vllm.entrypoints.shared.server_args import ServerArgs
from vllm.reasoning import ReasoningParserManager
from vllm.utils.parser_registry import ParserRegistry, load_plugin


class ToolParserRegistry(ParserRegistry[ToolParser]):
    """Tool parsers, some of them from files of the user."""

    get_tool_parser = ParserRegistry.get

    def import_tool_parser(self, path: str) -> None:
        """Run a Python file that registers parsers (`--tool-parser-plugin`); see `load_plugin`."""
        load_plugin("tool_parser_plugin", path, [self, ReasoningParserManager])


ToolParserManager = ToolParserRegistry(
    "tool_call_parser",
    ToolParser,
    {
        "deepseek_v3": DeepSeekToolParser,
        "deepseek_v31": DeepSeekToolParser,
        "granite": GraniteToolParser,
        "granite-20b-fc": Granite20bToolParser,
        "hermes": HermesToolParser,
        "internlm": InternLMToolParser,
        "jamba": JambaToolParser,
        "llama3_json": LlamaJsonToolParser,
        "llama4_json": LlamaJsonToolParser,
        "llama4_pythonic": Llama4PythonicToolParser,
        "mistral": MistralToolParser,
        "phi4_mini": Phi4MiniToolParser,
        "phi4_mini_json": Phi4MiniToolParser,
        "pythonic": PythonicToolParser,
        "qwen": HermesToolParser,
        "qwen3_coder": Qwen3CoderToolParser,
        "xlam": XlamToolParser,
    },
    ("read_calls", "extract_tool_calls"),
)
"""Finds tool parsers by the names of `--tool-call-parser`."""


def check_parser_flags(args: ServerArgs) -> None:
    """Load the plug-ins that there are, and find the parsers.

    Raises:
        ConfigError: a plug-in cannot be used, or there is no parser of a name.
    """
    if args.tool_parser_plugin is not None:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin is not None:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    if args.tool_call_parser is not None:
        ToolParserManager.get(args.tool_call_parser)
    if args.reasoning_parser is not None:
        ReasoningParserManager.get(args.reasoning_parser)
