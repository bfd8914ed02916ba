"""Test measured rates of one card: which predictions they change, and which files are refused."""

import json
from dataclasses import replace

import numpy as np
import pytest

from vllm.cost_model.cards import CARDS
from vllm.cost_model.fitted import CONSTANTS, fitted_constants
from vllm.cost_model.measured import RATES, Measured, read_measured
from vllm.errors import ConfigError


def published(card: str = "gaudi2") -> Measured:
    rates = {name: rate.published(CARDS[card]) for name, rate in RATES.items()}
    return Measured(card, False, rates)


@pytest.mark.parametrize("card", CARDS)
def test_a_card_with_the_published_rates_has_the_fitted_constants(card):
    np.testing.assert_allclose(published(card).fitted.values, fitted_constants(card).values)


@pytest.mark.parametrize("name", RATES)
def test_a_slower_card_has_longer_constants_and_no_others(name):
    measured = published()
    rate = measured.rates[name]
    slower = rate * 2 if RATES[name].is_time else rate / 2
    measured = replace(measured, rates={**measured.rates, name: slower})
    assert measured.slowness(name) == pytest.approx(2)
    ratios = measured.fitted.values / fitted_constants("gaudi2").values
    expected = [2.0 if constant in RATES[name].constants else 1.0 for constant in CONSTANTS]
    np.testing.assert_allclose(ratios, expected)
    assert f"{name} x 2" in measured.describe()


def test_a_rate_that_was_not_measured_changes_nothing():
    measured = Measured("gaudi3", True, {"memory_bytes_per_s": 1e12})
    assert measured.slowness("compile_s") == 1
    assert "compile_s" not in measured.describe()
    assert "nothing ran on hardware" in measured.describe()


def test_the_file_gives_the_same_rates_again(tmp_path):
    path = tmp_path / "card.json"
    published().write(path)
    assert read_measured(path, "gaudi2") == published()
    assert [file.name for file in tmp_path.iterdir()] == ["card.json"]


GOOD = {"version": 1, "card": "gaudi2", "rates": {"launch_s": 1e-4}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be a file of measured rates, version 1"),
        ("[]", "must be a file of measured rates"),
        (json.dumps(GOOD | {"version": 2}), "must be a file of measured rates"),
        (json.dumps(GOOD | {"card": "gaudi3"}), "has the rates of a gaudi3, but the plan is for"),
        (json.dumps(GOOD | {"rates": {}}), "has no rates"),
        (json.dumps(GOOD | {"rates": {"speed": 1}}), "'speed' is not a rate; accepted: matmul"),
        (json.dumps(GOOD | {"rates": {"launch_s": 0}}), "launch_s must be a number above 0, got 0"),
        (
            json.dumps(GOOD | {"rates": {"launch_s": "1"}}),
            "launch_s must be a number above 0, got 1",
        ),
        (
            json.dumps(GOOD | {"rates": {"launch_s": float("nan")}}),
            "launch_s must be a number above 0, got nan",
        ),
        (
            json.dumps(GOOD | {"rates": {"launch_s": True}}),
            "launch_s must be a number above 0, got True",
        ),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "card.json"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError) as error:
        read_measured(path, "gaudi2")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read_or_written_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_measured(tmp_path / "none.json", "gaudi2")
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        published().write(tmp_path / "no folder" / "card.json")
