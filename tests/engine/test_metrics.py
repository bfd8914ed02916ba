"""Test the counters of an engine, read from the page that Prometheus scrapes."""

import math

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.engine.fakes import make_config
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.metrics.engine_metrics import (
    NUM_RECENT,
    EngineMetrics,
    FinishedRequestStats,
    IterationStats,
    round_to_one_two_five,
)
from vllm.engine.metrics.history import HISTORY_S, RateHistory
from vllm.engine.metrics.reader import Counter, Gauge, Histogram, read_metrics
from vllm.engine.metrics.registry import expose, process_collectors
from vllm.engine.metrics.replica_metrics import sum_stats
from vllm.messages import MediaStats, RunnerStats, SchedulerStats, TransferStats

LABELS = {"model_name": "stdlib", "engine": "0"}
NOTHING = IterationStats(0, 0, [], [])
OPENMETRICS = "application/openmetrics-text; version=1.0.0,text/plain;q=0.5"

TYPES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:gpu_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:gpu_prefix_cache_queries": "counter",
    "vllm:gpu_prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:useful_tokens": "counter",
    "vllm:padded_tokens": "counter",
    "vllm:decode_kv_blocks": "counter",
    "vllm:padded_kv_blocks": "counter",
    "vllm:predicted_device_seconds": "counter",
    "vllm:predicted_padding_seconds": "counter",
    "vllm:forward_pass_batch": "histogram",
    "vllm:forward_pass_query_tokens": "histogram",
    "vllm:forward_pass_kv_blocks": "histogram",
    "vllm:bucket_hits": "counter",
    "vllm:bucket_misses": "counter",
    "vllm:compilations_after_warmup": "counter",
    "vllm:engine_restarts": "counter",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
}


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics("stdlib", make_config(max_model_len=100))


def scrape(metrics: EngineMetrics) -> dict[str, float]:
    """Return sample -> value; labels that not all samples have are part of the name."""
    text = expose(metrics.metric_sets())[0].decode()
    samples = {}
    for family in parse_text(text):
        for sample in family.samples:
            own = {k: v for k, v in sample.labels.items() if k not in LABELS}
            name = sample.name.removeprefix("vllm:")
            samples[name + "".join(f" {k}={v}" for k, v in own.items())] = sample.value
    return samples


def observations(metrics: EngineMetrics, name: str) -> tuple[float, float]:
    """Return the number of observations of a histogram, and their sum."""
    samples = scrape(metrics)
    return samples[f"{name}_count"], samples[f"{name}_sum"]


def finished(**changes) -> FinishedRequestStats:
    """Return a request that arrives at 100.0, starts at 100.5, and gets its first token at 101 and
    its last at 103.
    """
    request = {
        "finish_reason": "stop",
        "num_prompt_tokens": 10,
        "num_generation_tokens": 5,
        "n": 1,
        "max_tokens": 16,
        "arrival": 100.0,
        "first_scheduled": 100.5,
        "first_token": 101.0,
        "last_token": 103.0,
        "finished": 103.25,
    }
    return FinishedRequestStats(**request | changes)


@pytest.mark.parametrize(
    ("accept", "parse"),
    [("", parse_text), ("text/plain", parse_text), (OPENMETRICS, parse_openmetrics)],
)
def test_both_formats_have_every_metric_with_type_and_labels_before_anything_happened(
    metrics, accept, parse
):
    body, content_type = expose(metrics.metric_sets(), accept)
    families = {family.name: family for family in parse(body.decode())}
    assert {name: family.type for name, family in families.items()} == TYPES
    for family in families.values():
        assert family.documentation and family.samples
        assert all(sample.labels.items() >= LABELS.items() for sample in family.samples)
    assert content_type.startswith(accept.split(";")[0].split(",")[0] or "text/plain")


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text; version=x; escaping=y",
        "text/plain; version=1.0.x",
        "é;;,=",
        ",",
    ],
)
def test_nothing_of_the_accept_header_comes_back(metrics, accept):
    body, content_type = expose(metrics.metric_sets(), accept)
    known = {expose([], "")[1], expose([], OPENMETRICS)[1]}
    assert content_type in known
    assert b"vllm:prompt_tokens_total" in body


def test_one_step_of_many_requests_is_counted_once_each(metrics):
    stats = SchedulerStats(num_running=3, num_waiting=2, kv_cache_usage=0.25, num_kv_blocks=7)
    metrics.record_output(stats, IterationStats(30, 4, [0.03, 4.0], [0.005, 0.02, 0.02]))
    samples = scrape(metrics)
    assert samples["num_requests_running"] == 3
    assert samples["num_requests_waiting"] == 2
    assert samples["gpu_cache_usage_perc"] == 0.25
    assert samples["prompt_tokens_total"] == 30
    assert samples["generation_tokens_total"] == 4
    assert observations(metrics, "iteration_tokens_total") == (1, 34)
    assert observations(metrics, "time_to_first_token_seconds") == (2, pytest.approx(4.03))
    assert samples["time_to_first_token_seconds_bucket le=0.02"] == 0
    assert samples["time_to_first_token_seconds_bucket le=0.04"] == 1
    assert samples["time_to_first_token_seconds_bucket le=5.0"] == 2
    assert samples["time_per_output_token_seconds_bucket le=0.01"] == 1
    assert samples["time_per_output_token_seconds_bucket le=+Inf"] == 3


