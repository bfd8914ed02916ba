"""The tool parsers by name, and those that plug-ins add."""

import importlib.util
from pathlib import Path

from vllm.entrypoints.openai.tool_parsers.base import ToolParser
from vllm.entrypoints.openai.tool_parsers.deepseek import DeepSeekToolParser
from vllm.entrypoints.openai.tool_parsers.marked import (
    Granite20bToolParser,
    GraniteToolParser,
    HermesToolParser,
    InternLMToolParser,
    JambaToolParser,
    LlamaJsonToolParser,
    Phi4MiniToolParser,
    XlamToolParser,
)
from vllm.entrypoints.openai.tool_parsers.mistral import MistralToolParser
from vllm.entrypoints.openai.tool_parsers.pythonic import (
    Llama4PythonicToolParser,
    PythonicToolParser,
)
from vllm.entrypoints.openai.tool_parsers.qwen3_coder import Qwen3CoderToolParser
from vllm.errors import ConfigError
from vllm.utils.parser_registry import ParserRegistry


class ToolParserRegistry(ParserRegistry[ToolParser]):
    """Tool parsers, some of them from files of the user."""

    def import_tool_parser(self, path: str) -> None:
        """Run a Python file that registers parsers (`--tool-parser-plugin`).

        Raises:
            ConfigError: it is not there, fails, or registers nothing.
        """
        file = Path(path).expanduser()
        if not file.is_file():
            raise ConfigError(f"tool_parser_plugin: there is no file {path}")
        before = dict(self._parsers)
        spec = importlib.util.spec_from_file_location(f"vllm_tool_parser_{file.stem}", file)
        if spec is None or spec.loader is None:
            raise ConfigError(f"tool_parser_plugin: {path} is not a Python file")
        try:
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
        except Exception as error:  # a program from outside; it may raise anything
            kind = type(error).__name__
            raise ConfigError(f"tool_parser_plugin: {path} fails: {kind}: {error}") from error
        if self._parsers == before:
            raise ConfigError(
                f"tool_parser_plugin: {path} registers no parser; "
                f"use @ToolParserManager.register_module"
            )


ToolParserManager = ToolParserRegistry(
    "tool_call_parser",
    ToolParser,  # type: ignore[type-abstract]
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
)
"""Finds tool parsers by the names of `--tool-call-parser`."""
