"""Check the English of the tree against the glossary, with a ratchet.

python tools/check_prose.py                 compare with the baseline; exit with 1 if a count rises
python tools/check_prose.py PATH ...        list every finding in these files or folders
python tools/check_prose.py --update        lower the baseline to what is found now
python tools/check_prose.py --accept-new    rewrite it after files have moved
python tools/check_prose.py --start         add rules that the baseline does not have yet
python tools/check_prose.py --message FILE  check the message of a commit (a hook of git)

tools/glossary.toml has the rules. tools/prose_baseline.txt has how often each is broken in each
file today, `path rule count` on sorted lines, and counts only fall:

- In a file that the baseline knows, no count may rise.
- Findings in a file that it does not know are accepted while the rule has no more of them in the
  whole tree than in the whole baseline. So a file may move, and a new file has to be clean.

A branch does not need `--update`: a count below the baseline is fine. Git merges the baseline by
keeping the lines of both sides (.gitattributes), and the lower count of a file and rule is valid.
"""

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # works in a checkout that is not installed

from tools.prose_texts import Text, read_file, source_files  # noqa: E402

GLOSSARY = "tools/glossary.toml"
BASELINE = "tools/prose_baseline.txt"
EXCUSE = "prose: ok"
"""Findings on a line that contains this do not count."""

_MAX_SHOWN_CHARS = 100
_MAX_SHOWN_FINDINGS = 40
_MIN_ERROR_WORDS = 3
"""With fewer words of its own, an error only passes on what others say."""
_PLACEHOLDER = re.compile(r"\{[^}]*\}|%[sdr]")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\s\|\s")
_CODES = re.compile(
    r"Input should"
    r"|\((?:missing|[a-z]+(?:_[a-z]+)*_(?:type|parsing|equal|error|forbidden|size|short|long"
    r"|mismatch|exceeded))\)"
    r"|\(\{[^}]*\b(?:kind|code|type)\b[^}]*\}\)"
)
"""Codes and sentences of pydantic, written out or as a part of an f-string."""

Counts = Counter[tuple[str, str]]
"""(path, rule) -> number of findings."""


@dataclass(frozen=True)
class Finding:
    """A line that breaks a rule."""

    path: str
    line: int
    rule: str
    excerpt: str
    better: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.excerpt!r}; better: {self.better}"


@dataclass(frozen=True)
class Rule:
    """A rule of the glossary: how to find a habit, and what to write instead."""

    id: str
    better: str
    find: Callable[[Text], Iterable[tuple[int, str]]]
    """Offset and words of each finding."""


