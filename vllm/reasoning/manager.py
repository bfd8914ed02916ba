"""The reasoning parsers by name."""

from collections.abc import Callable
from typing import ClassVar, TypeVar

from vllm.errors import ConfigError
from vllm.reasoning.parsers import (
    DeepSeekR1ReasoningParser,
    GraniteReasoningParser,
    Qwen3ReasoningParser,
    ReasoningParser,
)

ParserT = TypeVar("ParserT", bound=type[ReasoningParser])


class ReasoningParserManager:
    """Finds reasoning parsers by the names of `--reasoning-parser`."""

    _parsers: ClassVar[dict[str, type[ReasoningParser]]] = {
        "deepseek_r1": DeepSeekR1ReasoningParser,
        "granite": GraniteReasoningParser,
        "qwen3": Qwen3ReasoningParser,
    }

    @classmethod
    def names(cls) -> list[str]:
        """All names, in the order of the alphabet."""
        return sorted(cls._parsers)

    @classmethod
    def get(cls, name: str) -> type[ReasoningParser]:
        """The parser of this name.

        Raises:
            ConfigError: there is none.
        """
        if name not in cls._parsers:
            raise ConfigError(f"reasoning_parser {name!r} is none of {', '.join(cls.names())}")
        return cls._parsers[name]

    @classmethod
    def register_module(cls, name: str | list[str]) -> Callable[[ParserT], ParserT]:
        """Decorator: the class is the parser of this name, or of all these names.

        A name that is taken goes to the new class. TypeError: the class is no `ReasoningParser`.
        """
        names = [name] if isinstance(name, str) else name

        def register(parser: ParserT) -> ParserT:
            if not (isinstance(parser, type) and issubclass(parser, ReasoningParser)):
                raise TypeError(f"{parser!r} is not a subclass of ReasoningParser")
            cls._parsers.update(dict.fromkeys(names, parser))
            return parser

        return register
