"""requirements-hpu.txt leaves the torch of the vendor's image alone."""

import re
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.docker.requirements import read_file, with_dependencies

ROOT = Path(__file__).parents[2]
HPU = ROOT / "requirements-hpu.txt"


def test_nothing_that_is_installed_on_gaudi_brings_torch_or_a_build_for_another_device():
    names = set(with_dependencies(read_file(HPU)))
    assert {"transformers", "huggingface-hub", "numpy"} <= names
    assert not [name for name in names if re.match(r"torch|triton|nvidia|cuda", name)]


def test_the_check_finds_torch_where_there_is_one():
    assert "torch" in with_dependencies(read_file(ROOT / "requirements-cpu.txt"))


@pytest.mark.parametrize("requirement", read_file(HPU), ids=lambda requirement: requirement.name)
def test_a_requirement_has_a_lower_bound_and_stops_before_the_next_major_release(requirement):
    operators = sorted(specifier.operator for specifier in requirement.specifier)
    assert operators == ["<", ">="]
    bounds = {s.operator: s.version for s in SpecifierSet(str(requirement.specifier))}
    assert re.fullmatch(r"\d+", bounds["<"]), "the upper bound is a major release"


@pytest.mark.parametrize("name", ["requirements-common.txt", "requirements-hpu.txt"])
def test_every_requirement_says_why_it_is_there(name):
    for line in (ROOT / name).read_text().splitlines():
        assert line.startswith(("#", "-r ")) or re.search(r"\S\s+# \w", line), line