class Glossary:
    """The rules of a glossary file."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.terms: list[Mapping[str, Any]] = content["term"]
        self.commit: Mapping[str, Any] = content["commit"]
        self._verbs = frozenset(content["imperative"]["verbs"].split())
        self._verbs_with_of = frozenset(content["imperative"]["with_of"].split())
        self._rule_words = _any_word(content["error"]["rule_words"])
        self._max_words = content["page"]["max_sentence_words"]

    @classmethod
    def load(cls, path: Path) -> "Glossary":
        """Read a glossary file."""
        return cls(tomllib.loads(path.read_text(encoding="utf-8")))

    @cached_property
    def rules(self) -> list[Rule]:
        """The rules for texts of files: all rules except the ones for commits."""
        return [
            *map(_term_rule, self.terms),
            Rule(
                "docstring-verb", 'an imperative verb first: "Return the ..."', self._find_no_verb
            ),
            Rule("error-rule", "what is wrong: X must be Y, got Z", self._find_no_rule),
            Rule("http-code", "a sentence of our own: X must be Y, got Z", _find_code),
            Rule("long-sentence", "one fact per sentence, or a list", self._find_long),
        ]

    def is_imperative(self, text: str) -> bool:
        """Return whether a text begins with a verb of the list; `Copy of` is a noun."""
        words = text.split()[:2]
        first = words[0].rstrip(",:.").lower() if words else ""
        return first in self._verbs and (words[1:] != ["of"] or first in self._verbs_with_of)

    def subject_problem(self, subject: str) -> str | None:
        """Return what is wrong with the subject of a commit, or None."""
        if subject.startswith('Revert "'):
            return None
        limit = self.commit["max_subject_chars"]
        if len(subject) > limit:
            return f"the subject has {len(subject)} characters; the most are {limit}"
        if not self.is_imperative(subject):
            return (
                f"the subject begins with {subject.split()[:1]}, which is no imperative verb of "
                f"{GLOSSARY}: write what the commit does, such as 'Add ...', or add the verb"
            )
        return None

    def _find_no_verb(self, text: Text) -> Iterator[tuple[int, str]]:
        if text.kind != "docstring" or text.role != "function" or text.path.startswith("tests/"):
            return
        if not self.is_imperative(text.text) and not text.text.startswith("Whether "):
            yield 0, text.text

    def _find_no_rule(self, text: Text) -> Iterator[tuple[int, str]]:
        own_words = _PLACEHOLDER.sub(" ", text.text)
        is_sentence = len(own_words.split()) >= _MIN_ERROR_WORDS
        if text.role == "error" and is_sentence and not self._rule_words.search(own_words):
            yield 0, text.text

    def _find_long(self, text: Text) -> Iterator[tuple[int, str]]:
        if text.kind != "page":
            return
        start = 0
        for sentence in _SENTENCE_END.split(text.prose):
            offset = text.prose.index(sentence, start)
            start = offset + len(sentence)
            if len(sentence.split()) > self._max_words or sentence.count("; ") > 1:
                yield offset, text.text[offset:start]


def _any_word(lines: str) -> re.Pattern[str]:
    words = [word for line in lines.split("\n") for word in line.split("|") if word]
    return re.compile(rf"\b(?:{'|'.join(words)})\b", re.IGNORECASE)


def _term_rule(term: Mapping[str, Any]) -> Rule:
    pattern, kinds = re.compile(term["not"]), frozenset(term["in"])

    def find(text: Text) -> Iterator[tuple[int, str]]:
        if text.kind in kinds:
            for match in pattern.finditer(text.prose):
                yield match.start(), text.text[max(0, match.start() - 30) : match.end() + 30]

    return Rule(term["id"], term["use"], find)


def _find_code(text: Text) -> Iterator[tuple[int, str]]:
    if text.kind == "http":
        for match in _CODES.finditer(text.text):
            yield match.start(), text.text


def check_file(glossary: Glossary, name: str, source: str) -> list[Finding]:
    """Find what breaks a rule in one file, by line."""
    excused = {i for i, line in enumerate(source.splitlines(), 1) if EXCUSE in line}
    found = []
    for text in read_file(name, source):
        for rule in glossary.rules:
            for offset, words in rule.find(text):
                line = text.line_at(offset)
                if line not in excused:
                    excerpt = words[:_MAX_SHOWN_CHARS]
                    found.append(Finding(name, line, rule.id, excerpt, rule.better))
    return sorted(found, key=lambda finding: (finding.line, finding.rule))


def check_tree(root: Path, glossary: Glossary) -> list[Finding]:
    """Find what breaks a rule in all files of a tree."""
    found = []
    for path in source_files(root):
        name = path.relative_to(root).as_posix()
        found += check_file(glossary, name, path.read_text(encoding="utf-8"))
    return found


def count(findings: Iterable[Finding]) -> Counts:
    """Count findings by path and rule."""
    return Counter((finding.path, finding.rule) for finding in findings)


# ---- the baseline ---------------------------------------------------------------------------


def read_baseline(text: str) -> Counts:
    """Read a baseline; of several lines for a path and a rule the lowest count is valid."""
    counts: Counts = Counter()
    for line in text.splitlines():
        path, rule, number = line.split()
        counts[path, rule] = min(int(number), counts.get((path, rule), int(number)))
    return counts


def write_baseline(counts: Counts) -> str:
    """Write a baseline, one line for each path and rule, sorted."""
    return "".join(f"{path} {rule} {n}\n" for (path, rule), n in sorted(counts.items()) if n)


def by_rule(counts: Counts) -> Counter[str]:
    """Sum counts over all files."""
    totals: Counter[str] = Counter()
    for (_, rule), number in counts.items():
        totals[rule] += number
    return totals


def risen(now: Counts, baseline: Counts) -> set[tuple[str, str]]:
    """Return the (path, rule) pairs that have more findings than the baseline accepts."""
    known = {path for path, _ in baseline}
    totals, accepted = by_rule(now), by_rule(baseline)
    return {
        (path, rule)
        for (path, rule), number in now.items()
        if (number > baseline[path, rule] if path in known else totals[rule] > accepted[rule])
    }


def lowered(now: Counts, baseline: Counts) -> Counts:
    """Return the baseline with every count lowered to what is found now."""
    return Counter({key: min(number, now[key]) for key, number in baseline.items()})


def moved(now: Counts, baseline: Counts) -> Counts:
    """Return what is found now as the new baseline.

    Raises:
        ValueError: a rule has more findings in the tree than in the baseline.
    """
    accepted = by_rule(baseline)
    worse = {rule: n for rule, n in sorted(by_rule(now).items()) if n > accepted[rule]}
    if worse:
        sums = ", ".join(f"{rule} {accepted[rule]} -> {n}" for rule, n in worse.items())
        raise ValueError(f"findings of a rule may move to other files, not rise: {sums}")
    return now


def started(now: Counts, baseline: Counts) -> Counts:
    """Return the baseline with what is found now of rules that it does not have."""
    known = by_rule(baseline)
    return baseline + Counter({key: n for key, n in now.items() if key[1] not in known})


# ---- commits --------------------------------------------------------------------------------


def check_commits(root: Path, glossary: Glossary) -> tuple[list[Finding], str | None]:
    """Check the subjects of the commits after the base that the glossary names.

    Returns:
        The findings, and why the commits cannot be checked: there is no git, or a copy without the
        history back to the base.
    """
    base = glossary.commit["base"]
    command = ["git", "-C", str(root), "log", "--no-merges", "--format=%h %s", f"{base}..HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        return [], "git is not installed"
    if done.returncode:
        return [], f"this copy has no history back to commit {base}"
    found = []
    for line in done.stdout.splitlines():
        commit, _, subject = line.partition(" ")
        problem = glossary.subject_problem(subject)
        if problem is not None:
            found.append(Finding("commit", 0, commit, subject, problem))
    return found, None


def check_message(glossary: Glossary, message: str) -> str | None:
    """Return what is wrong with the message of a commit that is being made, or None."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = next((line for line in lines if line.strip()), "")
    if not subject or subject.startswith(("Merge ", "fixup! ", "squash! ")):
        return None
    return glossary.subject_problem(subject)


