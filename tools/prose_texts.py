"""Find the English of the tree: messages, docstrings, comments and pages, each with its line.

Reads sources as text or with `ast`; nothing is imported. Rules about the texts are in
tools/check_prose.py.
"""

import ast
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PYTHON_FOLDERS = ("vllm", "gaudi_sim", "benchmarks", "tools", "examples", "tests")

_HELP_FIELDS = ("vllm/config/", "vllm/entrypoints/shared/server_args.py")
"""Docstrings of fields in these are help texts of flags."""
_HELP_FILES = (
    "vllm/envs.py",
    "vllm/env/compat.py",
    "vllm/env/others.py",
    "vllm/engine/resolve/compat_args.py",
    "vllm/entrypoints/openai/cli_args.py",
)
"""Every string with a space in these is a help text of a flag or a variable."""
_HTTP = "vllm/entrypoints/"
_LOG_CALLS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
_ERROR_NAME = re.compile(r"(?:Error|Exception|_error|refused|Exit)$")
_HELP_KEYWORDS = {"help", "description", "epilog"}
_FLAG_CALLS = {"add_switch", "add_number", "add_text"}
"""Their third argument is a help text (`vllm.utils.arguments`)."""
_GENERATED = "<!-- Written by "
_DIRECTIVE = re.compile(r"noqa|type:|pragma|ruff|fmt|mypy|isort|!|clang-format|NOLINT")
_CODE = re.compile(r"``?[^`]+``?")
_PYTHON_TOKEN = re.compile(
    r'"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
    r"|'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'(?:\\.|[^'\\\n])*'"
    r"|#(?P<comment>[^\n]*)",
    re.DOTALL,
)
_CPP_TOKEN = re.compile(r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'|//(?P<comment>[^\n]*)")


@dataclass(frozen=True)
class Text:
    """One text as a reader sees it, without line breaks.

    Attributes:
        kind: message (errors, logs, helps), docstring, comment, page, or http (any string of the
            server).
        role: what it is among its kind: error, log, help; function, property, other; and so on.
        path: of its file, relative to the root.
        text: the words.
        starts: offset in `text` at which each line of the file begins, and the number of the line.
    """

    kind: str
    role: str
    path: str
    text: str
    starts: tuple[tuple[int, int], ...]

    @cached_property
    def prose(self) -> str:
        """The text with its code spans masked; offsets are the same."""
        return _CODE.sub(lambda code: f"`{'x' * (len(code[0]) - 2)}`", self.text)

    def line_at(self, offset: int) -> int:
        """Return the line of the file that has this offset of the text."""
        return self.starts[bisect_right(self.starts, (offset, 10**9)) - 1][1]


def make_text(kind: str, role: str, path: str, lines: Iterable[tuple[int, str]]) -> Text:
    """Join lines of a file, given as (number, content), into a text."""
    starts, joined = [], ""
    for number, content in lines:
        words = " ".join(content.split())
        if words or not starts:
            starts.append((len(joined) + bool(joined), number))
            joined = f"{joined} {words}" if joined else words
    return Text(kind, role, path, joined, tuple(starts))


def source_files(root: Path) -> list[Path]:
    """List the files of the tree that have English of this project, sorted."""
    found = [*root.glob("*.py"), *root.glob("*.md"), *root.glob("docs/**/*.md")]
    for folder in PYTHON_FOLDERS:
        found += (root / folder).rglob("*.py")
    found += (path for path in (root / "csrc").rglob("*") if path.suffix in (".cpp", ".h"))
    return sorted(found)


def read_file(name: str, source: str) -> list[Text]:
    """Find the texts of one file; its name says what language it is in."""
    if name.endswith(".md"):
        return [] if source.startswith(_GENERATED) else list(_read_page(name, source))
    if name.endswith((".cpp", ".h")):
        return list(_read_comments(name, source, _CPP_TOKEN, "//"))
    return [*_read_python(name, source), *_read_comments(name, source, _PYTHON_TOKEN, "#")]


def _read_python(name: str, source: str) -> Iterator[Text]:
    is_test = name.startswith("tests/")
    seen: set[int] = set()  # ids of docstrings and of parts of f-strings
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for role, constant in _docstrings_of(node, name):
                seen.add(id(constant))
                kind = "message" if role == "help" else "docstring"
                yield make_text(kind, role, name, _lines_of(constant))
        if is_test:
            continue
        for role, expression in _messages_of(node):
            text = literal(expression)
            if text is not None and " " in text:
                yield make_text("message", role, name, [(expression.lineno, text)])
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and id(node) not in seen:
            seen.update(map(id, getattr(node, "values", ())))
            text = literal(node)
            if text is None or " " not in text:
                continue
            if name in _HELP_FILES:
                yield make_text("message", "help", name, [(node.lineno, text)])
            if name.startswith(_HTTP):
                yield make_text("http", "string", name, [(node.lineno, text)])


def _docstrings_of(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[tuple[str, ast.Constant]]:
    """Yield the docstring of a definition and of its fields, with the role of each."""
    if node.body and (own := _string_of(node.body[0])) is not None:
        yield _role_of(node), own
    is_help = name.startswith(_HELP_FIELDS) and isinstance(node, ast.ClassDef)
    for before, statement in zip(node.body, node.body[1:], strict=False):
        if isinstance(before, (ast.Assign, ast.AnnAssign)):
            field = _string_of(statement)
            if field is not None:
                yield "help" if is_help else "field", field


def _string_of(statement: ast.stmt) -> ast.Constant | None:
    value = statement.value if isinstance(statement, ast.Expr) else None
    is_string = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return value if is_string else None  # type: ignore[return-value]


def _role_of(node: ast.AST) -> str:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return "other"
    decorators = map(ast.unparse, node.decorator_list)
    return "property" if any("property" in each for each in decorators) else "function"


def _lines_of(constant: ast.Constant) -> list[tuple[int, str]]:
    """Number the lines of a docstring; lines of examples are left out."""
    assert isinstance(constant.value, str)
    lines = enumerate(constant.value.splitlines(), constant.lineno)
    return [(number, line) for number, line in lines if not line.lstrip().startswith(">>>")]


def _messages_of(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the expressions of texts for users: of errors, log lines and helps."""
    if not isinstance(node, ast.Call):
        return
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if _ERROR_NAME.search(name):
        yield from (("error", each) for each in node.args[:2])
    elif name == "warn" or (
        name.removesuffix("_once") in _LOG_CALLS
        and isinstance(function, ast.Attribute)
        and "log" in ast.unparse(function.value).lower()
    ):
        yield from (("log", each) for each in node.args[:2])
    elif name in _FLAG_CALLS:
        yield from (("help", each) for each in node.args[2:3])
    for keyword in node.keywords:
        if keyword.arg in _HELP_KEYWORDS:
            yield "help", keyword.value


def literal(node: ast.expr) -> str | None:
    """Return the text of a string expression, with `{...}` for what is put in; None for others."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = (
            each.value if isinstance(each, ast.Constant) else f"{{{ast.unparse(each.value)}}}"  # type: ignore[attr-defined]
            for each in node.values
        )
        return "".join(map(str, parts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mod)):
        left = literal(node.left)
        right = literal(node.right) if isinstance(node.op, ast.Add) else ""
        if left is None and not right:
            return None
        return f"{'{...}' if left is None else left}{'{...}' if right is None else right}"
    return None


def _read_comments(name: str, source: str, token: re.Pattern[str], sign: str) -> Iterator[Text]:
    """Join comments on consecutive lines of their own; a comment after code is one by itself."""
    breaks = [match.start() for match in re.finditer("\n", source)]
    block: list[tuple[int, str]] = []
    for match in token.finditer(source):
        if match["comment"] is None:
            continue
        content = match["comment"].lstrip(sign[0]).strip()
        number = bisect_left(breaks, match.start()) + 1
        before = source[breaks[number - 2] + 1 if number > 1 else 0 : match.start()]
        if block and (before.strip() or block[-1][0] != number - 1):
            yield make_text("comment", "comment", name, block)
            block = []
        if _DIRECTIVE.match(content):
            continue
        if before.strip():
            yield make_text("comment", "comment", name, [(number, content)])
        else:
            block.append((number, content))
    if block:
        yield make_text("comment", "comment", name, block)


def _read_page(name: str, source: str) -> Iterator[Text]:
    """Yield paragraphs, items of lists, headings and rows of tables of a Markdown page."""
    paragraph: list[tuple[int, str]] = []
    is_code = False
    for number, line in [*enumerate(source.splitlines(), 1), (0, "")]:
        stripped = line.strip()
        is_fence = stripped.startswith("```")
        is_item = re.match(r"[-*+] |\d+\. |\||#|>", stripped) is not None
        is_indented = line.startswith("    ") and not paragraph
        ends = is_fence or is_item or not stripped
        if ends and paragraph:
            yield make_text("page", "paragraph", name, paragraph)
            paragraph = []
        if is_fence:
            is_code = not is_code
        elif not is_code and stripped and not is_indented:
            paragraph.append((number, stripped))
