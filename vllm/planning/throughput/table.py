"""Formats predicted throughput as a table, and as JSON."""

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.planning.throughput.prediction import Prediction

_COLUMNS = ("requests", "prompt", "TTFT, ms", "TPOT, ms", "tokens/s", "bound by")


def as_objects(predictions: Iterable[Prediction]) -> list[dict[str, Any]]:
    """Return a JSON object for each batch size; the range of each value is [low, high]."""
    return [_object(one) for prediction in predictions for one in _each(prediction)]


def as_lines(predictions: Sequence[Prediction]) -> list[str]:
    """Return the predictions as a table of at most 100 columns."""
    rows = [_COLUMNS]
    for prediction in predictions:
        for one in _each(prediction):
            mark = " *" if one.outside else ""
            bounds = one.prefill_bound[0], one.decode_bound[0]
            rows.append(
                (
                    f"{one.batch[0]:,.0f}",
                    f"{one.lengths.prompt:,}",
                    _banded(one, "ttft_s", 1e3),
                    _banded(one, "tpot_s", 1e3),
                    _banded(one, "tokens_per_s"),
                    f"{'; '.join(dict.fromkeys(bounds))}{mark}",
                )
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        lines.append("  ".join([*cells, row[-1]]))
    reasons = dict.fromkeys(reason for prediction in predictions for reason in prediction.outside)
    if reasons:
        lines.append(
            f"* outside of published data ({', '.join(reasons)}): the band is a factor of two wider"
        )
    return lines


def _each(prediction: Prediction) -> Iterable[Prediction]:
    return (prediction.at(index) for index in range(len(prediction.batch)))


_RATES = ("tokens_per_s", "prompt_tokens_per_s", "decode_tokens_per_s")


def _object(one: Prediction) -> dict[str, Any]:
    """Return the JSON object of a prediction for one batch size."""
    values: dict[str, Any] = {
        "requests": int(one.batch[0]),
        "prompt_tokens": one.lengths.prompt,
        "output_tokens": one.lengths.output,
    }
    for attribute in ("ttft_s", "tpot_s", *_RATES):
        low, expected, high = _figures(one, attribute)
        values[attribute] = {
            "expected": _rounded(expected),
            "band": [_rounded(low), _rounded(high)],
        }
    values["prefill_bound_by"], values["decode_bound_by"] = (
        one.prefill_bound[0],
        one.decode_bound[0],
    )
    values["outside_of_published_data"] = list(one.outside)
    return values


def _figures(one: Prediction, attribute: str) -> tuple[float, float, float]:
    """Return (low, expected, high) of a value for one batch size."""
    expected, *ends = (
        float(getattr(speed, attribute)[0]) for speed in (one.expected, one.slow, one.fast)
    )
    return min(ends), expected, max(ends)


def _banded(one: Prediction, attribute: str, scale: float = 1.0) -> str:
    low, expected, high = (scale * value for value in _figures(one, attribute))
    return f"{_short(expected, 3)} ({_short(low, 2)}-{_short(high, 2)})"


def _short(value: float, digits: int) -> str:
    rounded = float(f"{value:.{digits}g}")
    if rounded >= 10_000:
        return f"{rounded / 1000:,.3g}k"
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:.{digits}g}"


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
