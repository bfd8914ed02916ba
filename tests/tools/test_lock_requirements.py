"""Test that constraints-dev.txt has one release of each package that the tests need, for every
Python.
"""

import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docker.requirements import read_file
from tools.lock_requirements import DEVICE_PACKAGE, LOCK, ROOT, without_device_packages

PINS = [line for line in LOCK.read_text(encoding="utf-8").splitlines() if line[0] != "#"]
PYTHONS = ("3.10", "3.11", "3.12")


def applies(requirement: Requirement, python: str) -> bool:
    environment = {"python_version": python, "python_full_version": f"{python}.4"}
    environment |= {"sys_platform": "linux", "platform_system": "Linux", "extra": ""}
    return requirement.marker is None or requirement.marker.evaluate(environment)


def test_a_line_is_a_release_and_names_no_index_or_file():
    for line in PINS:
        assert re.fullmatch(r"[a-z0-9.-]+==[\w.]+(?: ; [\w.<>=!'()* -]+)?", line), line
    assert sorted(PINS, key=lambda line: line.partition("==")[0]) == PINS


def test_torch_and_what_it_chooses_are_not_pinned():
    assert [line for line in PINS if DEVICE_PACKAGE.match(line)] == []


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_has_one_release_within_its_range(python):
    pins: dict[str, list[str]] = {}
    for pin in map(Requirement, PINS):
        if applies(pin, python):
            [version] = (specifier.version for specifier in pin.specifier)
            pins.setdefault(canonicalize_name(pin.name), []).append(version)
    assert [name for name, versions in pins.items() if len(versions) > 1] == []
    wanted = [r for r in read_file(ROOT / "requirements-dev.txt") if applies(r, python)]
    assert len(wanted) > 40
    for requirement in wanted:
        if requirement.name != "torch":
            [version] = pins.get(canonicalize_name(requirement.name), [None])
            assert version is not None, f"run `make lock`: no release of {requirement}"
            assert requirement.specifier.contains(version), f"run `make lock`: {requirement}"


def test_lines_of_device_packages_are_left_out():
    lines = (
        "numpy==2.1\nnvidia-cublas==1 ; sys_platform == 'linux'\ntorch==2\ntriton==3\ncuda-x==1\n"
    )
    assert without_device_packages(lines + "torchlike==1\n") == "numpy==2.1\ntorchlike==1\n"
