"""Commands of `vllm` on all pages have flags and variables that exist. Nothing is run."""

import argparse
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from vllm.entrypoints.cli.main import create_parser
from vllm.env.compat import COMPAT_VARIABLES
from vllm.envs import Envs

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    if "vllm " in path.read_text(encoding="utf-8")
)


def code_lines(text: str) -> Iterator[str]:
    """Yield the lines of fenced and indented code."""
    is_fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
        elif is_fenced or line.startswith("    "):
            yield line.strip()


def read_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of `vllm`; a command may have several lines."""
    lines = code_lines(text)
    for line in lines:
        if not re.match(r"(?:[A-Z][A-Z0-9_]*=\S+ )*(?:vllm [a-z]|[A-Z][A-Z0-9_]*=\S+ \\$)", line):
            continue
        while line.endswith("\\"):
            line = line[:-1] + next(lines)
        while True:
            try:
                words = shlex.split(line, comments=True)
                break
            except ValueError:  # a quoted value continues in the next line
                line = f"{line} {next(lines)}"
        if "vllm" in words:
            yield words


@cache
def flags_of(*subcommands: str) -> frozenset[str]:
    parser: argparse.ArgumentParser = create_parser(subcommands)
    for name in subcommands:
        (action,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parser = action.choices[name]
    return frozenset(parser._option_string_actions)


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_have_flags_that_exist(page):
    known = {field.name for field in fields(Envs)} | COMPAT_VARIABLES.keys()
    for words in read_commands((ROOT / page).read_text(encoding="utf-8")):
        start = words.index("vllm")
        names = {word.partition("=")[0] for word in words[:start]}
        assert {name for name in names if name.startswith("VLLM_")} <= known, words
        subcommands = words[start + 1 : start + (3 if words[start + 1] == "bench" else 2)]
        flags = {word.partition("=")[0] for word in words[start:] if word.startswith("--")}
        assert flags <= flags_of(*subcommands), words


def test_commands_of_several_lines_are_read():
    indented = "    A=1 vllm serve M --x '{\"a\":\n        1}' --y   # why\n"
    text = f"{indented}\n```bash\nvllm plan \\\n -z\n```\nvllm is no command here"
    assert list(read_commands(text)) == [
        ["A=1", "vllm", "serve", "M", "--x", '{"a": 1}', "--y"],
        ["vllm", "plan", "-z"],
    ]
