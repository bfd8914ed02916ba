"""Test GET /metrics and its figures about HTTP."""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from tests.entrypoints.openai.observed_server import KEY, ObservedEngine, make_app, ready_engine
from vllm.entrypoints.operations.metrics_route import HttpMetrics

THING = "/v1/things/{number}"


def client_of(engine: ObservedEngine, keys: tuple[str, ...] = ()) -> TestClient:
    return TestClient(make_app(engine, keys), raise_server_exceptions=False)


def scrape(client: TestClient, **headers: str) -> dict[str, float]:
    """Return (name and values of labels) -> value, without the labels of the engine."""
    response = client.get("/metrics", headers=headers)
    assert response.status_code == 200
    return {
        " ".join(
            [s.name, *(v for k, v in s.labels.items() if k not in ("model_name", "engine"))]
        ): (s.value)
        for family in text_string_to_metric_families(response.text)
        for s in family.samples
    }


def test_a_scrape_has_the_engine_the_server_and_the_process():
    engine = ready_engine()
    engine.work(num_tokens=64)
    samples = scrape(client_of(engine))
    assert samples["vllm:generation_tokens_total"] == 64
    assert samples["vllm:padded_tokens_total"] == 100
    # The request for the metrics itself is in progress.
    assert samples["http_requests_inprogress"] == 1
    assert samples["process_resident_memory_bytes"] > 0


def test_before_the_engine_is_ready_only_the_server_is_told_of():
    samples = scrape(client_of(ObservedEngine()))
    assert "http_requests_inprogress" in samples
    assert "vllm:generation_tokens_total" not in samples


def test_prometheus_gets_openmetrics():
    response = client_of(ready_engine()).get(
        "/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0,*/*;q=0.1"}
    )
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


@pytest.mark.parametrize(
    ("method", "path", "labels"),
    [
        ("POST", "/v1/things/404", f"{THING} POST 4xx"),
        ("POST", "/v1/things/503", f"{THING} POST 5xx"),
        ("POST", "/v1/things/500", f"{THING} POST 5xx"),
        ("GET", "/v1/things/404", f"{THING} GET 4xx"),
        ("GET", "/status.json", "/status.json GET 2xx"),
        ("GET", "/wp-admin/setup.php", "none GET 4xx"),
        ("GET", "/v1/things/1/2", "none GET 4xx"),
        ("HACK", "/", "/ OTHER 4xx"),
    ],
)
def test_requests_are_counted_by_route_never_by_what_the_client_wrote(method, path, labels):
    client = client_of(ready_engine())
    client.request(method, path)
    counted = {k: v for k, v in scrape(client).items() if k.startswith("http_requests_total ")}
    assert counted == {f"http_requests_total {labels}": 1}


def test_any_number_of_paths_and_methods_is_a_few_series():
    client = client_of(ready_engine())
    num_series = []
    for _ in range(2):
        for number in range(50):
            client.request(
                f"M{number}", f"/{number}/x", headers={"X-Forwarded-Prefix": str(number)}
            )
        num_series.append(len(scrape(client)))
    # The first scrape adds series: its own count, and a histogram with 15 bounds.
    scraped_before = 1 + 1 + 15 + 1 + 2
    assert num_series[1] - num_series[0] == scraped_before - 1


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (400, "invalid"),
        (404, "not_found"),
        (413, "too_large"),
        (503, "unavailable"),
        (504, "timeout"),
    ],
)
def test_a_refused_request_is_counted_with_its_reason(status, reason):
    client = client_of(ready_engine())
    client.post(f"/v1/things/{status}")
    client.get(f"/v1/things/{status}")  # this is not a request to the model
    client.post(f"/{status}")  # nor is this one
    rejected = {k: v for k, v in scrape(client).items() if k.startswith("vllm:requests_rejected")}
    name = "vllm:requests_rejected_total "
    assert rejected.pop(name + reason) == 1
    assert set(rejected.values()) == {0}


def test_what_the_guard_refuses_is_counted_too():
    client = client_of(ready_engine(), keys=(KEY,))
    client.post("/v1/things/404")
    assert client.get("/metrics").status_code == 401
    samples = scrape(client, Authorization=f"Bearer {KEY}")
    assert samples["vllm:requests_rejected_total unauthorized"] == 1
    assert samples[f"http_requests_total {THING} POST 4xx"] == 1
    assert samples["http_requests_total /metrics GET 4xx"] == 1


def test_a_client_that_left_before_the_answer_is_counted_as_such():
    http = HttpMetrics(["/a"])
    http.begin()
    http.end("/a", "GET", 0, 1.0)
    samples = [s for family in http.metrics.collect() for s in family.samples]
    assert {s.labels["status"]: s.value for s in samples if s.name == "http_requests_total"} == {
        "none": 1
    }
    assert [s.value for s in samples if s.name == "http_requests_inprogress"] == [0]
