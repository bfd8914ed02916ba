"""Test the sizes of forward passes in metrics, in a table and in a file: each is counted once."""

import json
import logging
import os
from pathlib import Path

import msgspec
import pytest

from tests.engine.fakes import make_config
from tests.engine.test_metrics import NOTHING, scrape
from tests.full_disk import full_disk
from tests.hpu import captured_log
from vllm.bucketing.bucket import decode, prefill
from vllm.bucketing.traffic import TrafficTable
from vllm.cost_model.padded import forward_seconds
from vllm.cost_model.run_times import RunEngine, parse_run_times
from vllm.cost_model.throughput import ModelFigures
from vllm.engine.metrics import traffic_metrics
from vllm.engine.metrics.engine_metrics import EngineMetrics
from vllm.engine.metrics.replica_metrics import ReplicaMetrics, sum_stats
from vllm.engine.metrics.traffic_metrics import BucketAdvice, TrafficFile
from vllm.errors import ConfigError
from vllm.messages import RunnerStats, SchedulerStats, WarmUpStats

PREFILL = (0, 1, 100, 0, 1, 128, 0, 3000)
DECODE = (1, 3, 1, 20, 4, 1, 32, 1000)


def make_metrics() -> EngineMetrics:
    return EngineMetrics("stdlib", make_config(max_model_len=100))


def report(metrics: EngineMetrics, *recent: int, warm_up: WarmUpStats | None = None) -> None:
    """Send a message of the core to the metrics."""
    stats = SchedulerStats(
        num_kv_blocks=4000,
        runner=RunnerStats(recent_launches=recent),
        warm_up=warm_up or WarmUpStats(),
    )
    metrics.record_output(stats, NOTHING)


def test_each_forward_pass_counts_once_also_after_a_restart() -> None:
    metrics = make_metrics()
    report(metrics)
    report(metrics, 1, *PREFILL)
    report(metrics, 1, *PREFILL)
    report(metrics, 2, *PREFILL, *DECODE)
    # The total says that one more forward pass ran, which nobody has reported.
    report(metrics, 5, *DECODE, *DECODE)
    report(metrics, 1, *PREFILL)  # a new process counts from the beginning
    assert [cell[:2] for cell in metrics.traffic_table] == [
        (prefill(1, 100), 2),
        (decode(3, 20), 3),
    ]
    assert metrics.traffic_table.num_forgotten == 1
    samples = scrape(metrics)
    assert samples["forward_pass_batch_sum phase=decode"] == 9
    assert samples["forward_pass_query_tokens_count phase=prefill"] == 2
    assert samples["forward_pass_kv_blocks_bucket le=16.0 phase=decode"] == 0
    assert samples["forward_pass_kv_blocks_bucket le=32.0 phase=decode"] == 3


def test_padding_has_its_share_of_the_device_time() -> None:
    metrics = make_metrics()
    assert metrics.traffic.padding is None
    report(metrics, 1, *DECODE)
    size = metrics.config.cache.block_size
    needed, padded = (forward_seconds(1, *s, size) for s in ((3, 1, 20), (4, 1, 32)))
    assert metrics.traffic.padding == pytest.approx(1 - needed / padded)
    samples = scrape(metrics)
    assert samples["predicted_device_seconds_total"] == pytest.approx(padded)
    assert samples["predicted_padding_seconds_total"] == pytest.approx(padded - needed)


def test_replicas_have_one_table_and_one_device_time() -> None:
    replicas = [make_metrics(), make_metrics()]
    for metrics in replicas:
        report(metrics, 2, *PREFILL, *DECODE)
    both = ReplicaMetrics(replicas)
    assert both.traffic_table.num_launches == 4
    assert both.device_seconds[1] == 2 * replicas[0].device_seconds[1]
    assert replicas[0].traffic_table.num_launches == 2
    sum_stats([replica.stats for replica in replicas])


def test_a_file_is_written_at_most_once_a_minute_and_continued(tmp_path: Path) -> None:
    path, now = tmp_path / "traffic.json", [0.0]
    for run in (1, 2):
        metrics = make_metrics()
        file = TrafficFile(path, metrics, clock=lambda: now[0])
        report(metrics, 1, *DECODE)
        file.write_if_due()
        assert path.exists() == (run > 1)
        now[0] += 61
        file.write()
        assert TrafficTable.load(path).num_launches == run
    written = path.stat().st_mtime_ns
    file.write()
    assert path.stat().st_mtime_ns == written, "nothing is new"


