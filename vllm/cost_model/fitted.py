"""The constants that were fitted to published runs, for each kind of card.

They are read from the file `fitted.json`, which `benchmarks/fit_cost_model.py --write` creates.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FILE = Path(__file__).with_name("fitted.json")

CONSTANTS = {
    "prompt_matmuls": "time of the matmuls of prompts, where 1 is the peak of the card",
    "decode_matmuls": "time of the matmuls of decodes, where 1 is the peak of the card",
    "keys_and_values": "time of reading keys and values, where 1 is the peak of the memory",
    "weights": "time of reading the weights once a step, where 1 is the peak of the memory",
    "layer_us": "microseconds that a layer takes in a step, whatever its size",
    "link_bytes": "time of all-reduces, where 1 is the peak of the links between the cards used",
    "all_reduce_us": "microseconds that an all-reduce takes, whatever its size",
}
"""Meaning of each constant, in the order of the columns of `throughput.ServingCost`."""


@dataclass(frozen=True)
class Residuals:
    """Errors of the prediction for published runs; each was left out of the fit for its
    own error.
    """

    ratios: Floats
    """Published seconds divided by predicted seconds. [rows]"""
    coordinates: Floats
    """[R, 4] coordinates of the R published runs, as `throughput.coordinates` returns them."""


@dataclass(frozen=True)
class Fitted:
    """The fitted constants of one kind of card, and the runs that they were fitted to."""

    values: Floats
    """Values of the constants, in the order of `CONSTANTS`."""
    numbers_of_cards: tuple[int, ...]
    longest_prompt: int
    residuals: Residuals


@cache
def fitted_constants(card: str) -> Fitted:
    """Return the fitted constants of a kind of card, a key of `cards.CARDS`."""
    data: dict[str, Any] = json.loads(FILE.read_text("utf-8"))["cards"][card]
    rows = np.array(data["residuals"], np.float64)
    return Fitted(
        values=np.array([data["constants"][name]["value"] for name in CONSTANTS], np.float64),
        numbers_of_cards=tuple(data["numbers_of_cards"]),
        longest_prompt=data["longest_prompt"],
        residuals=Residuals(rows[:, 0], rows[:, 1:]),
    )
