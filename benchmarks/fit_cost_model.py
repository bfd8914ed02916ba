"""Fit the constants of the cost model to published runs, and say how far it is from them.

    python benchmarks/fit_cost_model.py            # prints one JSON object
    python benchmarks/fit_cost_model.py --write    # writes vllm/cost_model/fitted.json and
                                                   # docs/planning_accuracy.md as well

The runs (benchmarks/data/gaudi_throughput.csv) are Intel's, of optimum-habana with one static
batch: a prefill, then decodes until all outputs are complete. A run takes the sum of its steps
(`vllm.cost_model.throughput`). The constants minimise the relative error of the time by least
squares within bounds, reweighted towards the median.

A case is model, number of cards, input and output: all its software versions and batches are held
out together. Nothing was measured on a card by this project.
"""

import argparse
import csv
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # works in a checkout that is not installed

from benchmarks.cost_model_page import PAGE, page_lines  # noqa: E402
from vllm.cost_model.fitted import (  # noqa: E402
    CONSTANTS,
    FILE,
    Fitted,
    Floats,
    Residuals,
    fitted_constants,
)
from vllm.cost_model.throughput import (  # noqa: E402
    AttentionFigures,
    ModelFigures,
    ServingCost,
    band,
    coordinates,
)

ROWS = ROOT / "benchmarks" / "data" / "gaudi_throughput.csv"
BLOCK_SIZE = HEAD_SIZE = 128
ROUNDS = 30
HELD_OUT_SHARE = 1 / 3
RESAMPLES = 40

BOUNDS = {
    "prompt_matmuls": (1.0, np.inf),
    "decode_matmuls": (1.0, np.inf),
    "keys_and_values": (1.0, np.inf),
    "weights": (1.25, 1.25),
    "layer_us": (20.0, 100.0),
    "link_bytes": (0.0, np.inf),
    "all_reduce_us": (0.0, np.inf),
}
NOTES = {
    "weights": "fixed at 80 % of the peak, not fitted, because hundreds of requests hide its "
    "effect",
    "layer_us": "the published runs hardly determine this value, so it is limited to 20 to 100",
    "decode_matmuls": "a fit can balance a larger value with a smaller `layer_us`",
    "link_bytes": "below 1 if a part of the exchange runs during matmuls",
}


def llama(
    num_layers: int, hidden: int, intermediate: int, num_heads: int, num_kv_heads: int, vocab: int
) -> ModelFigures:
    """Return the figures of a dense model with FP8 weights and an FP8 cache."""
    attention = 2 * hidden * hidden + 2 * hidden * num_kv_heads * HEAD_SIZE
    return ModelFigures(
        dense_params=num_layers * (attention + 3 * hidden * intermediate),
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=num_layers,
        attention=(
            AttentionFigures(
                num_layers=num_layers,
                query_width=num_heads * HEAD_SIZE,
                kv_width=2 * num_kv_heads * HEAD_SIZE,
                num_kv_heads=num_kv_heads,
            ),
        ),
        weight_bytes=1,
        kv_bytes=1,
        is_fp8=True,
    )


MODELS = {
    "llama-2-7b": llama(32, 4096, 11008, 32, 32, 32000),
    "llama-2-70b": llama(80, 8192, 28672, 64, 8, 32000),
    "llama-3.1-8b": llama(32, 4096, 14336, 32, 8, 128256),
    "llama-3.1-70b": llama(80, 8192, 28672, 64, 8, 128256),
    "llama-3.3-70b": llama(80, 8192, 28672, 64, 8, 128256),
    "llama-3.1-405b": llama(126, 16384, 53248, 128, 8, 128256),
    "mistral-7b": llama(32, 4096, 14336, 32, 8, 32000),
}
"""Shapes from the config.json of each model."""


@dataclass(frozen=True)
class Run:
    """A published run of a static batch."""

    card: str
    software: str
    model: str
    num_cards: int
    batch: int
    input_len: int
    output_len: int
    tokens_per_s: float

    @property
    def case(self) -> tuple[str, int, int, int]:
        return self.model, self.num_cards, self.input_len, self.output_len

    @property
    def seconds(self) -> float:
        return self.batch * self.output_len / self.tokens_per_s

    @property
    def is_doubtful(self) -> bool:
        """Whether the run was published with 4 cards, and the next version has the same run, as
        fast, with 2 cards.
        """
        return self.card == "gaudi2" and self.num_cards == 4


