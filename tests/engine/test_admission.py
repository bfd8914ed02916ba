"""Test which requests may wait, the progress of a start, and the stream of a request, without an
engine.
"""

import asyncio

import pytest

from vllm.engine.process.admission import Admission, AdmissionLimits
from vllm.engine.process.startup_state import StartupState
from vllm.engine.requests_in_flight import RequestStream
from vllm.errors import CapacityError, ConfigError


def test_without_limits_everything_may_come():
    admission = Admission(AdmissionLimits(), max_num_seqs=1)
    for index in range(1000):
        admission.check(1, 10**6)
        admission.add(str(index), 10**6)
    assert admission.num_waiting == 1000


def test_a_full_batch_does_not_count_as_waiting():
    admission = Admission(AdmissionLimits(max_queued_requests=1), max_num_seqs=2)
    for name in "abc":
        admission.check(1, 5)
        admission.add(name, 5)
    with pytest.raises(CapacityError, match="max_queued_requests"):
        admission.check(1, 5)
    admission.begin(["a", "b", "unknown"])
    with pytest.raises(CapacityError):
        admission.check(1, 5)
    admission.end(["a", "unknown"])
    admission.check(1, 5)
    with pytest.raises(CapacityError):
        admission.check(2, 5)


def test_waiting_tokens_are_those_that_have_not_begun():
    admission = Admission(AdmissionLimits(max_queued_tokens=10), max_num_seqs=8)
    admission.check(1, 100)  # accepted since nothing waits: otherwise such a prompt could never run
    admission.add("large", 100)
    with pytest.raises(CapacityError, match="100 prompt tokens are waiting"):
        admission.check(1, 1)
    admission.begin(["large"])
    admission.add("a", 6)
    admission.check(1, 4)
    with pytest.raises(CapacityError):
        admission.check(1, 5)
    admission.end(["a", "large"])
    admission.add("b", 10)
    admission.clear()
    admission.check(1, 10)
    assert admission.num_waiting == 0


def test_a_start_tells_the_time_that_is_left_of_all_of_it():
    startup = StartupState()
    startup.report("loading weights", 3, 8)
    # The estimate covers one phase only, and nobody knows how long the other phases take.
    assert startup.eta_seconds is None
    startup.report("warm-up", 2, 8, 18.04)
    assert startup.eta_seconds == 18.0
    startup.set_ready()
    assert startup.is_ready and startup.eta_seconds is None


def test_those_who_wait_go_on_or_get_the_error():
    async def main():
        startup = StartupState()
        waiter = asyncio.create_task(startup.wait())
        await asyncio.sleep(0)
        assert not waiter.done()
        startup.set_ready()
        await waiter
        startup.set_unready("restarting")
        waiter = asyncio.create_task(startup.wait())
        startup.set_failed(ConfigError("wrong"))
        with pytest.raises(ConfigError, match="wrong"):
            await waiter
        assert startup.phase == "failed"

    asyncio.run(main())


def test_a_stream_gives_everything_before_its_error():
    async def main():
        stream = RequestStream()
        stream.put(1, is_last=False)
        stream.put(2, is_last=False)
        stream.fail(ConfigError("end"))
        assert [await stream.get(), await stream.get()] == [1, 2]
        for _ in range(2):
            with pytest.raises(ConfigError):
                await stream.get()
        assert stream.is_finished

    asyncio.run(main())


def test_a_cancelled_consumer_can_come_back():
    async def main():
        stream = RequestStream()
        task = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream.put("late", is_last=True)
        assert await stream.get() == "late"

    asyncio.run(main())
