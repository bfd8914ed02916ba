"""Classes that users choose by name and plug-ins add to. Knows no parser."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from vllm.errors import ConfigError

ParserT = TypeVar("ParserT")
AddedT = TypeVar("AddedT", bound=type)


class ParserRegistry(Generic[ParserT]):
    """Parsers of one kind, by name.

    Args:
        flag: the setting that takes the names, for messages.
        base: what every parser is a subclass of.
        parsers: those that are there without a plug-in.
    """

    def __init__(
        self, flag: str, base: type[ParserT], parsers: Mapping[str, type[ParserT]]
    ) -> None:
        self._flag = flag
        self._base = base
        self._parsers = dict(parsers)

    def names(self) -> list[str]:
        """All names, in the order of the alphabet."""
        return sorted(self._parsers)

    def get(self, name: str) -> type[ParserT]:
        """The parser of this name.

        Raises:
            ConfigError: there is none.
        """
        if name not in self._parsers:
            raise ConfigError(f"{self._flag} {name!r} is none of {', '.join(self.names())}")
        return self._parsers[name]

    def register_module(self, name: str | list[str]) -> Callable[[AddedT], AddedT]:
        """Decorator: the class is the parser of this name, or of all these names.

        A name that is taken goes to the new class. TypeError: the class is not of this kind.
        """
        names = [name] if isinstance(name, str) else name

        def register(parser: AddedT) -> AddedT:
            is_parser = isinstance(parser, type) and issubclass(parser, self._base)
            if not is_parser:
                raise TypeError(f"{parser!r} is not a subclass of {self._base.__name__}")
            self._parsers.update(dict.fromkeys(names, parser))
            return parser

        return register
