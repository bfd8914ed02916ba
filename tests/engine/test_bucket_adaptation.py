"""Test when the buckets of a server are replaced, hour by hour, with a simulated clock."""

import asyncio

import pytest

from tests.engine.test_traffic_metrics import make_metrics, report
from tests.hpu import captured_log
from vllm.bucketing.bucket import decode
from vllm.engine.metrics.bucket_adaptation import TRIAL_S, BucketAdaptation, padded_seconds
from vllm.engine.metrics.engine_metrics import EngineMetrics
from vllm.errors import EngineDeadError
from vllm.messages import WarmUpStats

POOR = (1, 3, 1, 20, 16, 1, 2000, 0)
GOOD = (1, 3, 1, 20, 3, 1, 20, 0)
OTHER = (1, 6, 1, 40, 8, 1, 2000, 0)


class Server:
    """A server whose traffic and time the test sets.

    Attributes:
        asked: buckets that the server was asked to use instead of its present ones.
        answer: answer to this request, or its error.
    """

    def __init__(self) -> None:
        self.now, self.number = 0.0, 0
        self.asked: list[list[tuple[int, ...]]] = []
        self.answer: bool | Exception = True
        self.metrics: EngineMetrics = make_metrics()
        self.adaptation = BucketAdaptation(
            self.metrics, self.metrics.config, self.replace, clock=lambda: self.now
        )

    async def replace(self, buckets) -> bool:
        self.asked.append(list(buckets))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def serve(self, launch, count: int = 10_000, warm_up: WarmUpStats | None = None) -> None:
        for _ in range(count):
            self.number += 1
            report(self.metrics, self.number, *launch, warm_up=warm_up)

    def look(self, hours: float = 0.0) -> None:
        self.now += TRIAL_S * hours
        asyncio.run(self.adaptation.look())


@pytest.fixture
def server() -> Server:
    server = Server()
    server.serve(POOR, 1)
    server.look()  # what ran before the first look does not count
    return server


def test_buckets_that_save_enough_for_an_hour_replace_the_present_ones(server) -> None:
    server.serve(POOR)
    server.look()  # chooses new buckets
    server.serve(POOR)
    server.look(0.9)
    assert not server.asked, "it has been less than an hour"
    with captured_log() as log:
        server.look(0.2)
    [buckets] = server.asked
    assert (1, 3, 1, 20) in buckets
    [line] = log
    assert line == (
        f"buckets: a new set of {len(buckets)} buckets would have saved 22.9 % of the device time "
        "of the last 66 minutes. It is warmed up between steps and then replaces the current set"
    )


@pytest.mark.parametrize(
    ("before", "during", "count"),
    [(GOOD, GOOD, 10_000), (POOR, POOR, 9_999), (POOR, GOOD, 10_000)],
    ids=["no gain", "little traffic", "the engine pads less now"],
)
def test_other_buckets_stay_where_they_are(server, before, during, count) -> None:
    server.serve(before)
    server.look()
    server.serve(during, count)
    server.look(1.0)
    assert not server.asked


def test_the_next_buckets_are_chosen_for_the_traffic_of_the_last_trial(server) -> None:
    server.serve(GOOD)
    server.look()
    server.serve(OTHER)
    server.look(1.0)
    # Even the largest of the first buckets pads less than the buckets for OTHER.
    server.asked.clear()
    server.look()  # chooses buckets for the hour that has passed
    server.serve(OTHER)
    server.look(1.0)
    [buckets] = server.asked
    assert (1, 6, 1, 40) in buckets


def test_padding_while_buckets_are_warmed_up_is_no_reason(server) -> None:
    warming = WarmUpStats(is_warming=True, num_warm=3, num_wanted=5)
    server.serve(POOR)
    server.look()
    server.serve(POOR, warm_up=warming)
    server.look(1.0)
    # All buckets are warm; only the shapes of sampling remain.
    warm = WarmUpStats(is_warming=True, num_warm=5, num_wanted=5)
    server.serve(GOOD, 1, warm)
    server.look()
    server.look(1.0)
    assert not server.asked
    server.serve(POOR, warm_up=warm)
    server.look()
    server.serve(POOR, warm_up=warm)
    server.look(1.0)
    assert len(server.asked) == 1


@pytest.mark.parametrize("answer", [False, EngineDeadError("it has ended")])
def test_nothing_is_said_where_the_engine_does_not_begin(server, answer) -> None:
    server.answer = answer
    server.serve(POOR)
    server.look()
    server.serve(POOR)
    with captured_log() as log:
        server.look(1.0)
    assert len(server.asked) == 1 and not log


def test_what_fits_into_no_bucket_is_padded_as_it_is_now() -> None:
    metrics = make_metrics()
    report(metrics, 1, *GOOD)
    needed_s, _ = metrics.device_seconds
    found = padded_seconds([decode(2, 30)], metrics.traffic_table, 1.25)
    assert found == pytest.approx(1.25 * needed_s)
