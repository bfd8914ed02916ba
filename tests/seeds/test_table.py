"""Test that the table of statements is complete, and that everything that it names exists."""

import ast
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from tests.bucketing.helpers import make_limits
from tests.seeds.table import DOCUMENTS, KINDS, Statement, read_table
from vllm.bucketing import BucketSettings
from vllm.env.compat import COMPAT_VARIABLES
from vllm.env.others import OTHER_READERS
from vllm.envs import Envs
from vllm.model_executor.models.registry import ModelRegistry

ROOT = Path(__file__).parents[2]


@cache
def functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    )


def named(row: Statement) -> str:
    return row.variable or row.says


def test_every_row_says_what_it_means_where_and_what_became_of_it():
    for row in read_table():
        assert row.says.strip(), row
        assert row.tests or row.because, row
        assert not row.because or row.because.startswith(KINDS), row
        assert row.because not in KINDS, row


def test_every_document_has_rows_and_every_row_a_document():
    places = [place for row in read_table() for place in row.at.split("; ")]
    letters = {place[0] for place in places if place != "all logs"}
    assert letters == set(DOCUMENTS)
    assert not [place for place in places if not re.fullmatch(r"[RQVOW] \S.*|all logs", place)]


def test_no_statement_is_there_twice():
    keys = [(row.title, row.says, row.variable) for row in read_table()]
    assert len(keys) == len(set(keys))


def test_what_holds_without_a_reservation_is_tested():
    assert not [row for row in read_table() if not row.because and not row.tests]


def test_every_test_that_is_named_exists():
    for row in read_table():
        for test in row.tests:
            name, _, function = test.partition("::")
            assert (ROOT / name).is_file(), (named(row), test)
            found = functions(ROOT / name)
            assert found, test
            assert not function or function in found, (named(row), test)


def test_a_variable_is_known():
    known = {field.name for field in fields(Envs)} | COMPAT_VARIABLES.keys()
    known |= {name for reader in OTHER_READERS for name in reader.names}
    assert {row.variable for row in read_table() if row.variable} <= known


def test_the_default_of_a_variable_is_that_of_the_documents():
    defaults = {field.name: field.default for field in fields(Envs)}
    rows = [row for row in read_table() if row.default is not ...]
    assert len(rows) > 15
    for row in rows:
        assert defaults[row.variable] == row.default, row.variable


@pytest.mark.parametrize("max_num_seqs", [4, 48, 256])
@pytest.mark.parametrize("block_size", [64, 128])
def test_the_formula_of_a_bucket_variable_is_the_documented_one(max_num_seqs, block_size):
    limits = make_limits(max_num_seqs=max_num_seqs, block_size=block_size, max_model_len=4096)
    settings = BucketSettings.resolve(limits)
    known = {"max_num_seqs": max_num_seqs, "block_size": block_size, "min": min, "max": max}
    rows = [row for row in read_table() if row.formula]
    assert len(rows) == 12
    for row in rows:
        name, part = re.fullmatch(r"VLLM_(\w+)_BUCKET_(\w+)", row.variable).groups()
        value = getattr(getattr(settings, name.lower()), part.lower())
        assert value == eval(row.formula, {"__builtins__": {}}, known), row.variable


def test_the_package_takes_python_3_10_and_newer():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^requires-python = "(.*)"$', text, re.MULTILINE) == [">=3.10"]


def test_an_architecture_has_a_model_class():
    rows = [row for row in read_table() if row.architecture]
    assert rows
    assert {row.architecture for row in rows} <= set(ModelRegistry.supported())