def read_runs(path: Path = ROWS) -> list[Run]:
    """Return the published runs that have a batch size and one of the models in MODELS; other rows
    are skipped.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["batch"] and row["model"] in MODELS]
    return [
        Run(
            card=row["device"],
            software=row["software"],
            model=row["model"],
            num_cards=int(row["cards"]),
            batch=int(row["batch"]),
            input_len=int(row["input"]),
            output_len=int(row["output"]),
            tokens_per_s=float(row["tokens_per_s"]),
        )
        for row in rows
    ]


@dataclass(frozen=True)
class Problem:
    """The runs of one kind of card as a linear problem."""

    runs: Sequence[Run]
    prompt_terms: Floats
    """Seconds of the prefill, before the constants. [runs, constants]"""
    decode_terms: Floats
    """Seconds of all decodes, before the constants. [runs, constants]"""
    attention: Floats
    """Seconds of the attention of prompts, which are not fitted. [runs]"""
    seconds: Floats
    """Published. [runs]"""

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Problem":
        """Return the problem of runs of one kind of card."""
        prompts, decodes, attention = [], [], []
        for run in runs:
            cost = ServingCost(run.card, run.num_cards, MODELS[run.model], fitted=NOT_FITTED)
            batch, input_len = np.float64(run.batch), np.float64(run.input_len)
            seconds, terms = cost.prefill_terms(batch, input_len, np.float64(0))
            context = batch * padded_contexts(run.input_len, run.output_len)
            steps = cost.decode_terms(batch, context, np.float64(1))
            prompts.append(terms)
            decodes.append(steps.sum(0))
            attention.append(seconds)
        published = np.array([run.seconds for run in runs])
        return cls(runs, np.array(prompts), np.array(decodes), np.array(attention), published)

    def take(self, chosen: Any) -> "Problem":
        """Return the problem of the chosen runs, by a mask or by their indices."""
        indices = np.arange(len(self.runs))[chosen]
        return Problem(
            [self.runs[i] for i in indices],
            self.prompt_terms[indices],
            self.decode_terms[indices],
            self.attention[indices],
            self.seconds[indices],
        )

    def indices_of_cases(self) -> list[Any]:
        """Return the indices of the runs of each case."""
        cases = [run.case for run in self.runs]
        return [np.flatnonzero([case == other for other in cases]) for case in sorted(set(cases))]

    def predict(self, values: Floats) -> Floats:
        """Return the predicted seconds of each run."""
        predicted: Floats = self.attention + (self.prompt_terms + self.decode_terms) @ values
        return predicted

    def coordinates(self, values: Floats) -> Floats:
        """Return the coordinates of the runs, as defined by `throughput.coordinates`."""
        prompt_share = (self.attention + self.prompt_terms @ values) / self.predict(values)
        params = [MODELS[run.model].token_params / run.num_cards for run in self.runs]
        lengths = [run.input_len + run.output_len / 2 for run in self.runs]
        return coordinates(prompt_share, [run.batch for run in self.runs], lengths, params)


NOT_FITTED = Fitted(np.ones(len(CONSTANTS)), (), 0, Residuals(np.ones(1), np.zeros((1, 4))))
"""For terms, which no constant changes."""


def least_squares(matrix: Floats, target: Floats, low: Floats, high: Floats) -> Floats:
    """Return x between low and high with the least |matrix @ x - target|.

    Solves for the coordinates that are at no bound, stops at the first bound on the way, and frees
    the coordinate whose bound costs most (bounded-variable least squares, Stark and Parker 1995).
    """
    x, is_free = low.copy(), np.zeros(len(low), bool)
    for _ in range(20 * len(low)):
        gradient = matrix.T @ (target - matrix @ x)
        gain = np.where(x <= low, gradient, np.where(x >= high, -gradient, 0.0))
        gain[is_free | (low == high)] = 0
        if gain.max() <= 1e-9 * np.abs(matrix).max():
            return x
        is_free[gain.argmax()] = True
        while is_free.any():
            rest = target - matrix[:, ~is_free] @ x[~is_free]
            wanted = np.linalg.lstsq(matrix[:, is_free], rest, rcond=None)[0]
            step = wanted - x[is_free]
            bound = np.where(step > 0, high[is_free], low[is_free])
            with np.errstate(divide="ignore", invalid="ignore"):
                shares = np.where(step == 0, np.inf, (bound - x[is_free]) / step)
            free = np.flatnonzero(is_free)
            if shares.min() > 1:
                x[free] = wanted
                break
            x[free] += shares.min() * step
            stopped = shares.argmin()
            x[free[stopped]] = bound[stopped]
            is_free[free[stopped]] = False
    raise AssertionError("the bounded least squares did not converge")


def fit(problem: Problem) -> Floats:
    """Return the constants with about the least median relative error."""
    low, high = np.array([BOUNDS[name] for name in CONSTANTS]).T
    terms = (problem.prompt_terms + problem.decode_terms) / problem.seconds[:, None]
    target = 1 - problem.attention / problem.seconds
    scale = terms.max(0)
    scale[scale == 0] = 1  # no run has this term
    terms = terms / scale
    weights = np.ones(len(target))
    for _ in range(ROUNDS):
        matrix = weights[:, None] * terms
        values = least_squares(matrix, weights * target, low * scale, high * scale)
        weights = 1 / np.sqrt(np.maximum(np.abs(terms @ values - target), 0.02))
    return values / scale


def residuals(problem: Problem) -> Residuals:
    """Return the error of each run in a fit without its case."""
    ratios, coordinates = np.ones(len(problem.runs)), np.zeros((len(problem.runs), 4))
    for held_out in problem.indices_of_cases():
        values = fit(problem.take(np.setdiff1d(np.arange(len(problem.runs)), held_out)))
        runs = problem.take(held_out)
        ratios[held_out] = runs.seconds / runs.predict(values)
        coordinates[held_out] = runs.coordinates(values)
    return Residuals(ratios, coordinates)


def held_out_errors(problem: Problem, num_splits: int) -> dict[str, float]:
    """Return percentages: errors of cases that the fit has not seen, and how many of them are
    within a band.
    """
    rng = np.random.default_rng(0)
    cases, errors, in_band, medians = problem.indices_of_cases(), [], [], []
    for _ in range(num_splits):
        order = rng.permutation(len(cases))[: int(len(cases) * HELD_OUT_SHARE)]
        held_out = np.concatenate([cases[i] for i in order])
        seen = problem.take(np.setdiff1d(np.arange(len(problem.runs)), held_out))
        values, runs = fit(seen), problem.take(held_out)
        predicted = runs.predict(values)
        error = np.abs(predicted / runs.seconds - 1)
        fitted = Fitted(values, (), 0, residuals(seen))
        low, high = band(fitted, runs.coordinates(values))
        errors.append(error)
        medians.append(np.median(error))
        in_band.append((low * predicted <= runs.seconds) & (runs.seconds <= high * predicted))
    error = np.concatenate(errors)
    return {
        "splits": num_splits,
        "median": _percent(np.median(error)),
        "median_of_split_medians": _percent(np.median(medians)),
        "p90": _percent(np.quantile(error, 0.9)),
        "worst": _percent(error.max()),
        "in_band": _percent(np.concatenate(in_band).mean()),
    }


def whole_groups_held_out(problem: Problem) -> dict[str, float]:
    """Return median errors in percent if the fit has not seen any run of a model or number of
    cards.
    """
    groups: dict[str, list[bool]] = {}
    for model in sorted({run.model for run in problem.runs}):
        groups[model] = [run.model == model for run in problem.runs]
    for num_cards in sorted({run.num_cards for run in problem.runs} - {1}):
        groups[f"{num_cards} cards"] = [run.num_cards == num_cards for run in problem.runs]
    errors = {}
    for name, chosen in groups.items():
        values, runs = fit(problem.take(~np.array(chosen))), problem.take(np.array(chosen))
        errors[name] = _percent(np.median(np.abs(runs.predict(values) / runs.seconds - 1)))
    return errors


def software_spread(runs: Sequence[Run]) -> dict[str, float]:
    """Return by how many percent the fastest software version is faster than the slowest, for equal
    runs: number of runs, median and worst.
    """
    rates: dict[Any, list[float]] = {}
    for run in runs:
        rates.setdefault((*run.case, run.batch), []).append(run.tokens_per_s)
    spreads = [max(same) / min(same) - 1 for same in rates.values() if len(same) > 1]
    return {
        "runs": len(spreads),
        "median": _percent(np.median(spreads)),
        "worst": _percent(max(spreads)),
    }


def ranges(problem: Problem) -> Floats:
    """Return the 10 % and 90 % quantiles of each constant over resampled cases, [2, constants]."""
    rng = np.random.default_rng(0)
    cases = problem.indices_of_cases()
    values = []
    for _ in range(RESAMPLES):
        drawn = rng.integers(0, len(cases), len(cases))
        values.append(fit(problem.take(np.concatenate([cases[i] for i in drawn]))))
    return np.quantile(values, (0.1, 0.9), axis=0)


def constants_of(problem: Problem) -> dict[str, Any]:
    """Return the constants of one kind of card that the package reads."""
    values, (low, high), left_out = fit(problem), ranges(problem), residuals(problem)
    constants = {}
    for i, name in enumerate(CONSTANTS):
        constants[name] = {
            "value": _rounded(values[i]),
            "low": _rounded(min(low[i], values[i])),
            "high": _rounded(max(high[i], values[i])),
            "means": CONSTANTS[name],
        }
        if name in NOTES:
            constants[name]["note"] = NOTES[name]
    return {
        "constants": constants,
        "numbers_of_cards": sorted({run.num_cards for run in problem.runs}),
        "longest_prompt": max(run.input_len for run in problem.runs),
        "residuals": [
            [_rounded(ratio), *map(_rounded, where)]
            for ratio, where in zip(left_out.ratios, left_out.coordinates, strict=True)
        ],
    }


def problems(runs: Sequence[Run]) -> dict[str, Problem]:
    """Return the problem of each kind of card, without doubtful runs."""
    cards = sorted({run.card for run in runs})
    return {
        card: Problem.of([run for run in runs if run.card == card and not run.is_doubtful])
        for card in cards
    }


def predicted_runs() -> list[tuple[Any, ...]]:
    """Return each run with the tokens/s that the shipped constants predict."""
    rows: list[tuple[Any, ...]] = []
    for run in read_runs():
        cost = ServingCost(run.card, run.num_cards, MODELS[run.model])
        seconds = run_seconds(cost, run.batch, run.input_len, run.output_len)
        predicted = run.batch * run.output_len / seconds
        where = run.card, run.software, run.model, run.num_cards, run.batch
        rows.append((*where, run.input_len, run.output_len, run.tokens_per_s, predicted))
    return rows


def predicted_mlperf() -> dict[int, float]:
    """Return the predicted tokens/s of static batches with the mean lengths of MLPerf 4.0."""
    cost = ServingCost("gaudi2", 8, MODELS["llama-2-70b"])
    return {batch: batch * 292 / run_seconds(cost, batch, 295, 292) for batch in (512, 1024)}


def run_seconds(cost: ServingCost, batch: int, input_len: int, output_len: int) -> float:
    """Return the predicted seconds of a static batch."""
    context = batch * padded_contexts(input_len, output_len)
    decodes = cost.decode_seconds(batch, context).seconds.sum() if len(context) else 0.0
    return float(cost.prefill_seconds(batch, input_len).seconds + decodes)


def padded_contexts(input_len: int, output_len: int) -> Floats:
    """Return how many tokens of a request each decode of a run reads."""
    blocks = -(-(input_len + np.arange(1, output_len)) // BLOCK_SIZE)
    return np.asarray(BLOCK_SIZE * blocks, np.float64)


def _text_of(fitted: dict[str, Any]) -> str:
    """Return the file of constants, each list on one line."""
    text = json.dumps({"made_by": "benchmarks/fit_cost_model.py", "cards": fitted}, indent=1)
    return re.sub(r"\[[^\[\]]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text) + "\n"


def _percent(share: Any) -> float:
    return round(100 * float(share), 1)


def _rounded(value: Any) -> float:
    return float(f"{float(value):.4g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", type=int, default=100, help="random splits of the validation")
    parser.add_argument("--write", action="store_true", help="write the constants and the page")
    args = parser.parse_args()
    if args.splits < 1:
        parser.error(f"--splits is {args.splits}, and must be at least 1")
    cards = problems(read_runs())
    fitted = {card: constants_of(problem) for card, problem in cards.items()}
    report = {
        card: {
            "runs": len(problem.runs),
            "cases": len(problem.indices_of_cases()),
            "constants": fitted[card]["constants"],
            "held_out_percent": held_out_errors(problem, args.splits),
            "whole_groups_held_out_percent": whole_groups_held_out(problem),
            "software_versions_percent": software_spread(problem.runs),
        }
        for card, problem in cards.items()
    }
    if args.write:
        FILE.write_text(_text_of(fitted), "utf-8")
        fitted_constants.cache_clear()
        lines = page_lines(report, predicted_mlperf(), predicted_runs())
        PAGE.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
