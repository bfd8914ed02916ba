"""Collect the errors and log lines of the package for docs/messages.md.

A message is shown as its users see it, with `...` for each value. Advice is read from the tables of
docs/troubleshooting.md, where a message may be given in part.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.prose_texts import read_file

_MIN_WORDS = 3
"""With fewer words of its own, a message only passes on the text of another one."""
_VALUE = re.compile(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|%[-+.\d]*[a-z]")
_MIN_PART_CHARS = 9
_ABOUT_ALL = 20
"""A part of an entry that is shorter than this and that many messages have says nothing."""


@dataclass(frozen=True)
class Message:
    """A text that the package raises or logs."""

    text: str
    kind: str
    """error or log"""
    path: str


def read_messages(root: Path) -> list[Message]:
    """Read the messages of the package, sorted, each once per file."""
    found = set()
    for path in sorted((root / "vllm").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        for text in read_file(name, path.read_text(encoding="utf-8")):
            if text.kind == "message" and text.role in ("error", "log"):
                shown = _VALUE.sub("...", text.text).replace("%%", "%").strip()
                shown = re.sub(r"\.{6,}", "...", shown)
                if len(re.findall(r"[^\W\d_]{2,}", shown.replace("...", " "))) >= _MIN_WORDS:
                    found.add(Message(shown, text.role, name))
    return sorted(found, key=lambda each: (each.path, each.text.lower(), each.kind))


def read_advice(root: Path) -> list[tuple[list[str], str]]:
    """Read (parts of a message, what to do) from the tables about troubles."""
    page = (root / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    advice = []
    for cells in re.findall(r"^\| (.+?) \| .+? \| (.+?) \|$", page, re.MULTILINE):
        for message in re.findall(r"`([^`]+)`", cells[0]):
            parts = [part.strip(" '") for part in parts_of(message)]
            parts = [part for part in parts if len(part) >= _MIN_PART_CHARS]
            if sum(map(len, parts)) >= _ABOUT_ALL:
                advice.append((parts, cells[1]))
    return advice


def parts_of(message: str) -> list[str]:
    """Split a message of a page at its values: `...`, or a word in capitals."""
    return re.split(r"\.\.\.|'x'|--[xy]\b|\b[A-Z]+\b(?!_)", message)


def messages_page(root: Path) -> Iterator[str]:
    """Write the page: a table of messages for each folder of the package."""
    advice = read_advice(root)
    folders: dict[str, list[Message]] = defaultdict(list)
    for message in read_messages(root):
        _, folder, *rest = message.path.split("/")
        folders[folder if rest else "Modules outside of folders"].append(message)
    yield "# Messages"
    yield ""
    yield "This page lists every error and log line of the package. `...` stands for a value, so"
    yield "search for a part of your message without values. The advice in the last column is from"
    yield "[troubleshooting](troubleshooting.md)."
    for folder, messages in sorted(folders.items()):
        yield ""
        yield f"## {folder}"
        yield ""
        yield "| message | kind | file | what to do |"
        yield "|---|---|---|---|"
        for message in messages:
            found = [
                todo
                for parts, todo in advice
                if all(part in message.text for part in parts) and message.kind == "error"
            ]
            shown = _code(message.text)
            path = message.path.removeprefix("vllm/")
            yield f"| {shown} | {message.kind} | `{path}` | {found[0] if found else ''} |"


def _code(text: str) -> str:
    tick = "``" if "`" in text else "`"
    space = " " if tick == "``" else ""
    return f"{tick}{space}{text}{space}{tick}".replace("|", "\\|")
