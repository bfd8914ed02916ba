import asyncio
import itertools
import random
import statistics

import pytest

from vllm.entrypoints.bench.backends import BenchRequest
from vllm.entrypoints.bench.load import LoadRun, arrival_times, run_load

REQUESTS = [BenchRequest([1], 1)] * 20


def run(send, arrivals=None, requests=REQUESTS, **options):
    load = LoadRun()
    arrivals = [0.0] * len(requests) if arrivals is None else arrivals
    asyncio.run(run_load(load, send, requests, arrivals, **options))
    return load


async def quick(request, record):
    await asyncio.sleep(0.001)


# ---- arrivals -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (float("inf"), 0.0)]
)
def test_gaps_have_the_rate_and_the_variation_asked_for(burstiness, variation):
    times = arrival_times(20_000, 50.0, burstiness, random.Random(1))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = statistics.fmean(gaps)
    assert times[0] == 0
    assert min(gaps) >= 0
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert statistics.pstdev(gaps) / mean == pytest.approx(variation, abs=0.06)


def test_an_infinite_rate_is_all_at_once():
    assert arrival_times(3, float("inf"), 1.0, random.Random(0)) == [0.0] * 3


def test_arrivals_repeat_with_the_seed():
    first, again, other = (arrival_times(9, 5.0, 1.0, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other


# ---- sending ------------------------------------------------------------------------------


def test_all_at_once_is_all_in_flight():
    load = run(quick)
    assert (len(load.records), load.peak_running, load.num_running) == (20, 20, 0)
    assert not load.is_interrupted
    assert load.duration_s >= 0.001


@pytest.mark.parametrize("limit", [1, 3])
def test_a_closed_loop_keeps_to_its_concurrency(limit):
    running = []

    async def send(request, record):
        running.append(1)
        assert len(running) <= limit
        await asyncio.sleep(0.001)
        running.pop()

    load = run(send, max_concurrency=limit)
    assert (len(load.records), load.peak_running) == (20, limit)


def test_requests_wait_for_their_time():
    load = run(quick, arrivals=[0.0, 0.05, 0.1], requests=REQUESTS[:3])
    starts = [record.start_s - load.start_s for record in load.records]
    assert starts[1] >= 0.05
    assert starts[2] >= 0.1
    due = [load.start_s + arrival_s for arrival_s in (0.0, 0.05, 0.1)]
    lags = [record.start_s - due_s for record, due_s in zip(load.records, due, strict=True)]
    assert [record.lag_s for record in load.records] == pytest.approx(lags)
    assert min(lags) >= 0


def test_stopping_cuts_what_is_in_flight_and_sends_no_more():
    async def send(request, record):
        if len(load.records) == 5:
            stop.set()
        await asyncio.sleep(0 if len(load.records) < 3 else 60)

    async def main():
        arrivals = [*(0.01 * i for i in range(5)), *[3600.0] * 15]
        await run_load(load, send, REQUESTS, arrivals, stop=stop, on_done=done.append)

    load, done, stop = LoadRun(), [], asyncio.Event()
    asyncio.run(main())
    assert load.is_interrupted
    assert [record.is_cut for record in load.records] == [False, False, True, True, True]
    assert len(done) == 5
    assert load.num_running == 0


def test_a_bug_in_the_sender_is_not_a_failed_request():
    async def send(request, record):
        raise KeyError("bug")

    with pytest.raises(KeyError, match="bug"):
        run(send)
