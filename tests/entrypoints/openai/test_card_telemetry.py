"""Test the sensors of cards on the routes of a server, with a stand-in for the vendor's package."""

import asyncio
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from tests.entrypoints.openai.observed_server import ObservedEngine, make_app, ready_engine
from tests.platforms.conftest import card, environment, hlml, lazy, vendor  # noqa: F401
from vllm.entrypoints.cli import collect_env
from vllm.entrypoints.shared import card_telemetry
from vllm.entrypoints.shared.card_telemetry import CardTelemetry
from vllm.platforms import resolve_platform
from vllm.platforms.habana.card_reading import CardReading

READING = CardReading(index=0, module=2, power_watts=300.0)


@pytest.fixture
def real_card(environment, card, hlml, monkeypatch):  # noqa: F811
    """Simulate a machine whose cards have sensors; return the package."""
    monkeypatch.delenv("HABANA_VISIBLE_MODULES", raising=False)
    environment()
    resolve_platform.cache_clear()
    yield hlml
    resolve_platform.cache_clear()


def card_samples(engine: ObservedEngine) -> dict[tuple[str, str, str], float]:
    """Return (metric, card and module) -> value."""
    text = TestClient(make_app(engine)).get("/metrics").text
    return {
        (s.name.removeprefix("vllm:hpu_"), s.labels["card"], s.labels["module"]): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.name.startswith("vllm:hpu_")
    }


def test_metrics_and_status_have_the_cards(real_card):
    real_card.cards[1].says = {"module": 1, "temperature": 44}
    engine = ready_engine("hpu")
    assert card_samples(engine) == {
        ("power_watts", "0", "3"): 412.6,
        ("temperature_celsius", "0", "3"): 51,
        ("temperature_celsius", "1", "1"): 44,
        ("memory_used_bytes", "0", "3"): 88 * 2**30,
        ("memory_total_bytes", "0", "3"): 96 * 2**30,
        ("utilization", "0", "3"): 0.87,
    }
    first, second = TestClient(make_app(engine)).get("/status.json").json()["cards"]
    assert (first["name"], first["power_watts"], first["utilization"]) == ("HL-225", 412.6, 0.87)
    assert (second["temperature_celsius"], second["power_watts"]) == (44, None)


@pytest.mark.parametrize("engine", [ObservedEngine("hpu"), ready_engine("cpu")])
def test_an_engine_that_starts_or_has_no_cards_reads_no_sensor(real_card, engine):
    assert card_samples(engine) == {}
    assert TestClient(make_app(engine)).get("/status.json").json()["cards"] == []
    assert real_card.calls == []


def test_without_the_package_the_routes_are_as_ever(real_card):
    real_card.init_error = OSError("no libhlml.so")
    engine = ready_engine("hpu")
    engine.work()
    assert card_samples(engine) == {}
    status = TestClient(make_app(engine)).get("/status.json").json()
    assert (status["cards"], status["running"]) == ([], 6)


def test_readings_are_kept_for_a_while():
    count = iter(range(100))
    often = CardTelemetry(lambda: [CardReading(next(count), None)], max_age_s=0)
    seldom = CardTelemetry(lambda: [CardReading(next(count), None)], max_age_s=1000)

    async def ask(telemetry: CardTelemetry) -> list[int]:
        return [(await telemetry.latest())[0].index for _ in range(3)]

    assert asyncio.run(ask(often)) == [0, 1, 2]
    assert asyncio.run(ask(seldom)) == [3, 3, 3]


def test_a_driver_that_hangs_holds_nobody_up():
    answers, hangs = threading.Event(), threading.Event()
    threads = []

    def read() -> list[CardReading]:
        threads.append(threading.current_thread())
        if hangs.is_set():
            answers.wait()
        return [READING]

    telemetry = CardTelemetry(read, max_age_s=0, patience_s=0.01)

    async def ask() -> None:
        # A busy machine may need some time for the first reading.
        while not await telemetry.latest():
            pass
        hangs.set()
        told = [await telemetry.latest() for _ in range(5)]
        assert told == [[READING]] * 5, "what was read last"
        waiting = [thread for thread in threads if thread.is_alive()]
        assert len(waiting) == 1 and waiting[0].daemon
        answers.set()
        waiting[0].join()
        assert await telemetry.latest() == [READING]

    asyncio.run(ask())


def test_readings_of_a_driver_that_does_not_answer_for_long_are_not_shown(monkeypatch):
    answers = threading.Event()
    telemetry = CardTelemetry(lambda: answers.wait() and [READING], max_age_s=0, patience_s=0.01)

    async def ask() -> None:
        answers.set()
        while not await telemetry.latest():
            pass
        answers.clear()
        assert await telemetry.latest() == [READING]
        monkeypatch.setattr(card_telemetry, "LOST_AFTER_S", -1.0)
        assert await telemetry.latest() == ()
        answers.set()

    asyncio.run(ask())


def test_collect_env_has_a_line_for_each_card(real_card, capsys):
    del real_card.cards[1].says["power"]
    collect_env.run(None)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[2].strip() for line in lines if line.startswith("Card ")] == [
        "HL-225, module 3, 88.0 of 96.0 GiB used, 413 W, 51 degrees Celsius, 87% busy",
        "HL-225, module 1, 88.0 of 96.0 GiB used, 51 degrees Celsius, 87% busy",
    ]
