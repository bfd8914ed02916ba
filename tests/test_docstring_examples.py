"""Test that the examples in docstrings give the shown results."""

import doctest
import importlib
from pathlib import Path

import vllm

PACKAGE = Path(vllm.__file__).parent


def test_examples_in_docstrings_are_right():
    paths = [p for p in sorted(PACKAGE.rglob("*.py")) if "\n    >>> " in p.read_text("utf-8")]
    names = [".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts) for p in paths]
    results = {name: doctest.testmod(importlib.import_module(name)) for name in names}
    assert sum(result.attempted for result in results.values()) >= 30
    assert [name for name, result in results.items() if result.failed] == []
