"""The page docs/planning_accuracy.md: predicted against published, written by fit_cost_model.py."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "planning_accuracy.md"

_START = """\
<!-- Written by benchmarks/fit_cost_model.py --write. Change the program, then run it. -->
# Accuracy of predicted throughput

`vllm plan` predicts times from seven constants for each kind of card
(`vllm/cost_model/fitted.json`). They are fitted to published runs
(`benchmarks/data/gaudi_throughput.csv` has the sources). Nothing here was measured on a card by
this project. `python benchmarks/fit_cost_model.py` computes all figures of this page again.

Intel published the runs. They used optimum-habana, FP8 weights, an FP8 cache and one static batch:
a prefill of all prompts, then decodes until all outputs are complete. They do **not** cover:

- vLLM or this engine, which have a scheduler, buckets, and requests that arrive and finish;
- bfloat16, and weights with fewer than 8 bits;
- mixtures of experts, prompts over 2,048 tokens, and other numbers of cards than 1, 2 and 8;
- small batches: six of the runs have one request, all others 44 or more.

If a plan has a figure that the runs do not cover, it says "outside of published data", and the band
is a factor of two wider at both ends.
"""

_HELD_OUT = """
## Errors of runs that the fit has not seen

A third of the cases is held out, at random, {splits} times. A case is model, number of cards, input
and output: all its software versions and batches are held out together. Intel's own software
versions differ from each other, and no prediction can know this part of the error.
"""

_GROUPS = """
Median error where all runs of a model, or of a number of cards, are held out:
"""

_CONSTANTS = """
## Constants

The range in parentheses is from the 10 % to the 90 % quantile of fits to resampled cases. The time
of an all-reduce is computed from the links between the cards that take part. Each card has the same
number of links to each of the seven others of its box, so two cards use a seventh of them.
"""

_MLPERF = """
## A run of another kind

MLPerf Inference 4.0, Llama-2-70B on eight Gaudi 2, offline: 8,035 tokens/s were published, with
continuous batching and a mean of 295 prompt and 292 output tokens. It is not in the fit. Predicted
for static batches of these lengths: {predicted}.
"""

_WARM_UP = """
## A warm-up

A published log of Llama-3.1-8B in bfloat16 on one Gaudi 2 has 24 prompt and 48 decode buckets. It
compiles and runs them in 28 s, and captures 15 + 48 of them as HPU graphs in 21 s: 49 s. For the
same buckets, and as many graphs, the plan has 15 s and 51 s: 66 s, a third more. So the sum is
nearer than its parts: compilations are planned too short, captures too long, each by about a
factor of two. (The set of this engine has eight more prompt buckets, for batches of three; their
time is not in the 66 s.)
"""

_RUNS = """
## All runs

Predicted with the constants above, which were fitted to these runs. The run of Llama-2-70B on four
Gaudi 2 is not in the fit: in the next software version, the same run is as fast on two cards.
"""


def page_lines(
    report: Mapping[str, Any], mlperf: Mapping[int, float], runs: Iterable[Sequence[Any]]
) -> Iterator[str]:
    """Yield the lines of the page.

    Args:
        report: of the fit, by card.
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
