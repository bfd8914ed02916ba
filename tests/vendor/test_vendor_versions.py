"""Test the parts of `make test-vendor` that do not depend on the torch version: its pins, and names
in the sources.
"""

import ast
import importlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.docker.requirements import read_file
from vllm.utils.triton_range import triton_fits, triton_range

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm"
PINS = sorted(Path(__file__).parent.glob("torch-*.txt"))

TRACED = ("attention", "distributed", "model_executor", "ops", "sample", "worker")
"""Packages of which torch.compile may trace anything."""

NEWER_THAN_2_6 = {
    "recompile_limit": "cache_size_limit",
    "accumulated_recompile_limit": "accumulated_cache_size_limit",
}
"""Names that torch 2.6 lacks, and what both have."""


def read_pins(file: Path) -> dict[str, str]:
    return {pin.name: str(pin.specifier).removeprefix("==") for pin in read_file(file)}


@pytest.mark.parametrize("file", PINS, ids=lambda file: file.stem)
def test_the_pins_of_a_vendor_version_fit_together(file):
    pins = read_pins(file)
    assert pins.keys() == {"torch", "triton", "transformers", "numpy"}
    assert file.stem == f"torch-{pins['torch']}"
    assert triton_fits(pins["triton"], pins["torch"])
    for requirement in read_file(ROOT / "requirements-cpu.txt"):
        if requirement.name in pins:
            assert requirement.specifier.contains(pins[requirement.name])


def test_the_makefile_runs_a_version_that_has_pins():
    (default,) = re.findall(r"^VENDOR_TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    versions = [read_pins(file)["torch"] for file in PINS]
    assert default in versions
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert not [version for version in versions if version not in page]


@pytest.mark.parametrize("file", PINS, ids=lambda file: file.stem)
def test_the_makefile_takes_the_python_that_the_pins_name(file, tmp_path):
    """The program is found on PATH, unless it does not start."""
    (python,) = re.findall(r"^# Gaudi software [\d.]+ on Python (3\.\d+): ", file.read_text())
    version = read_pins(file)["torch"]
    for is_there, wanted in ((True, f"python{python}"), (False, "python3")):
        program = tmp_path / f"python{python}"
        program.write_text(f"#!/bin/sh\nexit {0 if is_there else 127}\n")
        program.chmod(0o755)
        command = ["make", "-n", "test-vendor", f"VENDOR_TORCH={version}", "VENDOR_VENV=none"]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
        )
        assert done.stdout.startswith(f"test -d none || {wanted} -m venv none\n")


@pytest.mark.parametrize(
    "torch_version, wanted",
    [
        ("2.6.0+hpu.1.21.3", ">=3.1,<3.3"),
        ("2.7.1a0+git1", ">=3.1,<3.4"),
        ("2.9.0a0+git1", ">=3.5,<3.6"),
        ("2.10.0", ">=3.6,<3.7"),
        ("2.11.0+cpu", ">=3.6,<3.7"),
        ("2.99", None),
        ("", None),
    ],
)
def test_the_range_of_triton_follows_the_minor_release_of_torch(torch_version, wanted):
    assert triton_range(torch_version) == wanted


@pytest.mark.parametrize(
    "triton, torch_version, fits",
    [
        ("3.1.0", "2.6.0", True),
        ("3.2.0", "2.6.0", True),
        ("3.3.1", "2.6.0", False),
        ("3.10.0", "2.6.0", False),
        ("3.0.0", "2.6.0", False),
        ("3.3.1", "2.7.1", True),
        ("3.8.0", "2.99", True),
    ],
)
def test_a_triton_outside_of_the_range_does_not_fit(triton, torch_version, fits):
    assert triton_fits(triton, torch_version) is fits


def find_unions(tree: ast.AST) -> Iterator[int]:
    """Return the lines with `isinstance(x, A | B)`."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("isinstance", "issubclass")
            and isinstance(node.args[1], ast.BinOp)
        ):
            yield node.lineno


def _is_return(node: ast.AST) -> bool:
    return isinstance(node, ast.Return) and node.value is not None


def find_nested_unions(tree: ast.AST) -> Iterator[int]:
    """Return the lines of nested functions whose annotations have a union.

    Functions that are returned do not count, because they are created before anything is traced.
    """
    for outer in ast.walk(tree):
        if not isinstance(outer, ast.FunctionDef):
            continue
        returned = {ast.unparse(n.value) for n in ast.walk(outer) if _is_return(n)}
        for node in ast.walk(outer):
            if isinstance(node, ast.FunctionDef) and node.name not in {outer.name, *returned}:
                arguments = node.args
                named = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                annotations = [argument.annotation for argument in named] + [node.returns]
                if any(isinstance(annotation, ast.BinOp) for annotation in annotations):
                    yield node.lineno


def find_tuple_properties(tree: ast.AST) -> Iterator[int]:
    """Return the lines of properties of named tuples."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and "property" in map(
                    ast.unparse, method.decorator_list
                ):
                    yield method.lineno


