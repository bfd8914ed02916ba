"""Show the measured results of benchmarks/results.json: a table for pages, and a picture.

tools/generate_docs.py writes both. A result compares this engine with a peer, both of them in one
run on the same processors; its ratio is the median of the ratios of the rounds where the program
gives it, and above 1 if this engine is faster.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

_COLOURS = {"openvino-genai": "#0072b2", "llama.cpp": "#d55e00", "vllm-cpu": "#009e73"}
_LABEL_PX, _BAR_PX, _LINE_PX, _MARGIN_PX = 190, 400, 20, 16
_MAX_RATIO = 3.0


def read_machines(root: Path) -> list[dict[str, Any]]:
    """Read the machines, each with its results.

    Raises:
        ValueError: a ratio is outside of the picture, or no colour is known for a peer.
    """
    machines = json.loads((root / "benchmarks" / "results.json").read_text(encoding="utf-8"))
    for machine in machines["machines"]:
        for result in machine["results"]:
            if not 0 < result["ratio"] <= _MAX_RATIO or result["peer"] not in _COLOURS:
                raise ValueError(
                    f"a ratio must be above 0 and at most {_MAX_RATIO}, and the peer one of "
                    f"{', '.join(_COLOURS)}; got {result}"
                )
    return list(machines["machines"])


def result_tables(machines: list[dict[str, Any]]) -> Iterator[str]:
    """Write a table of the results of each machine."""
    for machine in machines:
        yield ""
        yield f"**{machine['text']}**"
        yield ""
        yield "| workload | weights | peer | ours, tokens/s | peer, tokens/s | ratio | date |"
        yield "|---|---|---|---|---|---|---|"
        for each in machine["results"]:
            speeds = [f"{each[key]:,}" if key in each else "" for key in ("ours", "theirs")]
            cells = [each["workload"], each["weights"], each["peer"], *speeds]
            yield f"| {' | '.join(cells)} | {each['ratio']} | {each['date']} |"


def result_picture(machines: list[dict[str, Any]]) -> Iterator[str]:
    """Draw the ratios as bars, in SVG."""
    width = 2 * _MARGIN_PX + _LABEL_PX + _BAR_PX
    lines = [line for machine in machines for line in _lines_of(machine)]
    height = 2 * _MARGIN_PX + (len(lines) + 2) * _LINE_PX
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12" role="img" '
        'aria-label="Speed of this engine divided by the speed of other engines">'
    )
    yield f'<rect width="{width}" height="{height}" rx="6" fill="#fafafa"/>'
    yield from _legend()
    top = _MARGIN_PX + _LINE_PX
    for ratio in (0, 1, 2, 3):
        x = _x_of(ratio)
        colour = "#222222" if ratio == 1 else "#cccccc"
        bottom = height - _MARGIN_PX
        yield f'<line x1="{x}" y1="{top}" x2="{x}" y2="{bottom}" stroke="{colour}"/>'
    for number, (label, result) in enumerate(lines):
        y = top + number * _LINE_PX
        weight = "bold" if result is None else "normal"
        yield (
            f'<text x="{_MARGIN_PX}" y="{y + 14}" font-weight="{weight}" fill="#222222" '
            f'stroke="#fafafa" stroke-width="3" paint-order="stroke">{escape(label)}</text>'
        )
        if result is not None:
            end = _x_of(result["ratio"])
            yield (
                f'<rect x="{_x_of(0)}" y="{y + 3}" width="{end - _x_of(0)}" '
                f'height="{_LINE_PX - 6}" fill="{_COLOURS[result["peer"]]}"/>'
            )
            yield f'<text x="{end + 4}" y="{y + 14}" fill="#222222">{result["ratio"]}</text>'
    yield "</svg>"


def _lines_of(machine: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any] | None]]:
    yield machine["text"], None
    for result in machine["results"]:
        yield f"{result['workload']}, {result['weights']}", result


def _legend() -> Iterator[str]:
    x = _MARGIN_PX
    for peer, colour in _COLOURS.items():
        yield f'<rect x="{x}" y="{_MARGIN_PX - 6}" width="12" height="12" fill="{colour}"/>'
        text = f"speed / {peer}"
        yield f'<text x="{x + 18}" y="{_MARGIN_PX + 4}" fill="#222222">{text}</text>'
        x += 180


def _x_of(ratio: float) -> int:
    return _MARGIN_PX + _LABEL_PX + round(ratio / _MAX_RATIO * (_BAR_PX - 30))
