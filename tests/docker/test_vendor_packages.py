"""Test tools/vendor_packages.py, which records and checks the packages of a Gaudi image."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "vendor_packages.py"

IMAGE = {
    "numpy": "1.26.4",
    "torch": "2.6.0+hpu.1.21.3.57.gitabc",
    "torch-tb-profiler": "0.4.0",
    "habana-torch-plugin": "1.21.3.57",
    "neural-compressor-pt": "3.4",
    "setuptools": "65.5.0",
}
LINES = [
    "habana-torch-plugin==1.21.3.57",
    "neural-compressor-pt==3.4",
    "torch==2.6.0+hpu.1.21.3.57.gitabc",
    "torch-tb-profiler==0.4.0",
    "numpy<2",
    "triton>=3.1,<3.3",
]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vendor_packages", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_vendors_packages_are_pinned_and_the_major_version_of_numpy_is_kept(tool):
    assert tool.constraints(IMAGE) == LINES


@pytest.mark.parametrize(
    "torch, triton",
    [
        ("2.7.1a0+git1234567", ">=3.1,<3.4"),
        ("2.9.0a0+git1234567", ">=3.5,<3.6"),
        ("2.10.0a0", ">=3.6,<3.7"),
        ("2.11.0", ">=3.6,<3.7"),
        ("2.11.0+cpu", ">=3.6,<3.7"),
    ],
)
def test_whatever_torch_is_there_is_pinned_with_its_triton(tool, torch, triton):
    """The torch is a build of the vendor or, on an upstream image, of PyTorch."""
    packages = {**IMAGE, "torch": torch}
    found = tool.constraints(packages)
    assert f"torch=={torch}" in found and f"triton{triton}" in found
    assert tool.changes(found, packages) == []
    replaced = {**packages, "torch": "2.13.0"}
    assert tool.changes(found, replaced) == [f"torch=={torch} is now 2.13.0"]


@pytest.mark.parametrize(
    "packages, lines",
    [
        ({"triton": "3.1.0"}, ["triton==3.1.0"]),
        ({"torch": "2.7.1+hpu.1.22"}, ["triton>=3.1,<3.4"]),
        ({"torch": "2.99.0"}, []),
    ],
)
def test_triton_stays_as_it_is_or_is_one_that_fits_torch(tool, packages, lines):
    found = [line for line in tool.constraints({**IMAGE, **packages}) if "triton" in line]
    assert found == lines


@pytest.mark.parametrize(
    "change, text",
    [
        ({"torch": "2.7.0"}, "torch==2.6.0+hpu.1.21.3.57.gitabc is now 2.7.0"),
        ({"torch": "2.6.0"}, "torch==2.6.0+hpu.1.21.3.57.gitabc is now 2.6.0"),
        ({"torch": None}, "torch==2.6.0+hpu.1.21.3.57.gitabc is now gone"),
        ({"habana-torch-plugin": None}, "habana-torch-plugin==1.21.3.57 is now gone"),
        ({"numpy": "2.2.6"}, "numpy<2 is now 2.2.6"),
        ({"numpy": "1.26.5", "setuptools": "80.0"}, None),
        ({"triton": "3.2.0"}, None),
        ({"triton": "3.8.0"}, "triton>=3.1,<3.3 is now 3.8.0"),
    ],
)
def test_a_change_of_a_pinned_package_is_named(tool, change, text):
    packages = {name: v for name, v in {**IMAGE, **change}.items() if v is not None}
    assert tool.changes(LINES, packages) == ([] if text is None else [text])


@pytest.mark.parametrize("missing", ["torch", "habana-torch-plugin"])
def test_an_image_without_the_vendors_packages_is_refused(tool, missing):
    packages = {name: version for name, version in IMAGE.items() if name != missing}
    with pytest.raises(SystemExit, match=f"^{missing} is not installed for /"):
        tool.constraints(packages)


def test_the_exit_code_says_whether_something_changed(tool, tmp_path, monkeypatch, capsys):
    file = str(tmp_path / "vendor.txt")
    monkeypatch.setattr(tool, "installed", lambda: IMAGE)
    assert tool.main(["write", file]) == 0
    assert tool.main(["check", file]) == 0
    monkeypatch.setattr(tool, "installed", lambda: {**IMAGE, "torch": "2.13.0"})
    assert tool.main(["check", file]) == 1
    assert capsys.readouterr().err == (
        "changed since the image: torch==2.6.0+hpu.1.21.3.57.gitabc is now 2.13.0\n"
    )


def test_of_two_installs_of_a_package_the_one_that_is_imported_counts(tool, tmp_path, monkeypatch):
    for folder, version in (("behind", "1.0"), ("ahead", "2.0")):
        info = tmp_path / folder / f"Some_Package-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: Some_Package\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
    assert tool.installed()["some-package"] == "2.0"
