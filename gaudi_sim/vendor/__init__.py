"""The simulated card under the name of the vendor's package, for libraries that import the package.

`install_vendor` makes `habana_frameworks` importable in this process; until then, and after
`uninstall_vendor`, it is not. Names that the vendor does not document are missing. It is not
installed by default, because libraries that find the package change torch for it: transformers, for
one, replaces `torch.gather` and the default backend of `torch.compile`.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from gaudi_sim.vendor.hpu import device_module

_ROOT = "habana_frameworks"
_TORCH = f"{_ROOT}.torch"

# Module -> the module of this package that provides its names (None: it belongs to another
# package), and the submodules that importing it also imports.
_MODULES: dict[str, tuple[str | None, tuple[str, ...]]] = {
    _ROOT: (None, ()),
    _TORCH: (None, ("core", "distributed", "hpu", "utils")),
    f"{_TORCH}.core": ("core", ()),
    f"{_TORCH}.distributed": (None, ("hccl",)),
    f"{_TORCH}.distributed.hccl": ("hccl", ()),
    f"{_TORCH}.hpex": (None, ()),
    f"{_TORCH}.hpex.kernels": ("kernels", ()),
    f"{_TORCH}.hpex.normalization": ("normalization", ()),
    f"{_TORCH}.hpu": ("hpu", ("graphs", "metrics", "random")),
    f"{_TORCH}.hpu.graphs": ("graphs", ()),
    f"{_TORCH}.hpu.metrics": ("metrics", ()),
    f"{_TORCH}.hpu.random": ("random", ()),
    f"{_TORCH}.internal": (None, ("bridge_config",)),
    f"{_TORCH}.internal.bridge_config": ("bridge_config", ()),
    f"{_TORCH}.utils": (None, ("internal", "experimental")),
    f"{_TORCH}.utils.experimental": ("experimental", ()),
    f"{_TORCH}.utils.internal": ("internal", ()),
}


class _Loader(Loader):
    """Creates a module from the public names of a module of this package."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return device_module() if spec.name == f"{_TORCH}.hpu" else None

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        name = module.__spec__.name
        source, children = _MODULES[name]
        if source is not None:
            answers = importlib.import_module(f"{__name__}.{source}")
            for public in answers.__all__:
                setattr(module, public, getattr(answers, public))
        for child in children:
            importlib.import_module(f"{name}.{child}")


class _Finder(MetaPathFinder):
    """Finds the modules of the table; it comes last, so an installed package takes precedence."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _MODULES or not _is_ours(name):
            return None
        is_package = any(other.startswith(f"{name}.") for other in _MODULES)
        return ModuleSpec(name, _Loader(), origin="simulated card", is_package=is_package)


_FINDER = _Finder()


def _is_ours(name: str) -> bool:
    """Return whether a module belongs to the simulation. False for a submodule of a real package
    that is installed.
    """
    root = sys.modules.get(_ROOT)
    return name == _ROOT or isinstance(getattr(root, "__loader__", None), _Loader)


def install_vendor() -> None:
    """Let `import habana_frameworks` find the simulated card, unless a real package is
    installed.
    """
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)


def uninstall_vendor() -> None:
    """Undo `install_vendor`; what was imported from there keeps working."""
    if _FINDER not in sys.meta_path:
        return
    sys.meta_path.remove(_FINDER)
    for name in _MODULES:
        if isinstance(getattr(sys.modules.get(name), "__loader__", None), _Loader):
            del sys.modules[name]
