"""Layers of the package: the contracts of the type "layers" in pyproject.toml.

import-linter checks them; tests and docs/design/layers.md read them here. Names of modules are
dotted.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Layer:
    """The modules of one layer; a package includes its submodules.

    Attributes:
        modules: their full names.
        is_shared: they may import each other.
    """

    modules: tuple[str, ...]
    is_shared: bool


@dataclass(frozen=True)
class Layers:
    """A contract of import-linter: the layers of a package.

    Attributes:
        container: the package that it divides.
        layers: the highest first.
    """

    container: str
    layers: tuple[Layer, ...]

    def module_of(self, name: str) -> str | None:
        """Return the module of a layer that a file's module is, or is in; None: no layer has it."""
        modules = [module for layer in self.layers for module in layer.modules]
        inside = [module for module in modules if f"{name}.".startswith(f"{module}.")]
        return max(inside, key=len, default=None)

    def allows(self, name: str, imported: str) -> bool:
        """Return whether a module may import another one, as far as this contract knows both."""
        lower, upper = self.module_of(imported), self.module_of(name)
        if lower is None or upper is None or lower == upper:
            return True
        first = next(layer for layer in self.layers if {lower, upper} & {*layer.modules})
        return upper in first.modules and (first.is_shared or lower not in first.modules)


def read_layers(root: Path) -> dict[str, Layers]:
    """Read the contracts of a checkout: container -> its layers."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    return {each.container: each for contract in contracts for each in _read(contract)}


def _read(contract: Mapping[str, Any]) -> Iterator[Layers]:
    for container in contract.get("containers", ()):
        layers = []
        for text in contract["layers"]:
            names = text.replace("|", ":").split(":")
            modules = tuple(f"{container}.{name.strip()}" for name in names)
            layers.append(Layer(modules, is_shared=":" in text))
        yield Layers(container, tuple(layers))


def module_name(file: str) -> str:
    """Return the dotted name of a file of Python.

    >>> module_name("vllm/core/__init__.py"), module_name("vllm/envs.py")
    ('vllm.core', 'vllm.envs')
    """
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