def test_a_bound_belongs_to_its_bucket(metrics):
    metrics.record_output(SchedulerStats(), IterationStats(0, 1, [], [0.025]))
    assert scrape(metrics)["time_per_output_token_seconds_bucket le=0.025"] == 1


def test_a_message_without_tokens_is_no_step(metrics):
    metrics.record_output(SchedulerStats(num_running=1), NOTHING)
    assert observations(metrics, "iteration_tokens_total") == (0, 0)
    assert scrape(metrics)["num_requests_running"] == 1


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("request_queue_time_seconds", 0.5),
        ("request_prefill_time_seconds", 0.5),
        ("request_decode_time_seconds", 2.0),
        ("request_inference_time_seconds", 2.5),
        ("e2e_request_latency_seconds", 3.25),
    ],
)
def test_the_times_of_a_request_are_between_its_events(metrics, name, seconds):
    metrics.record_finished(finished())
    assert observations(metrics, name) == (1, pytest.approx(seconds))


def test_a_request_that_never_ran_has_no_times_but_the_whole(metrics):
    never = dict.fromkeys(("first_scheduled", "first_token", "last_token"))
    metrics.record_finished(finished(finish_reason="abort", num_generation_tokens=0, **never))
    counts = {n: observations(metrics, f"request_{n}_time_seconds")[0] for n in ("queue", "decode")}
    assert counts == {"queue": 0, "decode": 0}
    assert observations(metrics, "e2e_request_latency_seconds") == (1, 3.25)
    assert scrape(metrics)["request_success_total finished_reason=abort"] == 1


def test_a_clock_that_was_set_back_gives_no_negative_time(metrics):
    metrics.record_finished(finished(first_scheduled=90.0, first_token=91.0, finished=95.0))
    assert observations(metrics, "request_queue_time_seconds") == (1, 0)
    assert observations(metrics, "e2e_request_latency_seconds") == (1, 0)


def test_parameters_are_observed_when_given(metrics):
    metrics.record_finished(
        finished(n=3, max_tokens=None, num_generation_tokens=12, max_num_generation_tokens=6)
    )
    assert observations(metrics, "request_params_n") == (1, 3)
    assert observations(metrics, "request_params_max_tokens") == (0, 0)
    assert observations(metrics, "request_generation_tokens") == (1, 12)
    assert observations(metrics, "request_max_num_generation_tokens") == (1, 6)


@pytest.mark.parametrize(
    ("most", "bounds"),
    [(1, [1]), (4, [1, 2]), (100, [1, 2, 5, 10, 20, 50, 100]), (128, [1, 2, 5, 10, 20, 50, 100])],
)
def test_sizes_have_the_bounds_1_2_5_up_to_the_longest_request(most, bounds):
    assert round_to_one_two_five(most) == bounds


def core_stats(steps: int, useful: int, hits: int = 0) -> SchedulerStats:
    runner = RunnerStats(num_steps=steps, num_useful_tokens=useful)
    transfer = TransferStats(num_hits=hits, num_saved_bytes=2 * useful)
    return SchedulerStats(num_prefix_hits=hits, runner=runner, transfer=transfer)


def test_counters_of_the_core_go_on_over_a_restart_nobody_told_of(metrics):
    seen = []
    for stats in (
        core_stats(5, 50),
        core_stats(6, 60, hits=8),
        core_stats(1, 70),
        core_stats(2, 75),
    ):
        metrics.record_output(stats, NOTHING)
        seen.append(scrape(metrics)["useful_tokens_total"])
    assert seen == [50, 60, 130, 135]
    assert scrape(metrics)["gpu_prefix_cache_hits_total"] == 8


def test_a_restart_that_is_told_of_needs_no_counter_to_fall(metrics):
    metrics.record_output(core_stats(1, 50), NOTHING)
    metrics.record_loss(is_restarted=True)
    samples = scrape(metrics)
    assert (samples["engine_restarts_total"], samples["useful_tokens_total"]) == (1, 50)
    metrics.record_output(core_stats(2, 60), NOTHING)
    assert scrape(metrics)["useful_tokens_total"] == 110
    assert metrics.totals.runner.num_steps == 3


