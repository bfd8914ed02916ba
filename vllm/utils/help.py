"""Print `--help` for commands with hundreds of flags: an overview, one group, one flag, or a
search.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

_MAX_SHOWN = 60
"""Flags that plain `--help` shows; a command with more shows its groups instead."""

_TEXT = (
    "show this message; --help=all: every flag; --help=listgroup: the groups; --help=GROUP, "
    "--help=FLAG or --help=WORD: only these flags"
)


class HelpAction(argparse.Action):
    """Implements `-h`, `--help` and `--help=TOPIC`: prints and exits with code 0, or 2 if nothing
    matches.

    TOPIC is `all`, `listgroup`, the name of a group or flag, or a word in the names or help texts
    of flags. Case and underscores do not matter.
    """

    def __init__(self, option_strings: Sequence[str], dest: str = argparse.SUPPRESS) -> None:
        super().__init__(
            option_strings, dest, nargs="?", default=argparse.SUPPRESS, metavar="TOPIC", help=_TEXT
        )

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        parser._print_message(_text(parser, str(values or "")), sys.stdout)
        parser.exit(0)


_Group = tuple[str, str, list[argparse.Action]]
"""Title, description and actions."""


def _text(parser: argparse.ArgumentParser, asked: str) -> str:
    """Return the help on a topic; exit with an error if nothing matches."""
    topic = asked.strip().lower().replace("_", "-")
    has_commands = any(isinstance(x, argparse._SubParsersAction) for x in parser._actions)
    if topic == "all" or has_commands:
        return parser.format_help()
    if topic == "listgroup":
        return _groups_text(parser)
    if topic:
        found = _find(parser, topic)
        if not found:
            parser.error(
                f"no flag of '{parser.prog}' matches {asked!r}: give the name of a group "
                f"(--help=listgroup), of a flag, or a word of its text. Environment variables are "
                f"listed in docs/env_variables.md"
            )
        return _flags_text(parser, found)
    if sum(1 for action in parser._actions if action.option_strings) <= _MAX_SHOWN:
        return parser.format_help()
    return _overview(parser)


def _groups(parser: argparse.ArgumentParser) -> list[_Group]:
    """Return the groups that contain flags, in order."""
    found = []
    for group in parser._action_groups:
        actions = [x for x in group._group_actions if x.help != argparse.SUPPRESS]
        if actions:
            found.append((group.title or "", group.description or "", actions))
    return found


def _find(parser: argparse.ArgumentParser, topic: str) -> list[_Group]:
    """Return the flags that match a topic: a whole group, else one flag, else all flags with the
    topic in their name, else all with it in their help text.
    """
    groups = _groups(parser)
    named = [group for group in groups if group[0].lower().replace(" ", "-") == topic]
    if named:
        return named
    word = topic.lstrip("-")

    def names(action: argparse.Action) -> list[str]:
        return [name.lstrip("-") for name in action.option_strings] or [action.dest]

    tests = (
        lambda action: word in names(action),
        lambda action: any(word in name for name in names(action)),
        lambda action: word in (action.help or "").lower().replace("_", "-"),
    )
    for matches in tests:
        found = [(title, text, [x for x in some if matches(x)]) for title, text, some in groups]
        if any(some for _, _, some in found):
            return [group for group in found if group[2]]
    return []


def _flags_text(parser: argparse.ArgumentParser, groups: Sequence[_Group]) -> str:
    """Return the help of flags, under the titles of their groups."""
    formatter = parser._get_formatter()
    for title, description, actions in groups:
        formatter.start_section(title)
        formatter.add_text(description)
        formatter.add_arguments(actions)
        formatter.end_section()
    return formatter.format_help()


def _groups_text(parser: argparse.ArgumentParser) -> str:
    """Return one line for each group: its name, number of flags, and the first sentence of its
    description.
    """
    groups = _groups(parser)
    width = max(len(title) for title, _, _ in groups)
    lines = []
    for title, description, actions in groups:
        first = " ".join(description.split("\n\n")[0].split())
        lines.append(f"  {title:{width}}  {len(actions):3}  {first}".rstrip())
    return "\n".join(lines) + "\n"


def _overview(parser: argparse.ArgumentParser) -> str:
    """Return the text that plain `--help` prints for a command with many flags."""
    return (
        f"{parser.format_usage()}\n{parser.description or ''}\n\n"
        f"groups of flags, with their number:\n{_groups_text(parser)}\n"
        f"  {parser.prog} --help=all           every flag\n"
        f"  {parser.prog} --help=GROUP         one group, such as CacheConfig\n"
        f"  {parser.prog} --help=max-num-seqs  one flag\n"
        f"  {parser.prog} --help=lora          flags with this word in their name or text\n"
    )
