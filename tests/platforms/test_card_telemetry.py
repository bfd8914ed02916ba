"""Test the sensors of Gaudi cards, with a stand-in for the vendor's package."""

import inspect
import logging
import sys

import pytest

from tests.hpu import captured_log
from tests.reach import use_device_nodes
from vllm.env import ranks as env_ranks
from vllm.platforms import hpu
from vllm.platforms.habana.card_reading import CardReading
from vllm.platforms.habana.telemetry import CardReader

GIB = 2**30

# The parameters of each function of the library in build 1.24.
DOCUMENTED = {
    "hlmlInit": "",
    "hlmlDeviceGetCount": "",
    "hlmlDeviceGetHandleByIndex": "index",
    "hlmlDeviceGetName": "device",
    "hlmlDeviceGetModuleID": "device",
    "hlmlDeviceGetPowerUsage": "device",
    "hlmlDeviceGetTemperature": "device, sensor_type",
    "hlmlDeviceGetMemoryInfo": "device",
    "hlmlDeviceGetUtilizationRates": "device",
}

FULL = CardReading(
    index=0,
    module=3,
    name="HL-225",
    power_watts=412.6,
    temperature_celsius=51.0,
    memory_used_bytes=88 * GIB,
    memory_total_bytes=96 * GIB,
    utilization=0.87,
)


def test_the_stand_in_has_the_signatures_of_the_package(hlml):
    functions = inspect.getmembers(hlml, inspect.isfunction)
    found = {n: ", ".join(inspect.signature(f).parameters) for n, f in functions if n[0] == "h"}
    assert found == DOCUMENTED


def test_a_card_says_all_in_units_of_their_own(hlml):
    first, second = CardReader().read()
    assert first == FULL
    assert (second.index, second.module) == (1, 1)


@pytest.mark.parametrize(("modules", "found"), [({1}, [1]), ({1, 3}, [0, 1]), ({7}, [])])
def test_only_the_cards_of_an_engine_are_read(hlml, modules, found):
    reader = CardReader(modules)
    for _ in range(2):
        assert [card.index for card in reader.read()] == found
    assert hlml.calls.count("init") == 1


def test_what_a_card_does_not_say_is_not_known_and_the_rest_is(hlml):
    del hlml.cards[0].says["power"], hlml.cards[0].says["memory"], hlml.cards[0].says["module"]
    hlml.cards[1].says.clear()
    first, second = CardReader({1}).read()  # the answers do not show that this is another module
    assert first.temperature_celsius == 51 and first.utilization == 0.87
    assert (first.power_watts, first.memory_total_bytes, first.module) == (None, None, None)
    assert second == CardReading(index=1, module=None)


def test_without_the_package_or_its_library_there_is_nothing_and_one_line_says_so(
    hlml, monkeypatch
):
    hlml.init_error = hlml.HLMLError(1)
    missing = CardReader()
    with captured_log(logging.INFO) as lines:
        assert [missing.read(), missing.read()] == [[], []]
        monkeypatch.setitem(sys.modules, "pyhlml", None)
        missing = CardReader()
        assert [missing.read(), missing.read()] == [[], []]
    start = (
        "power, temperature, memory and utilization of the cards are not measured: habana-pyhlml"
    )
    assert lines == [
        f"{start}: HLMLError: HLML Error with code 1",
        f"{start} is not installed: pip install 'vllm[hpu-telemetry]'",
    ]


@pytest.mark.parametrize(
    ("visible", "num_ranks", "modules"),
    [
        (None, 1, None),
        (None, 2, {0, 1}),
        ("3,5, 7", 1, {3, 5, 7}),
        ("3,5, 7", 2, {3, 5}),
        ("all", 1, None),
    ],
)
def test_the_cards_of_an_engine_are_those_that_its_ranks_take(
    visible, num_ranks, modules, monkeypatch
):
    monkeypatch.delenv("HABANA_VISIBLE_MODULES", raising=False)
    if visible is not None:
        monkeypatch.setenv("HABANA_VISIBLE_MODULES", visible)
    assert env_ranks.modules_of(num_ranks) == modules


def test_only_real_cards_have_sensors(environment, card, hlml, monkeypatch, tmp_path):
    monkeypatch.delenv("HABANA_VISIBLE_MODULES", raising=False)
    environment(VLLM_HPU_SIM="gaudi2")
    assert hpu.create_hpu_platform().card_reader(1) is None
    environment()
    platform = hpu.create_hpu_platform()
    assert [card.module for card in platform.card_reader(1)()] == [3, 1]
    assert [card.module for card in platform.card_reader(2)()] == [1]
    use_device_nodes(monkeypatch, tmp_path / "none")
    assert platform.card_reader(1) is None
