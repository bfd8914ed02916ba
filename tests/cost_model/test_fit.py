"""Test the fitted constants: the program gives the shipped constants, and they predict runs that
the fit has not seen.
"""

import json

import numpy as np
import pytest

from benchmarks.cost_model_page import PAGE, run_lines
from benchmarks.fit_cost_model import (
    MODELS,
    Problem,
    fit,
    held_out_errors,
    least_squares,
    predicted_runs,
    problems,
    read_runs,
    whole_groups_held_out,
)
from vllm.cost_model import constants
from vllm.cost_model.fitted import CONSTANTS, FILE, fitted_constants

CARDS = ("gaudi2", "gaudi3")


@pytest.fixture(scope="module")
def of_card() -> dict[str, Problem]:
    return problems(read_runs())


def test_runs_without_batch_or_model_and_the_doubtful_one_are_left_out(of_card):
    assert {card: len(problem.runs) for card, problem in of_card.items()} == {
        "gaudi2": 53,
        "gaudi3": 68,
    }
    assert {run.model for problem in of_card.values() for run in problem.runs} == set(MODELS)


@pytest.mark.parametrize("card", CARDS)
def test_the_shipped_constants_are_those_that_the_program_fits(of_card, card):
    shipped = fitted_constants(card)
    np.testing.assert_allclose(fit(of_card[card]), shipped.values, rtol=2e-3)
    assert len(shipped.residuals.ratios) == len(of_card[card].runs)
    assert shipped.numbers_of_cards == (1, 2, 8)


def test_the_page_has_each_run_as_the_shipped_constants_predict_it():
    lines = PAGE.read_text("utf-8").splitlines()
    table = list(run_lines(predicted_runs()))
    assert lines[-len(table) :] == table
    assert len(table) == 2 + 122


@pytest.mark.parametrize("card", CARDS)
def test_each_shipped_constant_lies_in_its_range(card):
    shipped = json.loads(FILE.read_text("utf-8"))["cards"][card]["constants"]
    assert list(shipped) == list(CONSTANTS)
    for constant in shipped.values():
        assert constant["low"] <= constant["value"] <= constant["high"]
    assert shipped["weights"]["value"] == 1.25
    assert 20 <= shipped["layer_us"]["value"] <= 100


@pytest.mark.parametrize("card", CARDS)
def test_shares_of_single_operators_have_the_fitted_constants_in_their_range(card):
    fitted = dict(zip(CONSTANTS, fitted_constants(card).values, strict=True))
    hbm, gemm = constants.HBM_SHARE, constants.GEMM_SHARE
    assert hbm.low <= 1 / fitted["keys_and_values"] <= hbm.high
    assert gemm.low <= 1 / fitted["prompt_matmuls"] <= gemm.high


@pytest.mark.parametrize("splits", [3, pytest.param(100, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("card", CARDS)
def test_cases_that_the_fit_has_not_seen_are_predicted(of_card, card, splits):
    errors = held_out_errors(of_card[card], splits)
    assert errors["median"] <= 12
    assert errors["p90"] <= 30
    assert errors["in_band"] >= 80


@pytest.mark.parametrize("card", CARDS)
def test_a_number_of_cards_that_the_fit_has_not_seen_is_predicted(of_card, card):
    errors = whole_groups_held_out(of_card[card])
    assert errors["2 cards"] <= 25
    assert errors["8 cards"] <= 25


def test_least_squares_within_bounds_has_no_better_neighbour():
    rng = np.random.default_rng(0)
    for _ in range(50):
        matrix, target = rng.random((9, 4)), rng.random(9)
        low = rng.random(4) / 2
        high = low + np.array([0, 0.1, 0.5, np.inf])
        best = least_squares(matrix, target, low, high)
        assert (low <= best).all() and (best <= high).all()
        error = np.linalg.norm(matrix @ best - target)
        for step in rng.normal(0, 1e-3, (40, 4)):
            near = np.clip(best + step, low, high)
            assert np.linalg.norm(matrix @ near - target) >= error - 1e-12
