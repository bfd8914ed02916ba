"""Test that requirements-hpu.txt does not replace the torch of the vendor's image."""

import re
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.docker.requirements import read_file, with_dependencies

ROOT = Path(__file__).parents[2]
HPU = ROOT / "requirements-hpu.txt"


DEVICE_PACKAGE = re.compile(r"torch|triton|nvidia|cuda")

WANTS_TORCH = {"xgrammar": {"torch", "triton"}}
"""Packages that name torch as a dependency, and what of that kind they name. pip leaves an
installed torch alone that is within the bound; constraints keep triton to one that fits it."""


def test_nothing_that_is_installed_on_gaudi_brings_torch_or_a_build_for_another_device():
    others = [r for r in read_file(HPU) if r.name not in WANTS_TORCH]
    names = set(with_dependencies(others))
    assert {"transformers", "huggingface-hub", "numpy", "ray"} <= names
    assert not [name for name in names if DEVICE_PACKAGE.match(name)]


@pytest.mark.parametrize("name", WANTS_TORCH)
def test_a_package_that_wants_torch_takes_the_one_that_is_there(name):
    wanted = [Requirement(text) for text in distribution(name).requires or ()]
    found = {r.name: r.specifier for r in wanted if DEVICE_PACKAGE.match(r.name)}
    assert found.keys() == WANTS_TORCH[name]
    for version in ("2.6.0+hpu.1.21.0.555", "2.7.1a0+git2.hpu", "2.9.0", "2.11.0a0", "2.11.0+cpu"):
        assert found["torch"].contains(version, prereleases=True)
    assert not str(found["triton"]), "any version: pip has no reason to change torch for it"


def test_images_install_the_ray_of_the_extra():
    project = (ROOT / "pyproject.toml").read_text()
    (extra,) = map(Requirement, re.findall(r'^ray = \["(.*)"\]$', project, re.MULTILINE))
    (installed,) = (requirement for requirement in read_file(HPU) if requirement.name == "ray")
    assert installed.specifier == extra.specifier


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
        assert line.startswith(("#", "-r ", "-c ")) or re.search(r"\S\s+# \w", line), line
