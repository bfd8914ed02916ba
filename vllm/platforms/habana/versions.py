"""Compare the installed parts of the Gaudi software: PyTorch, the bridge, and the driver.

All three must be of one release. The most frequent mistake is a package whose installation has
replaced the PyTorch of the vendor's image. Imports no library of the vendor.
"""

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

_DRIVER_VERSION = Path("/sys/module/habanalabs/version")
_BUILT_FOR = "required_version.txt"
"""File of the bridge with the version of PyTorch that it was built for."""
_PACKAGE = "habana-torch-plugin"
_VENDOR_BUILD = re.compile(r"\+(git|hpu)|a0\b")
_KEEP_TORCH = (
    "start again from the vendor's image, and install packages with its versions as constraints "
    "(README_GAUDI.md, From source)"
)


@dataclass(frozen=True)
class Installed:
    """Versions of the Gaudi software that this process uses; None: not known."""

    torch: str
    bridge: str | None = None
    built_for: str | None = None
    """Version of PyTorch for which the bridge was built."""
    driver: str | None = None

    def __str__(self) -> str:
        bridge = None if self.bridge is None else f"{_PACKAGE} {self.bridge}"
        if bridge and self.built_for:
            bridge += f" (built for torch {self.built_for})"
        driver = None if self.driver is None else f"driver {self.driver}"
        origin = "the vendor's build" if self.is_vendor_torch else "not a build of the vendor"
        return ", ".join(filter(None, (f"torch {self.torch} ({origin})", bridge, driver)))

    @property
    def is_vendor_torch(self) -> bool:
        """Whether the version is one that the vendor gives its builds of PyTorch."""
        return _VENDOR_BUILD.search(self.torch) is not None

    def why_not_loadable(self, *, is_lazy: bool) -> str | None:
        """Say why the bridge will refuse this PyTorch; None if nothing is known against it.

        Args:
            is_lazy: the user asks for lazy mode.
        """
        if self.built_for and _minor(self.built_for) != _minor(self.torch):
            return (
                f"{_PACKAGE} {self.bridge or 'of an unknown version'} was built for torch "
                f"{self.built_for}, but torch {self.torch} is installed. Probably pip has replaced "
                f"the torch of the image: {_KEEP_TORCH}"
            )
        if is_lazy and self.bridge and not self.is_vendor_torch:
            return (
                f"PT_HPU_LAZY_MODE=1 needs a torch that the vendor has built (its version has "
                f"+hpu or +git), but torch {self.torch} is installed. Set PT_HPU_LAZY_MODE=0, or "
                f"start from an image pytorch-installer-VERSION"
            )
        return None

    def driver_mismatch(self) -> str | None:
        """Say that driver and bridge are of different releases; None if they are of one, or a
        version is not known.
        """
        if not (self.driver and self.bridge) or _minor(self.driver) == _minor(self.bridge):
            return None
        return (
            f"the driver is of release {_release(self.driver)}, and {_PACKAGE} of "
            f"{_release(self.bridge)}. If the card cannot be opened, or computes wrongly, install "
            f"the driver {_release(self.bridge)} on the host, or start an image of "
            f"{_release(self.driver)}"
        )


def find_installed() -> Installed:
    """Return the versions of the installed software."""
    return Installed(torch.__version__, _bridge(), _built_for(), driver_version())


def driver_version() -> str | None:
    """Return the version of the loaded driver, such as 1.21.3-57e6a7b; None if it is not
    known.
    """
    try:
        return _DRIVER_VERSION.read_text().strip() or None
    except OSError:
        return None


def advice_for(error: str) -> str:
    """Return what to do about an error at the import of the bridge, as one or two sentences."""
    if "cannot open shared object file" in error:
        return (
            "Its libraries are in /usr/lib/habanalabs: add this folder to LD_LIBRARY_PATH (`source "
            "/etc/profile.d/habanalabs.sh`), or start from the vendor's image"
        )
    return f"All must be of one release: if pip has replaced torch, {_KEEP_TORCH}"


def _bridge() -> str | None:
    try:
        return version(_PACKAGE)
    except PackageNotFoundError:
        return None


def _built_for() -> str | None:
    try:
        spec = find_spec("habana_frameworks.torch")
        folders = [] if spec is None else list(spec.submodule_search_locations or ())
        return (Path(folders[0]) / _BUILT_FOR).read_text().strip() or None
    except (ModuleNotFoundError, ValueError, IndexError, OSError):
        return None


def _minor(text: str) -> tuple[int, ...] | None:
    found = re.match(r"(\d+)\.(\d+)", text)
    return found and tuple(map(int, found.groups()))


def _release(text: str) -> str:
    found = re.match(r"\d+\.\d+(\.\d+)?", text)
    return found[0] if found else text
