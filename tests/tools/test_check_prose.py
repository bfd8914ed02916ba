"""Test the check of the English: its findings, its ratchet, and commit subjects."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tools.check_prose import (
    ROOT,
    Glossary,
    check_commits,
    check_file,
    check_message,
    lowered,
    moved,
    read_baseline,
    risen,
    started,
    write_baseline,
)

GLOSSARY = Glossary.load(ROOT / "tools" / "glossary.toml")


def found(name: str, source: str) -> list[tuple[int, str]]:
    return [(finding.line, finding.rule) for finding in check_file(GLOSSARY, name, source)]


FUNCTION = '"""Check it."""\ndef f():\n    """{}"""\n'
ERROR = '"""Check it."""\nraise ValueError({})\n'


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        # ---- docstrings of functions begin with an imperative verb
        ("vllm/x.py", FUNCTION.format("Return the sizes."), []),
        ("vllm/x.py", FUNCTION.format("The sizes."), [(3, "docstring-verb")]),
        ("vllm/x.py", FUNCTION.format("Returns the sizes."), [(3, "docstring-verb")]),
        ("vllm/x.py", FUNCTION.format("Copy of the sizes."), [(3, "docstring-verb")]),
        ("vllm/x.py", FUNCTION.format("Whether it is one."), []),
        ("tests/x.py", FUNCTION.format("The sizes."), []),
        ("vllm/x.py", '@property\ndef f():\n    """The sizes."""', []),
        ("vllm/x.py", FUNCTION.format("As `Ops.moe`."), [(3, "docstring-verb"), (3, "pointer")]),
        ("vllm/x.py", FUNCTION.format("See the class."), [(3, "docstring-verb"), (3, "pointer")]),
        ("vllm/x.py", FUNCTION.format("Read it; see `Ops.moe`."), []),
        ("vllm/x.py", '"""What it allows."""', [(1, "what-clause")]),
        # ---- words of the glossary, in the texts where they are checked
        ("vllm/x.py", '"""Check it.\n\nGo on with\nproducts."""', [(4, "product")]),
        ("vllm/x.py", "# the dot product\n# of two\n\nx = 1  # a product", [(4, "product")]),
        ("vllm/x.py", "x = 'a # product'", []),
        ("vllm/x.py", "x = 1  # the `product` alone", [(1, "alone")]),
        ("vllm/x.py", "x = 1  # alone  # prose: ok", []),
        ("vllm/x.py", "# rows of a matrix", []),
        ("docs/x.md", "First line\nof rows.\n\n    rows in code\n\n```\nrows\n```\n", [(2, "row")]),
        ("docs/x.md", "a row `of rows` <!-- prose: ok -->\n", []),
        ("docs/x.md", "<!-- Written by tools/x.py. -->\nrows\n", []),
        ("README.md", "hidden states and states\n", [(1, "states")]),
        ("csrc/x.h", 'int x;  // beside it\nchar* s = "// beside";\n', [(1, "beside")]),
        # ---- errors, logs and helps
        ("vllm/x.py", ERROR.format('f"n must be 1, got {n}"'), []),
        ("vllm/x.py", ERROR.format('f"{n} tokens for {m} prompts"'), [(2, "error-rule")]),
        ("vllm/x.py", ERROR.format('f"{path}: {problem}"'), []),
        ("vllm/x.py", ERROR.format('"no " + kind + " rows"'), [(2, "row")]),
        ("vllm/x.py", 'logger.info("%d rows", 3)', [(1, "row")]),
        ("vllm/x.py", 'add_argument("--x", help="the rows")', [(1, "row")]),
        ("vllm/x.py", 'add_number(group, "--x", "the rows", 1)', [(1, "row")]),
        ("tests/x.py", 'raise ValueError("three rows")', []),
        ("vllm/envs.py", 'x = _cpu(None, "Number of rows")', [(1, "row")]),
        ("vllm/config/x.py", 'class A:\n    x: int\n    """The rows."""', [(3, "row")]),
        ("vllm/core/x.py", 'class A:\n    x: int\n    """The rows."""', []),
        # ---- codes of a library in what the server says
        ("vllm/entrypoints/x.py", 'x = f"{name} {text} ({kind})"', [(1, "http-code")]),
        ("vllm/entrypoints/x.py", "x = f\"is 3 ({error['type']})\"", [(1, "http-code")]),
        ("vllm/entrypoints/x.py", 'x = "is 3 (int_parsing)"', [(1, "http-code")]),
        ("vllm/entrypoints/x.py", 'x = f"Input should be {y}"', [(1, "http-code")]),
        ("vllm/entrypoints/x.py", 'x = f"is 3 ({unit})"', []),
        ("vllm/core/x.py", 'x = "is 3 (int_parsing)"', []),
        # ---- sentences of pages
        ("docs/x.md", "word " * 30 + "end.\n", [(1, "long-sentence")]),
        ("docs/x.md", "word " * 20 + "end. " + "word " * 20 + "end.\n", []),
        ("docs/x.md", "one; two; three\n", [(1, "long-sentence")]),
    ],
)
def test_findings_of_a_file(name, source, expected):
    assert found(name, source) == expected


def test_a_finding_shows_where_it_is_and_the_better_word():
    [finding] = check_file(GLOSSARY, "docs/x.md", "Weights\nand products of them.\n")
    assert str(finding) == (
        "docs/x.md:2: product: 'Weights and products of them.'; "
        "better: matmul, matrix multiplication, GEMM"
    )


# ---- the ratchet: "path rule" -> count ------------------------------------------------------


def counts(**of_files: int) -> Counter[tuple[str, str]]:
    return Counter({(f"{name}.py", "row"): number for name, number in of_files.items()})


@pytest.mark.parametrize(
    ("baseline", "now", "bad"),
    [
        (counts(a=2), counts(a=2), []),
        (counts(a=2), counts(a=1), []),
        (counts(a=2), counts(a=3), ["a.py"]),
        (counts(a=2, b=1), counts(a=1, b=2), ["b.py"]),  # two known files do not exchange counts
        (counts(a=2), counts(new=2), []),  # the file was moved
        (counts(a=2), counts(a=1, new=1), []),  # a part of the file was moved
        (counts(a=2), counts(a=2, new=1), ["new.py"]),
        (counts(a=2), counts(new=3), ["new.py"]),
        (Counter({("a.py", "place"): 5}), counts(a=1), ["a.py"]),
        (Counter({("a.py", "place"): 5}), counts(new=1), ["new.py"]),  # each rule counts separately
        (Counter(), Counter(), []),
    ],
)
def test_counts_of_known_files_and_sums_of_the_tree_only_fall(baseline, now, bad):
    assert sorted(path for path, _ in risen(now, baseline)) == bad


def test_an_update_lowers_counts_and_never_raises_them():
    assert +lowered(counts(a=1, b=5, new=1), counts(a=2, b=3, gone=1)) == counts(a=1, b=3)


def test_new_files_are_accepted_while_the_sum_does_not_rise():
    assert moved(counts(a=1, b=3), counts(a=2, b=2)) == counts(a=1, b=3)
    with pytest.raises(ValueError, match="row 4 -> 5"):
        moved(counts(a=2, b=3), counts(a=2, b=2))


def test_a_start_adds_the_rules_that_the_baseline_does_not_have():
    place = Counter({("a.py", "place"): 7})
    assert started(counts(a=9) + place, counts(a=2)) == counts(a=2) + place


def test_a_baseline_is_sorted_lines_and_the_lower_of_two_is_valid():
    text = "a.py row 2\nb.py place 1\n"
    assert write_baseline(read_baseline(text)) == text
    assert read_baseline("b.py row 3\na.py row 1\nb.py row 2\n") == counts(a=1, b=2)
    assert write_baseline(counts(b=2, a=0)) == "b.py row 2\n"


def test_the_rules_of_the_committed_baseline_exist():
    baseline = read_baseline((ROOT / "tools" / "prose_baseline.txt").read_text(encoding="utf-8"))
    known = {rule.id for rule in GLOSSARY.rules}
    assert baseline and {rule for _, rule in baseline} <= known
    assert len(known) == len(GLOSSARY.rules)


# ---- commits --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("Add a check\n\nWhy it is there.\n", None),
        ("# comment of git\nAdd a check\n", None),
        ("What it brings is said", "no imperative verb"),
        ("Added a check", "no imperative verb"),
        ("Copy of a check", "no imperative verb"),
        ("Add " + "x" * 68, None),
        ("Add " + "x" * 69, "73 characters; the most are 72"),
        (
            'Revert "What it brings is said, and a very long subject that nobody can shorten now"',
            None,
        ),
        ("Merge branch 'x' into y", None),
        ("fixup! Add a check", None),
        ("", None),
    ],
)
def test_the_subject_of_a_commit(message, problem):
    found = check_message(GLOSSARY, message)
    assert (found is None) if problem is None else problem in (found or "")


def git(folder: Path, *args: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    command = ["git", "-C", str(folder), *identity, *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_commits_since_the_base_are_checked_where_there_is_a_history(tmp_path):
    origin, shallow, bare = (tmp_path / name for name in ("origin", "shallow", "bare"))
    origin.mkdir(), bare.mkdir()
    git(origin, "init", "-q", "-b", "main")
    git(origin, "commit", "-q", "--allow-empty", "-m", "Old subjects are not checked")
    base = git(origin, "rev-parse", "HEAD")
    git(origin, "checkout", "-q", "-b", "side")
    git(origin, "commit", "-q", "--allow-empty", "-m", "The side has a wrong subject")
    git(origin, "checkout", "-q", "main")
    git(origin, "commit", "-q", "--allow-empty", "-m", "Add a right one")
    git(origin, "merge", "-q", "--no-ff", "side", "-m", "A merge is not checked")
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{origin}", str(shallow))
    imperative = {"verbs": "add", "with_of": ""}
    content = {"term": [], "imperative": imperative, "error": {"rule_words": "must"}}
    page = {"max_sentence_words": 30}
    commit = {"base": base, "max_subject_chars": 72}
    glossary = Glossary({**content, "page": page, "commit": commit})

    findings, unchecked = check_commits(origin, glossary)
    assert [finding.excerpt for finding in findings] == ["The side has a wrong subject"]
    assert unchecked is None
    for folder in (shallow, bare):
        assert check_commits(folder, glossary) == (
            [],
            f"this copy has no history back to commit {base}",
        )


# ---- the command ----------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path):
    for name in ("tools", "vllm", "docs"):
        (tmp_path / name).mkdir()
    glossary = (ROOT / "tools" / "glossary.toml").read_text(encoding="utf-8")
    (tmp_path / "tools" / "glossary.toml").write_text(glossary, encoding="utf-8")
    (tmp_path / "docs" / "a.md").write_text("rows\n\nrows\n")
    return tmp_path


def run(tree: Path, *args: str) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "tools" / "check_prose.py"), "--root", str(tree), *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tree)
    return done.returncode, done.stderr


def test_the_command_refuses_to_rise_and_follows_a_fall(tree):
    page, baseline = tree / "docs" / "a.md", tree / "tools" / "prose_baseline.txt"
    assert run(tree, "--start") == (0, "")
    assert baseline.read_text() == "docs/a.md row 2\n"

    page.write_text("rows\n\nrows\n\nrows\n")
    code, text = run(tree)
    assert code == 1
    assert text.startswith(
        "docs/a.md: row: 3 found, 2 accepted:\n  docs/a.md:1: row: 'rows'; better:"
    )
    assert run(tree, "--update") == (0, "")
    assert baseline.read_text() == "docs/a.md row 2\n"
    code, text = run(tree, "--accept-new")
    assert (code, "row 2 -> 3" in text) == (1, True)
    assert baseline.read_text() == "docs/a.md row 2\n"

    page.write_text("rows\n")
    assert run(tree, "--update") == (0, "")
    page.rename(tree / "docs" / "b.md")
    assert run(tree) == (0, "")
    assert run(tree, "--accept-new") == (0, "")
    assert baseline.read_text() == "docs/b.md row 1\n"
    code, text = run(tree, "docs")
    assert (code, text.count("\n")) == (1, 1)
