"""Compute the statistics of a load. Results have the usual names, which scripts read."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.entrypoints.bench.backends import RequestRecord
from vllm.entrypoints.bench.load import LoadRun
from vllm.errors import ConfigError

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token, without the first",
    "itl": "time between two pieces of a stream",
    "e2el": "time to the end of the response",
}


def percentile_name(percentile: float) -> str:
    """Return the name of a percentile, such as `p99` or `p99.9`."""
    return f"p{percentile:g}"


def describe(
    values: Sequence[float], percentiles: Sequence[float], digits: int = 3
) -> dict[str, Any]:
    """Return mean, median, standard deviation and percentiles (linearly interpolated); each is None
    if there are no values.
    """
    import numpy as np

    names = [percentile_name(p) for p in percentiles]
    if not len(values):
        return dict.fromkeys(("mean", "median", "std", *names))
    found = np.asarray(values, dtype=np.float64)
    figures = [found.mean(), np.median(found), found.std(), *np.percentile(found, percentiles)]
    return {
        name: round(float(figure), digits)
        for name, figure in zip(("mean", "median", "std", *names), figures, strict=True)
    }


def metric_values(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Return the milliseconds of every metric for all completed requests."""
    return {
        "ttft": [r.ttft_s * 1e3 for r in records],
        "tpot": [tpot * 1e3 for r in records if (tpot := r.tpot_s) is not None],
        "itl": [itl * 1e3 for r in records for itl in r.itl_s],
        "e2el": [r.e2el_s * 1e3 for r in records],
    }


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Parse limits: `ttft:200` means at most 200 ms.

    Raises:
        ConfigError: a pair is malformed, or its metric is not ttft, tpot or e2el.
    """
    limits = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = -1.0
        if name not in ("ttft", "tpot", "e2el") or not limit >= 0:
            raise ConfigError(f"goodput must be like ttft:200, tpot:50 or e2el:5000, got {pair!r}")
        limits[name] = limit
    return limits


def summarize(
    run: LoadRun,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return all figures of a finished load. Latencies are in milliseconds and cover completed
    requests.
    """
    done = [r for r in run.records if not r.is_cut and r.error is None]
    failed = [r for r in run.records if not r.is_cut and r.error is not None]
    duration_s = max(run.duration_s, 1e-9)
    num_input = sum(r.num_prompt_tokens for r in done)
    # The output of failed or interrupted requests is not counted, although it took time.
    num_output = sum(r.num_output_tokens for r in done)
    num_pieces = sum(len(r.output_s) for r in done)
    result: dict[str, Any] = {
        "duration": round(run.duration_s, 4),
        "completed": len(done),
        "failed": len(failed),
        "interrupted": len(run.records) - len(done) - len(failed),
        "errors": dict(Counter(r.error for r in failed).most_common()),
        "finish_reasons": dict(Counter(str(r.finish_reason) for r in done)),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": round(len(done) / duration_s, 3),
        "output_throughput": round(num_output / duration_s, 2),
        "total_token_throughput": round((num_input + num_output) / duration_s, 2),
        "max_concurrent_requests": run.peak_running,
        "tokens_per_piece": round(num_output / num_pieces, 3) if num_pieces else None,
    }
    if goodput:
        result["request_goodput"] = round(_count_good(done, goodput) / duration_s, 3)
    values = metric_values(done)
    for metric in metrics:
        for name, figure in describe(values[metric], percentiles).items():
            result[f"{name}_{metric}_ms"] = figure
    return result


def _count_good(records: Sequence[RequestRecord], limits: Mapping[str, float]) -> int:
    """Count the requests within all limits. A limit for later tokens does not apply to a request
    with one token.
    """

    def is_good(record: RequestRecord) -> bool:
        ms = {
            "ttft": record.ttft_s * 1e3,
            "tpot": (record.tpot_s or 0.0) * 1e3,
            "e2el": record.e2el_s * 1e3,
        }
        return all(ms[name] <= limit for name, limit in limits.items())

    return sum(map(is_good, records))
