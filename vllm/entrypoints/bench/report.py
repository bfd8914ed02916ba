"""Write benchmark results: a table for people, one JSON object for programs."""

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from vllm.errors import ConfigError
from vllm.version import __version__


def machine() -> dict[str, Any]:
    """Describe the machine, on which a result depends in addition to the settings."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return {
        "cpus": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
        "python": platform.python_version(),
        "vllm": __version__,
    }


def timestamp() -> str:
    """Return the local time in a format for file names."""
    return datetime.now().strftime("%Y%m%d-%H%M%S")


def write_table(rows: Iterable[Sequence[object]], file: TextIO) -> None:
    """Write a table with columns as wide as needed; the first is left-aligned, the others
    right-aligned.
    """
    texts = [[_text(cell) for cell in row] for row in rows]
    widths = [
        max(len(row[i]) for row in texts if i < len(row)) for i in range(max(map(len, texts)))
    ]
    for row in texts:
        first, *others = (cell for cell in row)
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=False)]
        file.write("  ".join(cells).rstrip() + "\n")


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    return f"{cell:,.2f}" if isinstance(cell, float) else str(cell)


def write_json(result: Mapping[str, Any], target: str) -> None:
    """Write one JSON object to a file, or to stdout if the target is `-`.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps(result, ensure_ascii=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        path = Path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the result to {target!r}: {error}") from None


def emit(result: Mapping[str, Any], rows: Iterable[Sequence[object]], output: str | None) -> None:
    """Print the result table, and write the result as JSON if requested.

    The table is printed to stderr if the JSON is written to stdout.

    Args:
        result: result to write as JSON.
        rows: rows of the table.
        output: file for the JSON, or `-` for stdout; None: no JSON.
    """
    write_table(rows, sys.stderr if output == "-" else sys.stdout)
    if output is not None:
        write_json(result, output)


def check_writable(target: str | None) -> None:
    """Check before the run that its result can be written.

    Raises:
        ConfigError: it cannot be written.
    """
    if target is None or target == "-":
        return
    folder = Path(target).absolute().parent
    while not folder.exists():
        folder = folder.parent
    is_usable = folder.is_dir() and os.access(folder, os.W_OK)
    if not is_usable or Path(target).is_dir():
        raise ConfigError(f"cannot write the result to {target!r}")