def find_untraced_defaults(tree: ast.Module) -> Iterator[int]:
    """Return the lines of dataclass fields whose default is an object of ours, and of functions
    that create the operators of torch.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and "dataclass" in ast.dump(node):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.value, ast.Name):
                    yield field.lineno
        elif isinstance(node, ast.FunctionDef):
            yield from (n.lineno for n in ast.walk(node) if ast.unparse(n) == "NativeOps()")


def dotted(node: ast.expr) -> str:
    """Return a name with its attributes; empty for attributes of anything else."""
    if isinstance(node, ast.Attribute):
        value = dotted(node.value)
        return f"{value}.{node.attr}" if value else ""
    return node.id if isinstance(node, ast.Name) else ""


def find_torch_names(tree: ast.AST) -> Iterator[str]:
    """Return dotted names that begin with `torch.`, and names that are imported from torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = dotted(node)
            if text.startswith("torch.") and not text.startswith("torch.ops."):
                yield text  # operators are registered at run time, so no import shows them
        elif isinstance(node, ast.ImportFrom) and re.match(r"torch(\.|$)", node.module or ""):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def exists(name: str) -> bool:
    """Return whether this torch has a dotted name, of a module or of a member of a module."""
    value: object = torch
    path = "torch"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if not hasattr(value, part):
            try:
                value = importlib.import_module(path)
                continue
            except ImportError:
                return False
        value = getattr(value, part)
    return True


def sources(*folders: str, pattern: str = "") -> Iterator[tuple[Path, ast.AST]]:
    """Return path and tree of each file in which the pattern is found."""
    for folder in folders:
        for file in sorted((PACKAGE / folder).rglob("*.py")):
            if re.search(pattern, text := file.read_text()):
                yield file.relative_to(ROOT), ast.parse(text)


def test_traced_code_asks_for_no_instance_of_a_union():
    """A union breaks the graph before torch 2.10; a tuple of types does not."""
    assert list(find_unions(ast.parse("isinstance(x, float | int)"))) == [1]
    found = [f"{path}:{line}" for path, tree in sources(*TRACED) for line in find_unions(tree)]
    assert not found


def test_what_traced_attention_defines_is_traced_by_torch_2_6():
    """The compiler of torch 2.6 supports neither unions in the annotations of a nested function nor
    properties of named tuples.
    """
    nested = ast.parse("def a():\n    def b(x: int | None): ...")
    assert list(find_nested_unions(nested)) == [2]
    named = ast.parse("class A(NamedTuple):\n    @property\n    def b(self): ...")
    assert list(find_tuple_properties(named)) == [3]
    found = [
        f"{path}:{line}"
        for path, tree in sources("attention", "ops")
        for line in (*find_nested_unions(tree), *find_tuple_properties(tree))
    ]
    assert not found


def test_operators_of_a_card_make_nothing_with_defaults_that_torch_2_10_does_not_trace():
    """torch 2.10 and 2.11 would break the graph at each layer of experts."""
    made = "@dataclass\nclass A:\n    b: B = ONE\ndef c():\n    NativeOps()"
    assert sorted(set(find_untraced_defaults(ast.parse(made)))) == [3, 5]
    found = [
        f"{path}:{line}"
        for path, tree in sources("ops")
        if path.name.startswith("hpu")
        for line in find_untraced_defaults(tree)
    ]
    assert not found


def test_a_named_tuple_has_no_other_base_which_python_3_10_refuses():
    found = [
        f"{path}:{node.lineno}"
        for path, tree in sources("", pattern="NamedTuple")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and len(node.bases) > 1
        and "NamedTuple" in [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    ]
    assert not found, f"{found}: use a frozen dataclass"


def test_no_name_is_used_that_torch_2_6_lacks():
    found = [
        f"{path}:{node.lineno}: {node.attr}, use {NEWER_THAN_2_6[node.attr]}"
        for path, tree in sources("", pattern="|".join(NEWER_THAN_2_6))
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in NEWER_THAN_2_6
    ]
    assert not found


def test_every_name_of_torch_in_the_sources_exists_in_this_torch():
    assert not exists("torch.no_such_name")
    found = sources("", pattern=r"\btorch\b")
    names = {name: path for path, tree in found for name in find_torch_names(tree)}
    assert len(names) > 100
    assert not {name: str(path) for name, path in names.items() if not exists(name)}