def test_a_full_disk_is_one_warning_and_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path, metrics = tmp_path / "traffic.json", make_metrics()
    file = TrafficFile(path, metrics)
    report(metrics, 1, *DECODE)
    file.write()
    with full_disk(), captured_log(logging.WARNING) as log:
        for number in (2, 3):
            report(metrics, number, *DECODE)
            file.write()
    [line] = log
    assert "File too large; the server continues" in line
    assert TrafficTable.load(path).num_launches == 1
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    file.write()
    assert TrafficTable.load(path).num_launches == 3


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    metrics = make_metrics()
    file = TrafficFile(tmp_path / "missing" / "traffic.json", metrics)
    with captured_log(logging.WARNING) as log:
        for number in (1, 2):
            report(metrics, number, *DECODE)
            file.write()
    [line] = log
    assert "the server continues" in line
    os.mkdir(tmp_path / "missing")
    with captured_log() as log:
        file.write()  # writes what it could not write before, although nothing is new
    [line] = log
    assert line.endswith("traffic.json again")
    path = tmp_path / "missing" / "traffic.json"
    assert TrafficTable.load(path).num_launches == 2
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_thread_that_is_late_overwrites_nothing_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, late, now = make_metrics(), [], 0.0
    monkeypatch.setattr(
        traffic_metrics, "start_in_time_slices", lambda write, name: late.append(write)
    )
    path = tmp_path / "traffic.json"
    file = TrafficFile(path, metrics, clock=lambda: now)
    report(metrics, 1, *DECODE)
    now = traffic_metrics.WRITE_INTERVAL_S
    file.write_if_due()
    report(metrics, 2, *DECODE)
    file.write()
    [write] = late
    write()
    assert TrafficTable.load(path).num_launches == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "cut off"), (None, "recorded with blocks of 7 tokens, but this engine has blocks of")],
)
def test_a_file_of_something_else_is_not_overwritten(
    tmp_path: Path, content: str | None, words: str
) -> None:
    path = tmp_path / "traffic.json"
    if content is None:
        other = TrafficTable(7)
        other.add(*DECODE[:4])
        other.save(path)
    else:
        path.write_text(content)
    before = path.read_text()
    with pytest.raises(ConfigError, match=words):
        TrafficFile(path, make_metrics())
    assert path.read_text() == before


def test_a_file_has_the_seconds_of_its_engine_by_bucket(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    figures = ModelFigures(
        dense_params=1e6,
        vocab_size=512,
        hidden_size=64,
        num_layers=2,
        attention=(),
        weight_bytes=2,
        kv_bytes=2,
        is_fp8=False,
    )
    for card, (count, seconds) in (
        ("gaudi2", (2, 0.002)),
        ("gaudi2", (4, 0.004)),  # the same device and engine again
        ("gaudi3", (2, 0.002)),  # another device
    ):
        metrics = make_metrics()
        file = TrafficFile(path, metrics)
        engine = RunEngine(
            card=card, is_simulated=True, num_cards=1, block_size=16, figures=figures
        )
        file.note_engine(msgspec.to_builtins(engine))
        unknown = (*DECODE[:-1], 0)
        report(metrics, 4, *DECODE, *DECODE, *unknown, *PREFILL)
        file.write()
        found = parse_run_times(json.loads(path.read_text()), "it")
        assert found is not None and found.engine == engine
        assert found.times[1, 4, 1, 32] == (count, pytest.approx(seconds))
        assert found.times[0, 1, 128, 0] == (count / 2, pytest.approx(0.003 * count / 2))
    assert TrafficTable.load(path).num_launches == 12


def test_poor_buckets_are_said_at_most_once_a_day() -> None:
    metrics, now = make_metrics(), [0.0]
    advice = BucketAdvice(metrics, metrics.config, clock=lambda: now[0])
    report(metrics, 1, *DECODE)
    assert not advice.is_due(), "one forward pass is no traffic"
    poor = (1, 3, 1, 20, 16, 1, 2000, 0)
    for number in range(2, 10_002):
        report(metrics, number, *poor)
    assert advice.is_due()
    now[0] += 80_000
    assert not advice.is_due()
    now[0] += 10_000
    assert advice.is_due()
    with captured_log() as log:
        advice.advise()
    [line] = log
    assert line.startswith(
        "buckets: 22.9 % of the device time is spent on padding; a set of 3 buckets chosen for "
        "this traffic would spend 0.0 %"
    )


def test_padding_during_the_warm_up_is_no_reason_to_choose_other_buckets() -> None:
    metrics, warming = make_metrics(), WarmUpStats(is_warming=True, num_warm=16, num_wanted=33)
    advice = BucketAdvice(metrics, metrics.config)
    poor = (1, 3, 1, 20, 16, 1, 2000, 0)
    for number in range(1, 10_002):
        report(metrics, number, *poor, warm_up=warming)
    assert not advice.is_due()
    warm = WarmUpStats(num_warm=33, num_wanted=33)
    report(metrics, 10_002, *poor, warm_up=warm)  # what has run since the last look
    assert not advice.is_due()
    report(metrics, 10_003, 1, 3, 1, 20, 3, 1, 20, 0, warm_up=warm)
    assert not advice.is_due()
    report(metrics, 10_004, *poor, warm_up=warm)
    assert advice.is_due()


def test_buckets_that_fit_their_traffic_are_not_spoken_of() -> None:
    metrics = make_metrics()
    for number in range(1, 10_002):
        report(metrics, number, 1, 3, 1, 20, 3, 1, 20, 0)
    advice = BucketAdvice(metrics, metrics.config)
    assert not advice.is_due()
    with captured_log() as log:
        advice.advise()
    assert not log