# ---- the command ----------------------------------------------------------------------------


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="PATH", help="list what is found in these"
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--update", action="store_const", dest="rewrite", const=lowered)
    mode.add_argument("--accept-new", action="store_const", dest="rewrite", const=moved)
    mode.add_argument("--start", action="store_const", dest="rewrite", const=started)
    mode.add_argument("--message", type=Path, metavar="FILE")
    parser.add_argument("--root", type=Path, default=ROOT, help="default: this checkout")
    args = parser.parse_args()
    glossary = Glossary.load(args.root / GLOSSARY)
    if args.message is not None:
        problem = check_message(glossary, args.message.read_text(encoding="utf-8"))
        return _say([] if problem is None else [problem])
    findings = check_tree(args.root, glossary)
    if args.paths:
        asked = [path.resolve() for path in args.paths]
        root = args.root.resolve()
        return _say(
            [str(f) for f in findings if any((root / f.path).is_relative_to(p) for p in asked)]
        )
    path, now = args.root / BASELINE, count(findings)
    baseline = read_baseline(path.read_text(encoding="utf-8") if path.exists() else "")
    if args.rewrite is not None:
        try:
            path.write_text(write_baseline(args.rewrite(now, baseline)), encoding="utf-8")
        except ValueError as error:
            return _say([str(error)])
        return 0
    return _check(args.root, glossary, findings, baseline)


def _check(root: Path, glossary: Glossary, findings: list[Finding], baseline: Counts) -> int:
    """Report counts that have risen above the baseline, and commits with a wrong subject."""
    now = count(findings)
    bad = risen(now, baseline)
    lines = []
    for path, rule in sorted(bad):
        here = [finding for finding in findings if (finding.path, finding.rule) == (path, rule)]
        lines.append(f"{path}: {rule}: {len(here)} found, {baseline[path, rule]} accepted:")
        lines += [f"  {finding}" for finding in here[:_MAX_SHOWN_FINDINGS]]
    commits, unchecked = check_commits(root, glossary)
    lines += [f"commit {each.rule}: {each.excerpt!r}: {each.better}" for each in commits]
    note = f"; commits are not checked: {unchecked}" if unchecked is not None else ""
    below = sum(baseline.values()) - sum(now.values())
    print(f"prose: {sum(now.values())} findings, {below} below the baseline{note}")
    return _say(lines)


def _say(problems: list[str]) -> int:
    """Write problems to stderr and return the exit code."""
    sys.stderr.write("".join(f"{problem}\n" for problem in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
