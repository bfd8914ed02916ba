"""Create the jinja2 environment that templates of the Hugging Face hub expect.

Templates are foreign code. The sandbox protects Python's internals. For a template from a request,
the deadline and the memory limit of its process protect the rest.
"""

import functools
import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace


@functools.cache
def environment() -> jinja2.Environment:
    """Return the one environment for all templates."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlocks],
    )
    made.filters["tojson"] = _to_json
    made.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda pattern: datetime.now().strftime(pattern),
        namespace=_SafeNamespace,
        dict=_make_dict,
    )
    return made


class _GenerationBlocks(Extension):
    """Implements `{% generation %}`, which marks the assistant's text for training and does not
    change the text.
    """

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block and keep its body. Its variables end with the block, as in
        transformers.
        """
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _SafeNamespace(Namespace):
    """jinja2's namespace, without names that begin with an underscore."""

    def __init__(*args: Any, **attributes: Any) -> None:
        self, *given = args
        for name in dict(*given, **attributes):
            _refuse_private(name)
        Namespace.__init__(self, *given, **attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a namespace must not have the attribute {name!r}, because its name begins with _"
        )


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON that is not escaped for HTML, unlike jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))
