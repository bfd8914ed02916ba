"""The table of statements: what five documents about vLLM on Gaudi say, and what proves each here.

The documents are not part of the repository. A row says in our words what one of them states
(`says`), where (`at`: a letter of `DOCUMENTS` and a section), and what became of it:

    test       node ids of the tests that prove it
    because    one line why it is not so here, or not only so; begins with one of `KINDS`
    variable   an environment variable; `default`, if given, is the one of `vllm.envs`, and
               `formula` that of a variable of linear bucketing
    architecture   a model class that has to be there
    command    a command line that has to be taken, with `env`, a model of `family` with values
               `model`, and what has to arrive (`expect`)
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

DOCUMENTS = {
    "R": "README_GAUDI of the fork, release 1.21.3",
    "Q": "the document about quantization and inference",
    "V": "the vendor's page about the inference server",
    "O": "the README of the fork, release 1.16",
    "W": "the document about warm-up",
}

KINDS = ("not built yet: ", "not proven: ", "different on purpose: ", "not ours: ", "advice: ")

_FOLDER = Path(__file__).parent / "statements"
_COMMANDS = "tests/seeds/test_command_lines.py::test_an_example_is_taken"
_DEFAULTS = "tests/seeds/test_table.py::test_the_default_of_a_variable_is_that_of_the_documents"
_FORMULAS = "tests/seeds/test_table.py::test_the_formula_of_a_bucket_variable_is_the_documented_one"
_ARCHITECTURES = "tests/seeds/test_table.py::test_an_architecture_has_a_model_class"


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One entry of the table."""

    title: str
    at: str
    says: str
    test: str | tuple[str, ...] = ()
    because: str = ""
    variable: str = ""
    default: Any = ...
    formula: str = ""
    architecture: str = ""
    command: str = ""
    env: dict[str, Any] = field(default_factory=dict)
    family: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    expect: dict[str, Any] = field(default_factory=dict)

    @property
    def tests(self) -> tuple[str, ...]:
        """Return the node ids of all tests that prove the statement."""
        named = (self.test,) if isinstance(self.test, str) else tuple(self.test)
        ours = (
            (_COMMANDS, bool(self.command)),
            (_DEFAULTS, self.default is not ...),
            (_FORMULAS, bool(self.formula)),
            (_ARCHITECTURES, bool(self.architecture)),
        )
        return (*(name for name in named if name), *(test for test, is_used in ours if is_used))


@cache
def read_table() -> tuple[Statement, ...]:
    """Return all statements, in the order of the page."""
    rows = []
    for path in sorted(_FOLDER.glob("*.yaml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        rows += [Statement(title=content["title"], **row) for row in content["rows"]]
    return tuple(rows)


def compatibility() -> Iterator[str]:
    """Return the lines of docs/compatibility.md below its note."""
    rows = read_table()
    yield "# Compatibility"
    yield ""
    yield "This page lists the statements of five documents about vLLM on Gaudi. For each one it"
    yield "says whether it is true for this engine, and which test proves that. Tests that need a"
    yield "card ran on a simulated card, never on a real one."
    yield ""
    yield "The documents:"
    yield ""
    yield from (f"- {letter}: {name}" for letter, name in DOCUMENTS.items())
    yield ""
    same = sum(not row.because for row in rows)
    counts = [f"{same} are true for this engine"]
    for kind in KINDS:
        number = sum(row.because.startswith(kind) for row in rows)
        counts.append(f'{number} are marked "{kind.removesuffix(": ")}"')
    yield f"Of {len(rows)} statements {', '.join(counts)}."
    title = ""
    for row in rows:
        if row.title != title:
            title = row.title
            yield from ("", f"## {title}", "", "| where | statement | here | proof |")
            yield "|---|---|---|---|"
        cells = (row.at, _statement(row), row.because or "yes", _proof(row.tests))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _statement(row: Statement) -> str:
    if row.command:
        return f"{row.says}: `{row.command}`"
    if not row.variable:
        return row.says
    value = row.formula
    if row.default not in (..., None):
        value = f"{row.default:d}" if isinstance(row.default, bool) else str(row.default)
    return f"`{row.variable}`{f', default `{value}`' if value else ''}: {row.says}"


def _proof(tests: tuple[str, ...]) -> str:
    names = [test.removeprefix("tests/").replace("::", " ") for test in tests]
    return ", ".join(f"`{name}`" for name in names)
