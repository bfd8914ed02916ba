"""Test times that a running engine has measured: the constants that they give, and files that are
refused.
"""

import json

import numpy as np
import pytest

from vllm.cost_model.fitted import CONSTANTS, fitted_constants
from vllm.cost_model.measured import read_measured
from vllm.cost_model.run_times import FIELD, RunEngine, RunTimes, add_times, parse_run_times
from vllm.cost_model.throughput import AttentionFigures, ModelFigures, ServingCost
from vllm.errors import ConfigError

FIGURES = ModelFigures(
    dense_params=7e9,
    vocab_size=128_256,
    hidden_size=4096,
    num_layers=32,
    attention=(
        AttentionFigures(num_layers=32, query_width=4096, kv_width=2048, num_kv_heads=8),
        AttentionFigures(
            num_layers=1, query_width=4096, kv_width=2048, num_kv_heads=8, window=1024
        ),
    ),
    weight_bytes=2,
    kv_bytes=2,
    is_fp8=False,
)
ENGINE = RunEngine(card="gaudi2", is_simulated=False, num_cards=2, block_size=128, figures=FIGURES)
PROMPTS = [(0, batch, length, 0) for batch in (1, 4) for length in (128, 1024, 4096)]
DECODES = [(1, batch, 1, batch * n) for batch in (1, 8, 64, 256) for n in (1, 16, 64)]


def times_of(buckets, factors) -> RunTimes:
    """Return the times of a card on which each part takes longer by its factor."""
    cost, values = ServingCost("gaudi2", 2, FIGURES), fitted_constants("gaudi2").values
    times = {}
    for phase, batch, length, blocks in buckets:
        sizes = [np.array(float(n)) for n in (batch, length, blocks)]
        attention, terms = cost.prefill_terms(*sizes)
        if phase:
            attention, terms = 0.0, cost.decode_terms(sizes[0], sizes[2] * 128, sizes[1])
        seconds = attention + terms @ (values * factors)
        times[phase, batch, length, blocks] = (50.0, 50 * float(seconds))
    return RunTimes(ENGINE, times)


def factors_of(**changed: float) -> np.ndarray:
    return np.array([changed.get(name, 1.0) for name in CONSTANTS])


def test_times_as_predicted_change_nothing():
    run = times_of(PROMPTS + DECODES, factors_of())
    np.testing.assert_allclose(run.factors, 1.0, atol=1e-6)
    np.testing.assert_allclose(run.fitted.values, fitted_constants("gaudi2").values)
    assert run.describe().endswith("relative to published cards: the same")
    assert "(900 forward passes in 18 buckets)" in run.describe()


@pytest.mark.parametrize(
    "changed", [{"prompt_matmuls": 1.3}, {"keys_and_values": 1.5}, {"layer_us": 2.0}]
)
def test_the_constants_of_another_card_are_found(changed):
    run = times_of(PROMPTS + DECODES, factors_of(**changed))
    cost = ServingCost("gaudi2", 2, FIGURES, fitted=run.fitted)
    for (phase, batch, length, blocks), (count, seconds) in run.times.items():
        if phase:
            predicted = cost.decode_seconds(batch, blocks * 128, length)
        else:
            predicted = cost.prefill_seconds(batch, length, blocks)
        assert float(predicted.seconds) == pytest.approx(seconds / count, rel=0.06)
    [(name, factor)] = changed.items()
    assert f"{name} x " in run.describe()
    # the time that does not depend on the size of a step is divided between several constants
    if name != "layer_us":
        assert run.factors[list(CONSTANTS).index(name)] == pytest.approx(factor, rel=0.1)


def test_decodes_alone_leave_the_matmuls_of_prompts():
    run = times_of(DECODES, factors_of(keys_and_values=1.5))
    assert run.factors[list(CONSTANTS).index("prompt_matmuls")] == pytest.approx(1.0)


def test_a_file_gives_the_same_times_again(tmp_path):
    run = times_of(PROMPTS, factors_of())
    read = parse_run_times(json.loads(json.dumps({FIELD: run.to_json()})), "traffic.json")
    assert read is not None and read.engine == ENGINE and read.times.keys() == run.times.keys()
    path = tmp_path / "traffic.json"
    path.write_text(json.dumps({"format": "vllm traffic", "version": 1, FIELD: run.to_json()}))
    measured = read_measured(path, "gaudi2")
    assert measured.slowness("compile_s") == 1 and measured.describe() == run.describe()
    np.testing.assert_allclose(measured.fitted.values, run.fitted.values, rtol=1e-4)
    with pytest.raises(
        ConfigError, match="has the rates of a gaudi2, but the plan is for a gaudi3"
    ):
        read_measured(path, "gaudi3")


def test_times_add_up():
    one, two = {(0, 1, 128, 0): (2, 1.0)}, {(0, 1, 128, 0): (1, 0.5), (1, 1, 1, 1): (1, 0.1)}
    assert add_times(one, two) == {(0, 1, 128, 0): (3, 1.5), (1, 1, 1, 1): (1, 0.1)}


GOOD = times_of(PROMPTS, factors_of()).to_json()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no measured times: record it with --record-traffic"),
        ({}, "are damaged: Object missing required field `card`"),
        (GOOD | {"buckets": [["prefill", 1, 128, 0, 3, 1.0]]}, "has 3 measured forward passes"),
        (GOOD | {"buckets": [["draft", 1, 128, 0, 3, 1.0]]}, "damaged"),
        (GOOD | {"buckets": [["prefill", 1, 128, 0, 3, -1.0]]}, "3.0 forward passes of -1.0 s"),
        (GOOD | {"buckets": [["prefill", 0, 128, 0, 3, 1.0]]}, "damaged"),
    ],
)
def test_a_file_without_good_times_is_refused_in_one_line(content, words, tmp_path):
    path = tmp_path / "traffic.json"
    more = {} if content is None else {FIELD: content}
    path.write_text(json.dumps({"format": "vllm traffic", "version": 1} | more))
    with pytest.raises(ConfigError, match=words) as error:
        read_measured(path, "gaudi2")
    assert len(str(error.value).splitlines()) == 1
