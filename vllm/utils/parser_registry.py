"""Register classes that users choose by name, and that plug-ins can add. Independent of the
parsers.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from vllm.errors import ConfigError

ParserT = TypeVar("ParserT")
AddedT = TypeVar("AddedT", bound=type)


class ParserRegistry(Generic[ParserT]):
    """Stores the parsers of one kind by name.

    Args:
        flag: setting that takes the names, for messages.
        base: base class of all parsers.
        parsers: the built-in parsers.
        methods: a parser of a plug-in must define at least one of these.
    """

    def __init__(
        self,
        flag: str,
        base: type[ParserT],
        parsers: Mapping[str, type[ParserT]],
        methods: Sequence[str],
    ) -> None:
        self._flag = flag
        self._base = base
        self.parsers = dict(parsers)
        self._methods = methods

    def names(self) -> list[str]:
        """Return all names in alphabetical order."""
        return sorted(self.parsers)

    def get(self, name: str) -> type[ParserT]:
        """Return the parser with this name.

        Raises:
            ConfigError: no parser has this name.
        """
        if name not in self.parsers:
            raise ConfigError(f"{self._flag} {name!r} is not one of {', '.join(self.names())}")
        return self.parsers[name]

    def snapshot(self) -> dict[str, type[ParserT]]:
        """Return the current parsers by name (a copy)."""
        return dict(self.parsers)

    @overload
    def register_module(
        self, name: str | Sequence[str] | None = None, force: bool = True, *, module: AddedT
    ) -> AddedT: ...

    @overload
    def register_module(
        self, name: str | Sequence[str] | None = None, force: bool = True, module: None = None
    ) -> Callable[[AddedT], AddedT]: ...

    def register_module(
        self, name: str | Sequence[str] | None = None, force: bool = True, module: Any = None
    ) -> Any:
        """Register a class as the parser of a name. Acts as a decorator if `module` is not given.

        Args:
            name: one name or several; None: the name of the class.
            force: replace a parser that has this name; False: raise KeyError.
            module: the class.

        Raises:
            TypeError: the class has the wrong base class, or defines none of the needed methods.
            KeyError: the name is taken.
        """

        def register(parser: AddedT) -> AddedT:
            self._check(parser)
            names = [parser.__name__] if name is None else [name] if isinstance(name, str) else name
            for each in names:
                if not force and each in self.parsers:
                    raise KeyError(f"{self._flag} {each!r} is registered already")
                self.parsers[each] = parser
            return parser

        return register if module is None else register(module)

    def _check(self, parser: type) -> None:
        if not (isinstance(parser, type) and issubclass(parser, self._base)):
            raise TypeError(f"{parser!r} is not a subclass of {self._base.__name__}")
        is_derived = any(issubclass(parser, known) for known in self.parsers.values())
        if not is_derived and not any(_overrides(parser, self._base, n) for n in self._methods):
            raise TypeError(f"{parser.__name__} must define {' or '.join(self._methods)}")


def _overrides(parser: type, base: type, name: str) -> bool:
    return getattr(parser, name, None) is not getattr(base, name, None)


def overrides_first(
    parser: type, names: Sequence[str], others: Sequence[str], *, base: type
) -> bool:
    """Return which of two interfaces a parser class implements: True if its most derived class with
    any of the methods defines one of `names`.

    Args:
        parser: a subclass of `base`.
        names: methods of the one interface.
        others: methods of the other interface, which wins if a class defines methods of both.
        base: common base class; its own methods do not count.
    """
    for kind in parser.__mro__[: parser.__mro__.index(base)]:
        if any(name in vars(kind) for name in others):
            return False
        if any(name in vars(kind) for name in names):
            return True
    return False


def load_plugin(flag: str, path: str, registries: Sequence[ParserRegistry[Any]]) -> None:
    """Run a Python file that registers parsers.

    Args:
        flag: setting with the path, for messages.
        path: path of the file.
        registries: registries to which the file may add parsers.

    Raises:
        ConfigError: the file does not exist, fails, or registers nothing.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{flag}: there is no file {path}")
    before = [registry.snapshot() for registry in registries]
    spec = importlib.util.spec_from_file_location(f"vllm_{flag}_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{flag}: {path} is not a Python file")
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except Exception as error:  # foreign code may raise anything
        raise ConfigError(
            f"{flag}: {path} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if before == [registry.snapshot() for registry in registries]:
        raise ConfigError(
            f"{flag}: {path} registers no parser; use @ToolParserManager.register_module or "
            f"@ReasoningParserManager.register_module"
        )
