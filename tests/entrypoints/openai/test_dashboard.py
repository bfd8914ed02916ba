"""Test that a server exposes every metric that the example dashboards query."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from tests.entrypoints.openai.observed_server import make_app, ready_engine
from tests.loops import loop_over
from vllm.config import ConnectorConfig
from vllm.engine.metrics.engine_metrics import EngineMetrics, IterationStats
from vllm.engine.metrics.media_metrics import MediaReadStats, fetch_metrics, read_metrics
from vllm.entrypoints.shared.card_telemetry import card_metrics
from vllm.messages import DraftStats, SchedulerStats, WarmUpStats
from vllm.multimodal.interface.media_times import MediaTimes
from vllm.platforms.habana.card_reading import CardReading

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "examples/grafana/dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = {f"{p['title']} {t['refId']}": t["expr"] for p in PANELS for t in p["targets"]}
ALERTS = re.findall(
    r"expr: (?:>-\n)?((?:.|\n)+?)\n +(?:for|ann)",
    (ROOT / "examples/prometheus/alerts.yml").read_text(),
)

METRIC = re.compile(r"\b(?:vllm:|http_|process_|python_)\w+")
LABELS = re.compile(r"(\b(?:vllm:|http_|process_)\w+)\{([^}]*)\}")


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Return sample -> names of its labels, for a server that has used all of its features."""
    engine = ready_engine()
    engine.work()
    engine.finish("cmpl-1")
    client = TestClient(make_app(engine))
    client.post("/v1/things/404")
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
    }


@loop_over("query", [*QUERIES.values(), *ALERTS])
def test_a_query_asks_for_what_there_is(query, exposed):
    names = METRIC.findall(query)
    assert names and set(names) <= exposed.keys()
    for name, labels in LABELS.findall(query):
        # Prometheus itself adds the label `instance`.
        asked = set(re.findall(r"(\w+)=~?\"", labels)) - {"instance"}
        assert asked <= exposed[name]
    for group in re.findall(r"by \((\w+)\)", query):
        assert all(group in exposed[name] for name in names)
    assert query.count("(") == query.count(")")


def test_there_are_alerts():
    assert len(ALERTS) == 5


def test_panels_do_not_overlap_and_fill_the_width():
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len(cells) == 24 * (1 + max(y for _, y in cells))
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


_OPTIONAL = (
    *("spec_decode", "lora", "external", "transfer", "mm_", "encoder_"),
    *("warm_", "wanted_"),
)
"""Parts of the names of metrics that some configs add."""


def test_every_metric_of_the_engine_is_documented(exposed):
    page = (ROOT / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"`((?:vllm:|http_)\w+)", page))
    suffixes = ("_bucket", "_count", "_sum")
    names = {
        name if not name.endswith(suffixes) else name.rpartition("_")[0]
        for name in exposed
        if name.startswith(("vllm:", "http_"))
    }
    config = ready_engine().metrics.config
    arch = replace(config.model.resolved_arch, media_config={})
    more = replace(
        config,
        model=replace(config.model, arch=arch),
        scheduler=replace(config.scheduler, max_draft_tokens=2),
        lora=replace(config.lora, enable_lora=True),
        connector=ConnectorConfig(kv_transfer_config={"kv_connector": "OffloadingConnector"}),
    )
    metrics = EngineMetrics("m", more)
    metrics.record_output(
        SchedulerStats(
            drafts=DraftStats(num_drafts=2, num_draft_tokens=4, accepted=(2, 1)),
            warm_up=WarmUpStats(num_warm=16, num_wanted=86, seconds_left=9.0, padded_share=0.1),
        ),
        IterationStats(0, 0, (), ()),
    )
    for family in (family for each in metrics.metric_sets() for family in each.collect()):
        if any(part in family.name for part in _OPTIONAL):
            names |= {sample.name for sample in family.samples}
    times = MediaTimes()
    times.add("image", 0.5)
    for made in (read_metrics(MediaReadStats(times, 2, 1), "m"), fetch_metrics(times, "m")):
        names |= {sample.name for family in made.collect() for sample in family.samples}
    cards = card_metrics([CardReading(0, 0, "HL-225", 400.0, 50.0, 2**30, 2**37, 0.5)])
    names |= {sample.name for family in cards.collect() for sample in family.samples}
    assert names == documented
