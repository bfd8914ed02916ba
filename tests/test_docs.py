"""The generated pages of docs/ say what the code says."""

import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from vllm.env_compat import COMPAT_VARIABLES
from vllm.env_others import OTHER_READERS
from vllm.envs import Envs

ROOT = Path(__file__).resolve().parents[1]
GENERATE = [sys.executable, "tools/generate_docs.py"]


def test_the_committed_pages_are_up_to_date():
    result = subprocess.run(
        [*GENERATE, "--check"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_every_variable_is_on_its_page():
    page = (ROOT / "docs" / "env_variables.md").read_text(encoding="utf-8")
    known = {f.name for f in fields(Envs)} | COMPAT_VARIABLES.keys()
    known |= {name for reader in OTHER_READERS for name in reader.names}
    assert known <= set(re.findall(r"`(\w+)`", page))


def test_a_page_that_differs_is_named(tmp_path):
    flags = ["--folder", str(tmp_path)]
    for page in (ROOT / "docs").glob("*.md"):
        shutil.copy(page, tmp_path)
    with (tmp_path / "env_variables.md").open("a") as page:
        page.write("more\n")
    result = subprocess.run(
        [*GENERATE, *flags, "--check"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 1
    assert result.stderr == "out of date, run tools/generate_docs.py: env_variables.md\n"
