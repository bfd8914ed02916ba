"""The tool parsers by name, and those that plug-ins add."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, TypeVar

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

ParserT = TypeVar("ParserT", bound=type[ToolParser])


class ToolParserManager:
    """Finds tool parsers by the names of `--tool-call-parser`."""

    _parsers: ClassVar[dict[str, type[ToolParser]]] = {
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
    }

    @classmethod
    def names(cls) -> list[str]:
        """All names, in the order of the alphabet."""
        return sorted(cls._parsers)

    @classmethod
    def get(cls, name: str) -> type[ToolParser]:
        """The parser of this name.

        Raises:
            ConfigError: there is none.
        """
        if name not in cls._parsers:
            raise ConfigError(f"tool_call_parser {name!r} is none of {', '.join(cls.names())}")
        return cls._parsers[name]

    @classmethod
    def register_module(cls, name: str | list[str]) -> Callable[[ParserT], ParserT]:
        """Decorator: the class is the parser of this name, or of all these names.

        A name that is taken goes to the new class. TypeError: the class is no `ToolParser`.
        """
        names = [name] if isinstance(name, str) else name

        def register(parser: ParserT) -> ParserT:
            if not (isinstance(parser, type) and issubclass(parser, ToolParser)):
                raise TypeError(f"{parser!r} is not a subclass of ToolParser")
            cls._parsers.update(dict.fromkeys(names, parser))
            return parser

        return register

    @classmethod
    def import_tool_parser(cls, path: str) -> None:
        """Run a Python file that registers parsers (`--tool-parser-plugin`).

        Raises:
            ConfigError: it is not there, fails, or registers nothing.
        """
        file = Path(path).expanduser()
        if not file.is_file():
            raise ConfigError(f"tool_parser_plugin: there is no file {path}")
        before = dict(cls._parsers)
        spec = importlib.util.spec_from_file_location(f"vllm_tool_parser_{file.stem}", file)
        if spec is None or spec.loader is None:
            raise ConfigError(f"tool_parser_plugin: {path} is not a Python file")
        try:
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
        except Exception as error:  # a program from outside; it may raise anything
            kind = type(error).__name__
            raise ConfigError(f"tool_parser_plugin: {path} fails: {kind}: {error}") from error
        if cls._parsers == before:
            raise ConfigError(
                f"tool_parser_plugin: {path} registers no parser; "
                f"use @ToolParserManager.register_module"
            )