def test_blocks_outside_of_the_cache_are_counted_over_restarts_and_replicas():
    transfer = {"kv_connector": "OffloadingConnector"}
    config = EngineArgs(kv_transfer_config=transfer).create_engine_config()
    metrics = EngineMetrics("stdlib", config)
    for stats in (core_stats(5, 50, hits=3), core_stats(1, 10, hits=4)):
        metrics.record_output(stats, NOTHING)
    samples = scrape(metrics)
    assert samples["external_prefix_cache_hits_total"] == 7
    assert samples["external_prefix_cache_queries_total"] == 0
    assert samples["kv_transfer_saved_bytes_total"] == 120
    both = sum_stats([core_stats(5, 50, hits=3), core_stats(1, 10, hits=4)])
    assert both.transfer == TransferStats(num_hits=7, num_saved_bytes=120)
    assert both.runner == RunnerStats(num_steps=6, num_useful_tokens=60)


def test_images_are_counted_over_restarts_and_replicas(metrics):
    first, second = (
        SchedulerStats(
            media=MediaStats(num_queries=queries, num_hits=hits),
            runner=RunnerStats(num_encoded_items=queries - hits, encode_seconds=seconds),
        )
        for queries, hits, seconds in ((5, 2, 0.75), (3, 1, 0.5))
    )
    for stats in (first, second):
        metrics.record_output(stats, NOTHING)
    together = MediaStats(num_queries=8, num_hits=3)
    assert metrics.totals.media == together == sum_stats([first, second]).media
    encoded = RunnerStats(num_encoded_items=5, encode_seconds=1.25)
    assert metrics.totals.runner == encoded == sum_stats([first, second]).runner


def test_only_the_last_requests_are_remembered(metrics):
    for number in range(NUM_RECENT + 5):
        metrics.record_finished(finished(request_id=str(number)))
    assert [r.request_id for r in metrics.recent] == [str(n) for n in range(5, NUM_RECENT + 5)]


def test_values_of_labels_cannot_break_the_page():
    metrics = EngineMetrics('a"} 1\nb\\', make_config())
    families = list(parse_text(expose(metrics.metric_sets())[0].decode()))
    names = {s.labels["model_name"] for family in families for s in family.samples}
    assert names == {'a"} 1\nb\\'}
    assert {family.name for family in families} == set(TYPES)


def test_the_process_is_told_of_too():
    names = {family.name for family in parse_text(expose(process_collectors())[0].decode())}
    assert {"process_cpu_seconds", "process_resident_memory_bytes", "python_info"} <= names


def test_tokens_are_counted_by_whole_seconds_and_idle_ones_are_zero():
    now = 1000.9
    history = RateHistory(clock=lambda: now)
    history.add(10, 1)
    now = 1001.0
    history.add(0, 2)
    history.add(5, 3)
    # The current second is not over, so it is not included.
    assert history.rates().generation[-1] == 1
    now = 1004.2
    assert history.rates().prompt[-5:] == [0, 10, 5, 0, 0]
    assert history.rates().generation[-5:] == [0, 1, 5, 0, 0]
    assert [len(rates) for rates in history.rates()] == [HISTORY_S, HISTORY_S]
    now += HISTORY_S
    assert sum(history.rates().generation) == 0


def test_a_histogram_adds_up(metrics):
    values = [math.exp(i / 7) / 1000 for i in range(100)]
    metrics.record_output(SchedulerStats(), IterationStats(0, 100, [], values))
    samples = scrape(metrics)
    prefix = "time_per_output_token_seconds"
    for bound in (0.01, 0.1, 1.0, 10.0):
        expected = sum(value <= bound for value in values)
        assert samples[f"{prefix}_bucket le={bound}"] == expected
    assert samples[f"{prefix}_sum"] == pytest.approx(sum(values))


def test_the_objects_of_get_metrics_are_the_numbers_of_the_page(metrics):
    metrics.record_output(SchedulerStats(num_running=3), IterationStats(5, 2, [0.5], [0.02]))
    page, found = scrape(metrics), read_metrics(metrics)
    assert {metric.name for metric in found} == set(TYPES)
    kinds = {"gauge": Gauge, "counter": Counter, "histogram": Histogram}
    assert all(type(metric) is kinds[TYPES[metric.name]] for metric in found)
    by_name = {metric.name: metric for metric in found}
    running, prompt = by_name["vllm:num_requests_running"], by_name["vllm:prompt_tokens"]
    assert (running.value, running.labels) == (3.0, LABELS)
    assert prompt.value == page["prompt_tokens_total"] == 5 and type(prompt.value) is int
    first = by_name["vllm:time_to_first_token_seconds"]
    assert (first.count, first.sum) == (1, 0.5)
    assert (first.buckets["0.25"], first.buckets["0.5"], first.buckets["+Inf"]) == (0, 1, 1)
    reasons = {m.labels["finished_reason"] for m in found if m.name == "vllm:request_success"}
    assert reasons == {"stop", "length", "abort", "error"}


def test_programs_find_these_objects_under_their_old_name():
    from vllm.v1.metrics import reader

    assert (reader.Gauge, reader.Counter, reader.Histogram) == (Gauge, Counter, Histogram)
    assert issubclass(reader.Vector, reader.Metric)
