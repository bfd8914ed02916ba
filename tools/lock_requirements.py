"""Write constraints-dev.txt: the release of every package that `make test` installs.

python tools/lock_requirements.py --torch torch==2.13.0

Resolves requirements-dev.txt to the newest releases of today with uv, for every Python from the
oldest that this project accepts. torch and the packages that only it chooses (triton, CUDA
libraries) take part in the resolution and have no line: the Makefile installs torch first, from a
build for the CPU, and setup.py adds the triton that fits it.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "constraints-dev.txt"
OLDEST_PYTHON = "3.10"
HEADER = "# Written by `make lock`: what `make test` installs. Ranges are in requirements-*.txt.\n"
DEVICE_PACKAGE = re.compile(r"(?:torch|triton|nvidia|cuda)\b")


def resolve(requirements: Path, torch: str) -> str:
    """Resolve a requirements file with uv, for all supported Pythons at once.

    Raises:
        SystemExit: uv is not installed, or finds no releases that fit together.
    """
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "torch.txt"
        constraints.write_text(f"{torch}\n", encoding="utf-8")
        command = [
            *(sys.executable, "-m", "uv", "pip", "compile", str(requirements)),
            *("--constraint", str(constraints), "--universal", "--python-version", OLDEST_PYTHON),
            *("--no-annotate", "--no-header", "--no-emit-index-url", "--no-emit-find-links"),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"uv cannot resolve {requirements.name}:\n{done.stderr}")
    return done.stdout


def without_device_packages(lines: str) -> str:
    """Leave out the lines of torch and of the packages that it chooses."""
    return "".join(
        line for line in lines.splitlines(keepends=True) if not DEVICE_PACKAGE.match(line)
    )


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", required=True, help="the requirement of torch, as in Makefile")
    args = parser.parse_args()
    pins = without_device_packages(resolve(ROOT / "requirements-dev.txt", args.torch))
    LOCK.write_text(HEADER + pins, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
