"""The generated pages of docs/ say what the code says."""

import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from tools import generate_docs
from vllm.env.compat import COMPAT_VARIABLES
from vllm.env.others import OTHER_READERS
from vllm.envs import Envs

ROOT = Path(__file__).resolve().parents[1]


def test_the_committed_pages_are_up_to_date():
    # In a process of its own: other tests register models.
    command = [sys.executable, "tools/generate_docs.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (result.returncode, result.stderr) == (0, "")


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
