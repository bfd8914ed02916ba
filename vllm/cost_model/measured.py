"""Measured rates of one card, and constants that are adapted to them.

A running engine measures no rates, but seconds of forward passes (`run_times`). Both come from a
file that `vllm plan --measured` reads.

A model does not reach the rate of a single operator. So a measured rate only scales the fitted
constants, by its ratio to the rate that published benchmarks of this kind of card have.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm.cost_model import constants
from vllm.cost_model.cards import CARDS, CardSpec
from vllm.cost_model.fitted import CONSTANTS, Fitted, fitted_constants
from vllm.cost_model.links import empty_all_reduce_seconds
from vllm.cost_model.run_times import RunTimes, read_run_times
from vllm.cost_model.start import compile_seconds
from vllm.errors import ConfigError

VERSION = 1
COMPILED_OPERATORS = 64
"""Operators of the recipe whose compilation is timed."""


@dataclass(frozen=True)
class _Rate:
    """One kind of rate that can be measured, and its published value."""

    published: Callable[[CardSpec], float]
    """Returns the published value for a card of this kind."""
    constants: tuple[str, ...]
    """Names of constants of the cost model that are larger on a slower card."""
    is_time: bool = False
    """Whether a slower card has more of it."""


RATES = {
    "matmul_flops_per_s": _Rate(
        lambda spec: constants.GEMM_SHARE * spec.bf16_flops, ("prompt_matmuls", "decode_matmuls")
    ),
    "memory_bytes_per_s": _Rate(
        lambda spec: constants.HBM_SHARE * spec.hbm_bytes_per_s, ("keys_and_values", "weights")
    ),
    "launch_s": _Rate(lambda spec: constants.LAUNCH_STEP_S, ("layer_us",), is_time=True),
    "link_bytes_per_s": _Rate(lambda spec: spec.link_bytes_per_s, ("link_bytes",)),
    "all_reduce_s": _Rate(empty_all_reduce_seconds, ("all_reduce_us",), is_time=True),
    "compile_s": _Rate(lambda spec: compile_seconds(COMPILED_OPERATORS), (), is_time=True),
}
"""Constants that are rates, by their names in the file."""


@dataclass(frozen=True)
class Measured:
    """The measured rates of one card.

    Attributes:
        card: a key of `cards.CARDS`.
        is_simulated: nothing ran on hardware.
        rates: measured rates by name.
        run: measurements of a running engine instead of rates; None: nothing.
    """

    card: str
    is_simulated: bool
    rates: Mapping[str, float]
    run: RunTimes | None = None

    def slowness(self, name: str) -> float:
        """Return how much longer this card takes than published ones; 1 if the rate was not
        measured.
        """
        if name not in self.rates:
            return 1.0
        rate = RATES[name]
        ratio = self.rates[name] / rate.published(CARDS[self.card])
        return ratio if rate.is_time else 1 / ratio

    @property
    def fitted(self) -> Fitted:
        """The constants fitted to published runs, scaled by the measurements."""
        if self.run is not None:
            return self.run.fitted
        fitted = fitted_constants(self.card)
        values, names = fitted.values.copy(), list(CONSTANTS)
        for name, rate in RATES.items():
            for constant in rate.constants:
                values[names.index(constant)] *= self.slowness(name)
        return replace(fitted, values=values)

    def describe(self) -> str:
        """Return one line of text about which constants are measured."""
        if self.run is not None:
            return self.run.describe()
        where = "a simulated card: nothing ran on hardware" if self.is_simulated else "this card"
        ratios = [f"{name} x {self.slowness(name):.3g}" for name in RATES if name in self.rates]
        return f"Measured on {where}; time relative to published cards: {', '.join(ratios)}"

    def write(self, path: Path) -> None:
        """Write the file atomically.

        Raises:
            ConfigError: it cannot be written.
        """
        data = {"version": VERSION, "card": self.card, "is_simulated": self.is_simulated}
        text = json.dumps(data | {"rates": dict(self.rates)}, indent=1) + "\n"
        temporary = path.with_name(f"{path.name}.tmp")
        try:
            temporary.write_text(text, "utf-8")
            temporary.replace(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def read_measured(path: Path, card: str) -> Measured:
    """Read the measured rates of a card from a file.

    Args:
        path: path of the file, which `vllm hpu-check --save` or `--record-traffic` has written.
        card: the expected kind of card, a key of `cards.CARDS`.

    Raises:
        ConfigError: the file cannot be read, or is for another kind of card.
    """
    try:
        data: Any = json.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. Name a file that 'vllm hpu-check --save "
            "FILE' or an engine with --record-traffic FILE has written"
        ) from None
    except ValueError:
        data = None
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise ConfigError(
            f"{path} must be a file of measured rates, version {VERSION}: write one with "
            f"'vllm hpu-check --save FILE', or let an engine write it with --record-traffic FILE"
        )
    # A file without "format" is recorded traffic.
    run = read_run_times(data, str(path)) if "format" in data else None
    measured_card = data.get("card") if run is None else run.engine.card
    if measured_card != card:
        raise ConfigError(
            f"{path} has the rates of a {measured_card}, but the plan is for a {card}: measure "
            f"a {card}, or leave --measured out"
        )
    if run is not None:
        return Measured(card, run.engine.is_simulated, {}, run)
    rates = data.get("rates")
    if not isinstance(rates, dict) or not rates:
        raise ConfigError(f"{path} has no rates")
    for name, rate in rates.items():
        if name not in RATES:
            raise ConfigError(f"{path}: {name!r} is not a rate; accepted: {', '.join(RATES)}")
        is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not (is_number and math.isfinite(rate) and rate > 0):
            raise ConfigError(f"{path}: {name} must be a number above 0, got {rate}")
    return Measured(card, data.get("is_simulated") is True, rates)
