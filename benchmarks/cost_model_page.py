"""The page docs/planning_accuracy.md: predicted against published, written by fit_cost_model.py."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "planning_accuracy.md"

_START = """\
<!-- Written by benchmarks/fit_cost_model.py --write. Change the program, then run it. -->
# Accuracy of predicted throughput

This page shows how far the predictions of `vllm plan` are from published measurements. `vllm plan`
computes times from seven constants for each kind of card (`vllm/cost_model/fitted.json`). The
constants are fitted to published runs (sources: `benchmarks/data/gaudi_throughput.csv`). This
project has measured nothing on a card. `python benchmarks/fit_cost_model.py` computes all figures
of this page again.

Intel published the runs. They used optimum-habana, FP8 weights, an FP8 cache and one static batch:
a prefill of all prompts, then decodes until all outputs are complete. The runs do **not** cover:

- vLLM or this engine, which have a scheduler, buckets, and requests that arrive and finish;
- bfloat16, and weights with fewer than 8 bits;
- mixtures of experts, prompts over 2,048 tokens, and other numbers of cards than 1, 2 and 8;
- small batches: six of the runs have one request, all others 44 or more.

A plan gives a band (least to largest) for a predicted figure. If the runs do not cover the figure,
the plan says "outside of published data", and the band is a factor of two wider at both ends.
"""

_HELD_OUT = """
## Errors of runs that the fit has not seen

To measure the error, a random third of the cases is left out of the fit. Then it is predicted. This
is done {splits} times. A case is a model with a number of cards, an input length and an output
length. All its software versions and batches are left out together. Part of the error cannot be
avoided, because the same run has different speeds with different versions of Intel's software.
"""

_GROUPS = """
The next table has the median error if all runs of a model, or of a number of cards, are left out:
"""

_CONSTANTS = """
## Constants

The range in parentheses is from the 10 % to the 90 % quantile of fits to resampled cases. The time
of an all-reduce is computed from the links between the cards that take part. Each card has the same
number of links to each of the seven other cards of its machine. So two cards use a seventh of their
links.
"""

_MLPERF = """
## A run of another kind

MLPerf Inference 4.0 has an offline run of Llama-2-70B on eight Gaudi 2, with continuous batching.
The mean lengths are 295 prompt tokens and 292 output tokens. The run is not in the fit. Published:
8,035 tokens/s. Predicted for static batches of these lengths: {predicted}.
"""

_WARM_UP = """
## A warm-up

A published log has the warm-up of Llama-3.1-8B in bfloat16 on one Gaudi 2, with 24 prompt and 48
decode buckets. The plan is for the same buckets and the same number of graphs:

| part of the warm-up | published | predicted |
| --- | --- | --- |
| compile and run all buckets | 28 s | 15 s |
| capture 15 + 48 buckets as HPU graphs | 21 s | 51 s |
| both | 49 s | 66 s |

The predicted sum is a third too long. The errors of the parts are larger, each about a factor of
two: compilations are predicted too short, and captures too long. (This engine has eight more prompt
buckets, for batches of three. Their time is not in the 66 s.)
"""

_RUNS = """
## All runs

The predictions use the constants above, which were fitted to these runs. The run of Llama-2-70B on
four Gaudi 2 is not in the fit, because its number of cards is doubtful: with the next software
version, two cards were as fast.
"""


def page_lines(
    report: Mapping[str, Any], mlperf: Mapping[int, float], runs: Iterable[Sequence[Any]]
) -> Iterator[str]:
    """Yield the lines of the page.

    Args:
        report: report of the fit, by card.
        mlperf: tokens/s by batch.
        runs: card, software, model, cards, batch, input, output, published tokens/s, predicted.
    """
    cards = list(report)
    splits = report[cards[0]]["held_out_percent"]["splits"]
    yield from _START.splitlines()
    yield from _HELD_OUT.format(splits=splits).splitlines()
    yield ""
    yield from _table(
        ("", *cards),
        [
            (
                "runs, cases",
                *(f"{report[card]['runs']}, {report[card]['cases']}" for card in cards),
            ),
            *(
                (words, *(f"{report[card]['held_out_percent'][name]} %" for card in cards))
                for name, words in (
                    ("median", "median error of the time"),
                    ("p90", "90 % of the errors are below"),
                    ("worst", "worst"),
                    ("in_band", "runs within the band of the plan"),
                )
            ),
            (
                "median spread of a run between software versions",
                *(f"{report[card]['software_versions_percent']['median']} %" for card in cards),
            ),
            (
                "largest spread of a run between software versions",
                *(f"{report[card]['software_versions_percent']['worst']} %" for card in cards),
            ),
        ],
    )
    yield from _GROUPS.splitlines()
    yield ""
    groups = {card: report[card]["whole_groups_held_out_percent"] for card in cards}
    names = sorted(set().union(*groups.values()), key=lambda name: (name[0].isdigit(), name))
    yield from _table(
        ("held out", *cards),
        [(name, *(_percent(groups[card].get(name)) for card in cards)) for name in names],
    )
    yield from _CONSTANTS.splitlines()
    yield ""
    constants = {card: report[card]["constants"] for card in cards}
    yield from _table(
        ("constant", *cards, "meaning", "note"),
        [
            (
                f"`{name}`",
                *(_ranged(constants[card][name]) for card in cards),
                one["means"],
                one.get("note", ""),
            )
            for name, one in constants[cards[0]].items()
        ],
    )
    predicted = ", ".join(f"{rate:,.0f} (batch {batch:,})" for batch, rate in mlperf.items())
    yield from _MLPERF.format(predicted=predicted).splitlines()
    yield from _WARM_UP.splitlines()
    yield from _RUNS.splitlines()
    yield ""
    yield from run_lines(runs)


def run_lines(runs: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Yield the table of all runs."""
    columns = ("card", "software", "model", "cards", "batch", "input", "output")
    yield from _table(
        (*columns, "published tokens/s", "predicted", "error"),
        [
            (*where, f"{published:,.0f}", f"{predicted:,.0f}", f"{predicted / published - 1:+.0%}")
            for *where, published, predicted in runs
        ],
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    for row in (header, ("---",) * len(header), *rows):
        yield f"| {' | '.join(map(str, row))} |"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value} %"


def _ranged(constant: Mapping[str, Any]) -> str:
    low, high = constant["low"], constant["high"]
    span = "" if low == high else f" ({low:.3g} to {high:.3g})"
    return f"{constant['value']:.3g}{span}"
