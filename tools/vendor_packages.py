"""Keep the packages of a Gaudi image unchanged while other packages are installed.

    python tools/vendor_packages.py write FILE    what is installed now, as pip constraints
    python tools/vendor_packages.py check FILE    fail if one of them is no longer what FILE says

The torch of an image is the one that its HPU bridge was made for: a build of the vendor, which is
on no package index, or one of PyTorch. pip, asked for another version, replaces it, and the card is
no longer found. With `pip install -c FILE` (or PIP_CONSTRAINT=FILE) pip refuses. A triton that the
image has stays too; where it has none, FILE says which ones fit its torch. Standard library only,
so that it runs before any install.
"""

import argparse
import re
import runpy
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

# torch and packages built for it, the Gaudi bridge, and the quantization toolkit.
_VENDOR = re.compile(r"(torch|habana|lightning-habana|neural-compressor|triton$)")

# In an image the file is in the folder of this file, in a checkout in vllm/utils.
_FOLDER = Path(__file__).resolve().parent
_TRITON_RANGE = runpy.run_path(
    next(
        str(path)
        for folder in (_FOLDER, _FOLDER.parent / "vllm" / "utils")
        if (path := folder / "triton_range.py").is_file()
    )
)


def installed() -> dict[str, str]:
    """Return the installed packages of this Python: normalised name -> version."""
    found: dict[str, str] = {}
    for distribution in distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        found.setdefault(name, distribution.version)  # the first on the path is the one imported
    return found


def constraints(packages: dict[str, str]) -> list[str]:
    """Return exact pins of the vendor's packages, and ranges of versions of numpy and triton.

    Numpy: compiled packages of the image only work with the major version they were built for.
    Triton: where the image has none, one that fits its torch.

    Raises:
        SystemExit: the vendor's torch or bridge is not among `packages`.
    """
    for needed in ("torch", "habana-torch-plugin"):
        if needed not in packages:
            raise SystemExit(
                f"{needed} is not installed for {sys.executable}: this is not an image of the "
                f"vendor, or not the Python that it set up"
            )
    wanted = _TRITON_RANGE["triton_range"](packages["torch"])
    is_open = "triton" not in packages and wanted is not None
    return [*_pins(packages), *([f"triton{wanted}"] if is_open else [])]


def _pins(packages: dict[str, str]) -> list[str]:
    pins = [f"{name}=={packages[name]}" for name in sorted(packages) if _VENDOR.match(name)]
    if "numpy" in packages:
        pins.append(f"numpy<{int(packages['numpy'].split('.')[0]) + 1}")
    return pins


def changes(wanted: Sequence[str], packages: dict[str, str]) -> list[str]:
    """Return a message for each package that does not fit the constraints."""
    now = _pins(packages)
    return [
        f"{line} is now {packages.get(re.split('[=<>]', line)[0], 'gone')}"
        for line in wanted
        if line not in now and not _is_in_range(line, packages.get("triton"))
    ]


def _is_in_range(line: str, triton: str | None) -> bool:
    """Return whether a constraint is a range of triton that the installed triton, if any, is in."""
    bounds = re.fullmatch(r"triton>=([\d.]+),<([\d.]+)", line)
    if bounds is None or triton is None:
        return bounds is not None
    low, high, found = (_minor(version) for version in (*bounds.groups(), triton))
    return low <= found < high


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=("write", "check"))
    parser.add_argument("file", type=Path)
    args = parser.parse_args(argv)
    if args.action == "write":
        args.file.write_text("".join(f"{line}\n" for line in constraints(installed())))
        return 0
    changed = changes(args.file.read_text().split(), installed())
    for text in changed:
        sys.stderr.write(f"changed since the image: {text}\n")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
