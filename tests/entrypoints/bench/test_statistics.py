import pytest

from vllm.entrypoints.bench.backends import RequestRecord
from vllm.entrypoints.bench.load import LoadRun
from vllm.entrypoints.bench.statistics import describe, parse_goodput, summarize
from vllm.errors import ConfigError


def record(start_s=0.0, output_s=(0.1, 0.2, 0.4), end_s=0.5, **changes):
    settings = {"num_prompt_tokens": 10, "num_output_tokens": len(output_s), **changes}
    return RequestRecord(start_s=start_s, output_s=list(output_s), end_s=end_s, **settings)


def summary(records, goodput=None):
    load = LoadRun(records=records, start_s=0.0, end_s=2.0, peak_running=3)
    metrics = ("ttft", "tpot", "itl", "e2el")
    return summarize(load, metrics=metrics, percentiles=(90, 99.9), goodput=goodput)


def test_latencies_of_one_request():
    result = summary([record()])
    assert result["mean_ttft_ms"] == 100
    assert result["mean_tpot_ms"] == 150
    assert (result["mean_itl_ms"], result["std_itl_ms"]) == (150, 50)
    assert (result["median_e2el_ms"], result["p99.9_e2el_ms"]) == (500, 500)


def test_rates_count_completed_requests_only():
    failed = record(error="HTTP 400: no", num_output_tokens=99)
    cut = record(is_cut=True, num_output_tokens=99)
    result = summary([record(), record(), failed, failed, cut])
    assert (result["completed"], result["failed"], result["interrupted"]) == (2, 2, 1)
    assert result["errors"] == {"HTTP 400: no": 2}
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (20, 6)
    assert result["request_throughput"] == 1
    assert result["output_throughput"] == 3
    assert result["total_token_throughput"] == 13
    assert result["max_concurrent_requests"] == 3


def test_tokens_are_those_of_usage_however_many_pieces_there_were():
    result = summary([record(num_output_tokens=7)])
    assert result["total_output_tokens"] == 7
    assert result["tokens_per_piece"] == pytest.approx(7 / 3, abs=1e-3)
    assert result["mean_tpot_ms"] == 50


def test_a_single_token_has_no_time_per_further_token():
    result = summary([record(output_s=(0.1,))])
    assert (result["mean_ttft_ms"], result["mean_tpot_ms"], result["mean_itl_ms"]) == (
        100,
        None,
        None,
    )


def test_nothing_completed_is_no_figure():
    result = summary([])
    assert (result["completed"], result["request_throughput"]) == (0, 0)
    assert (result["mean_ttft_ms"], result["p90_e2el_ms"]) == (None, None)


def test_percentiles_lie_between_values():
    figures = describe([4, 1, 3, 2], (0, 50, 90, 100))
    assert figures["p90"] == pytest.approx(3.7)
    assert (figures["p0"], figures["p50"], figures["p100"]) == (1, 2.5, 4)
    assert (figures["mean"], figures["median"]) == (2.5, 2.5)


@pytest.mark.parametrize(
    ("pairs", "good"),
    [
        (["ttft:100"], 3),
        (["ttft:99"], 1),
        (["tpot:149"], 1),
        (["tpot:200", "e2el:500"], 2),
        (["e2el:1"], 0),
    ],
)
def test_goodput_counts_requests_within_all_limits(pairs, good):
    records = [
        record(),
        record(end_s=0.6),
        record(output_s=(0.05,), end_s=0.5),
        record(output_s=(0.01,), error="x"),
    ]
    assert summary(records, parse_goodput(pairs))["request_goodput"] == good / 2


@pytest.mark.parametrize("pair", ["ttft", "ttft:x", "itl:5", "tpot:-1", "tpot:nan", ":1"])
def test_a_bad_limit_is_refused(pair):
    with pytest.raises(ConfigError, match="goodput must be like ttft:200"):
        parse_goodput([pair])
