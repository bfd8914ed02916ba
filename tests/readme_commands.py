"""Read the shell commands of the READMEs and of the pages about Gaudi."""

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "README_GAUDI.md", "docs/gaudi_buckets.md", "docs/tuning_gaudi.md")

_IMAGE = "vllm-hpu-env"
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*=")


@dataclass(frozen=True)
class Command:
    """One command, on one line and without its comment."""

    page: str
    text: str
    title: str = ""
    """The comment in the line above, if it has no command."""

    @cached_property
    def words(self) -> list[str]:
        """Program and arguments, without variables and redirections."""
        words = shlex.split(self.text)
        words = words[len(self.variables) :]
        return words[: words.index(">")] if ">" in words else words

    @cached_property
    def variables(self) -> dict[str, str]:
        """Environment variables that are set only for this command."""
        found = {}
        for word in shlex.split(self.text):
            if not _VARIABLE.match(word):
                break
            name, _, found[name] = word.partition("=")
        return found

    @property
    def arguments(self) -> list[str]:
        """Arguments of `vllm`, here or in a container, where `serve` is implied; empty for other
        programs.
        """
        if self.words[0] == "vllm":
            return self.words[1:]
        if self.words[:2] != ["docker", "run"]:
            return []
        arguments = self.words[self.words.index(_IMAGE) + 1 :]
        return ["serve", *arguments] if not arguments or arguments[0][0] == "-" else arguments


def read_commands(page: str) -> list[Command]:
    """Return all commands of a page, in their order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found, title = [], ""
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        title = ""
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if line.startswith("#"):
                title = line.removeprefix("#").strip()
            elif line.strip():
                found.append(Command(page, _without_comment(line), title))
                title = ""
    return found


def read_tables(page: str, heading: str) -> list[list[str]]:
    """Return the rows of all tables below a heading of a page, without markup."""
    text = (ROOT / page).read_text(encoding="utf-8")
    level = heading.split()[0]
    (section,) = re.findall(rf"^{heading}\n(.*?)(?=^{level} |\Z)", text, re.DOTALL | re.MULTILINE)
    lines = re.findall(r"^\|(.*)\|$", section, re.MULTILINE)
    return [[cell.strip(" `*") for cell in line.split("|")] for line in lines]


def _without_comment(line: str) -> str:
    """Remove the comment of a line. No quoted text on these pages contains a `#`."""
    return re.sub(r"\s# .*", "", line).rstrip()
