"""Test that the generated pages of docs/ are up to date, and that paths on pages exist."""

import gc
import re
import shutil
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from tools import generate_docs
from tools.messages_page import parts_of
from vllm.env.compat import COMPAT_VARIABLES
from vllm.env.others import OTHER_READERS
from vllm.envs import Envs

ROOT = Path(__file__).resolve().parents[1]
DESIGN_PAGES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/design/*.md"))
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]


def test_the_committed_pages_are_up_to_date(monkeypatch, capsys):
    pytest.importorskip("peft", reason="the script reads tests that need it")
    monkeypatch.setattr(sys, "argv", ["generate_docs.py", "--check"])
    gc.disable()  # collections would visit millions of nodes of syntax trees
    try:
        assert (generate_docs.main(), capsys.readouterr().err) == (0, "")
    finally:
        gc.enable()


def test_every_variable_is_on_its_page():
    page = (ROOT / "docs" / "env_variables.md").read_text(encoding="utf-8")
    known = {f.name for f in fields(Envs)} | COMPAT_VARIABLES.keys()
    known |= {name for reader in OTHER_READERS for name in reader.names}
    assert known <= set(re.findall(r"`(\w+)`", page))


def test_a_page_that_differs_is_named(monkeypatch, capsys, tmp_path):
    names = ("engine_arguments.md", "env_variables.md")
    monkeypatch.setattr(generate_docs, "PAGES", {n: generate_docs.PAGES[n] for n in names})
    monkeypatch.setattr(sys, "argv", ["generate_docs.py", "--check", "--folder", str(tmp_path)])
    for name in names:
        shutil.copy(ROOT / "docs" / name, tmp_path)
    with (tmp_path / "env_variables.md").open("a") as page:
        page.write("more\n")
    assert generate_docs.main() == 1
    message = "out of date, run tools/generate_docs.py: env_variables.md\n"
    assert capsys.readouterr().err == message


@cache
def files_of_tree() -> str:
    """Return the files and folders that pages may name, relative to the repository, one per
    line.
    """
    folders = ("vllm", "gaudi_sim", "csrc", "tests", "docs", "tools", "benchmarks")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return "\n".join([*folders, *(str(path.relative_to(ROOT)) for path in found)])


def wrong_paths(text: str) -> list[str]:
    """Return the paths in backticks that do not exist.

    A path may leave out its beginning and the ending .py, contain `<name>` or `*` for a name, or
    end with a name of its module: `a/b.Name`.
    """
    wrong = []
    for path in set(re.findall(r"`([\w.<>*-]+/[\w.<>*/-]*)`", text)):
        pattern = re.sub(r"<\w+>|\\\*", "[^/\n]*", re.escape(path.rstrip("/")))
        if re.search(rf"(^|/){pattern}(\.\w+)?$", files_of_tree(), re.MULTILINE):
            continue
        module, _, name = path.rpartition(".")
        files = re.findall(rf"^(?:.*/)?{re.escape(module)}\.py$", files_of_tree(), re.MULTILINE)
        if not any(re.search(rf"(class|def) {name}\b", (ROOT / f).read_text()) for f in files):
            wrong.append(path)
    return wrong


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md", *DESIGN_PAGES])
def test_paths_that_a_page_names_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    of_users = "`HF_HOME/gguf-metadata`"  # this path is on the machine of a user
    assert wrong_paths(text.replace(of_users, "")) == []
    gone = "`vllm/no_file.py` `core/plan.no_name` `vllm/<no>_file/*.py` `sample/sampler`"
    assert sorted(wrong_paths(gone)) == sorted(re.findall("`(.*?)`", gone)[:3])


def anchors_of(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Return the links of a page to files or headings that do not exist."""
    broken = []
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\((?!https?:|mailto:)([^()\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        is_known = target.exists() and (not anchor or anchor in anchors_of(target.read_text()))
        if not is_known:
            broken.append(link)
    return broken


def test_links_of_pages_have_a_target(tmp_path):
    assert {str(page): found for page in PAGES if (found := broken_links(page))} == {}
    page = tmp_path / "page.md"
    page.write_text("# A: b\n[1](#a-b) [2](#c) [3](page.md#a-b) [4](no.md) [5](https://x.org/y)")
    assert broken_links(page) == ["#c", "no.md"]


def strings_of_package() -> str:
    """Return the sources of the package, with literals of several lines joined."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "vllm").rglob("*.py"))
    return re.sub(r'"\n\s*f?"', "", "\n".join(sources))


def unknown_messages(page: str, known: str) -> list[str]:
    """Return the messages in the first cells of a page's tables that no code prints.

    In them, `...` and a capital letter represent a value.
    """
    unknown = []
    for cell in re.findall(r"^\| ([^|]*`[^|]*) \|", page, re.MULTILINE):
        for message in re.findall(r"`([^`]+)`", cell):
            if not all(part.strip(" '") in known for part in parts_of(message) if len(part) > 8):
                unknown.append(message)
    return unknown


def test_messages_that_a_page_explains_are_printed():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    known = strings_of_package()
    assert unknown_messages(page, known) == []
    gone = "| `the KV cache holds N tokens and no longer this` | meaning |"
    assert len(unknown_messages(gone, known)) == 1


def test_the_first_reading_is_short():
    """The first pages that CONTRIBUTING names have few words, and the map of the code fits on one
    screen.
    """
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    order = text[text.index("Read in this order:") :].partition("Then you know")[0]
    pages = re.findall(r"\]\(([\w/]+\.md)\)", order)
    assert {"README.md", "docs/design.md"} < set(pages)
    words = sum(len((ROOT / page).read_text(encoding="utf-8").split()) for page in pages)
    assert words < 5000
    assert len((ROOT / "docs" / "design.md").read_text(encoding="utf-8").splitlines()) <= 60
