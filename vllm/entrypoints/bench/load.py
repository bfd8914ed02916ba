"""Send requests at their planned times, and show the progress.

Independent of HTTP and of the content of requests.
"""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.entrypoints.bench.backends import BenchRequest, RequestRecord


def arrival_times(
    count: int, request_rate: float, burstiness: float, rng: random.Random
) -> list[float]:
    """Return the times at which to send requests, in ascending seconds from 0.

    Gaps have a gamma distribution with mean 1 / `request_rate` and coefficient of variation 1 /
    sqrt(`burstiness`): 1 is a Poisson process, a smaller value gives bursts, a larger one more even
    gaps.

    Args:
        count: number of requests.
        request_rate: requests per second; infinity: all at once.
        burstiness: above 0; infinity: all gaps are equal.
    """
    if math.isinf(request_rate):
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        if math.isinf(burstiness):
            now += 1 / request_rate
        else:
            now += rng.gammavariate(burstiness, 1 / (request_rate * burstiness))
    return times


Send = Callable[[BenchRequest, RequestRecord], Awaitable[None]]
"""Sends one request and fills its record; raises only CancelledError."""


@dataclass
class LoadRun:
    """State and result of a load run."""

    records: list[RequestRecord] = field(default_factory=list)
    """One per request that was sent, in the order of sending."""
    num_running: int = 0
    peak_running: int = 0
    """Largest number of requests in flight at a time."""
    start_s: float = 0.0
    end_s: float = 0.0
    is_interrupted: bool = False

    @property
    def duration_s(self) -> float:
        """Seconds from the first request to the end of the last response."""
        return self.end_s - self.start_s

    @property
    def num_pieces(self) -> int:
        """Number of output pieces received so far."""
        return sum(len(record.output_s) for record in self.records)


async def run_load(
    run: LoadRun,
    send: Send,
    requests: Sequence[BenchRequest],
    arrivals: Sequence[float],
    *,
    max_concurrency: int | None = None,
    stop: asyncio.Event | None = None,
    on_done: Callable[[RequestRecord], None] | None = None,
) -> None:
    """Send every request at its time, and wait for all of them.

    Args:
        run: empty run, in which everything is recorded.
        send: sends one request.
        requests: requests to send.
        arrivals: time of each request, in ascending seconds after the start.
        max_concurrency: maximum number of requests in flight; further ones wait, even if they are
            due.
        stop: when set, no more requests are sent and running ones are cancelled.
        on_done: called when a request has ended.
    """
    stop = stop or asyncio.Event()
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    tasks: set[asyncio.Task[None]] = set()
    run.start_s = time.perf_counter()

    async def one(request: BenchRequest, due_s: float) -> None:
        now = time.perf_counter()
        record = RequestRecord(start_s=now, lag_s=now - due_s)
        run.records.append(record)
        run.num_running += 1
        run.peak_running = max(run.peak_running, run.num_running)
        try:
            await send(request, record)
        except asyncio.CancelledError:
            record.is_cut = True
        finally:
            record.end_s = time.perf_counter()
            run.num_running -= 1
            if slots is not None:
                slots.release()
            if on_done is not None:
                on_done(record)

    async def send_all() -> None:
        for request, arrival_s in zip(requests, arrivals, strict=True):
            due_s = run.start_s + arrival_s
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            if slots is not None:
                await slots.acquire()
            task = asyncio.create_task(one(request, due_s))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    sending = asyncio.create_task(send_all())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
        run.is_interrupted = not sending.done()
    finally:
        sending.cancel()
        stopping.cancel()
        # A task that is cancelled before it starts has no record, because its request was not sent.
        for task in list(tasks):
            task.cancel()
        ended = await asyncio.gather(sending, stopping, *tasks, return_exceptions=True)
        run.end_s = max((r.end_s for r in run.records), default=time.perf_counter())
    for result in ended:
        if isinstance(result, Exception):  # a bug of this program and not a failed request
            raise result


_INTERVAL_S = 0.5


class LoadProgress:
    """Shows the progress of a load on stderr. Enter it inside an event loop.

    Tokens per second are pieces per second: most servers send one token per piece, and the true
    count comes at the end of each stream.
    """

    def __init__(self, run: LoadRun, total: int, *, is_shown: bool) -> None:
        self._run = run
        self._total = total
        self._is_shown = is_shown
        self._bar: Any = None
        self._task: asyncio.Task[None] | None = None
        self._num_failed = 0

    def __enter__(self) -> "LoadProgress":
        if self._is_shown:
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit="req", dynamic_ncols=True)
            self._task = asyncio.get_running_loop().create_task(self._show_speed())
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._bar is not None:
            self._bar.close()

    def update(self, record: RequestRecord) -> None:
        """Count one more finished request."""
        self._num_failed += record.error is not None
        if self._bar is not None:
            self._bar.update(1)

    async def _show_speed(self) -> None:
        last_s, last_pieces = time.perf_counter(), 0
        while True:
            await asyncio.sleep(_INTERVAL_S)
            now_s, pieces = time.perf_counter(), self._run.num_pieces
            speed = (pieces - last_pieces) / (now_s - last_s)
            last_s, last_pieces = now_s, pieces
            failed = f", {self._num_failed} failed" if self._num_failed else ""
            self._bar.set_postfix_str(f"{speed:,.0f} tok/s, {self._run.num_running} open{failed}")
