"""Test processes that decode media: results, errors, and the files that a killed process leaves."""

import asyncio
import os
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from PIL import Image

from tests.multimodal.test_image import PICTURE, PIXELS, save
from tests.reach import num_busy_of, set_time_limit
from tests.shared_memory import assert_no_new_files, named_files
from tests.utils.test_deadline_worker import ends_within
from vllm.errors import ConfigError, RequestError
from vllm.multimodal import pool
from vllm.multimodal.interface.source import MediaSource
from vllm.multimodal.pool import MediaWorkers
from vllm.utils.process.deadline_worker import WorkerError

JOB = "tests.multimodal.media_jobs:decode"


def make_workers(job=JOB, *, num_workers=1, timeout_s=120.0, memory_limit_bytes=2**30, **settings):
    return MediaWorkers(
        job,
        {"brightness": 1, **settings},
        num_workers=num_workers,
        memory_limit_bytes=memory_limit_bytes,
        timeout_s=timeout_s,
    )


@pytest.fixture(scope="module")
def workers():
    before = named_files()
    workers = make_workers()
    yield workers
    workers.close()
    assert_no_new_files(before)


@pytest.fixture(scope="module")
def tight_workers():
    workers = make_workers(memory_limit_bytes=2**23, max_pixels=10**7)
    yield workers
    workers.close()


def source(content, **fields):
    kind = "data" if isinstance(content, bytes) else "pixels"
    return MediaSource(modality="image", where="m[1]", **{kind: content}, **fields)


def pid_of(result):
    return int(result.tensors["pid"][0])


def num_open_files():
    return len(os.listdir("/proc/self/fd"))


def test_a_file_becomes_tensors(workers):
    result = asyncio.run(workers.run(source(save(PICTURE, "PNG"), uuid="u", detail="low")))
    np.testing.assert_array_equal(result.tensors["pixels"], PIXELS + 1)
    assert result.tensors["grid"].tolist() == [[1, *PIXELS.shape[:2]]]
    assert result.tensors["grid"].dtype == np.int64
    assert result.tensors["scale"] == np.float32(0.5)
    assert (result.tensors["none"].shape, result.tensors["none"].dtype) == ((0, 3), np.float16)
    assert result.tensors["told"].tobytes() == b"u low"
    assert result.grid == PIXELS.shape[:2]
    assert pid_of(result) != os.getpid()
    assert result.tensors["pixels"].flags.writeable


@pytest.mark.parametrize("needs_torch", [False, True])
def test_torch_is_only_imported_for_a_processor_that_needs_it(needs_torch):
    workers = MediaWorkers(
        "tests.multimodal.media_jobs:tell_torch",
        {"needs_torch": needs_torch},
        num_workers=1,
        memory_limit_bytes=2**33,
        timeout_s=120.0,
    )
    try:
        assert workers.run_sync(source(PIXELS)).tensors["has_torch"][0] == needs_torch
    finally:
        workers.close()


def test_pixels_are_given_as_they_are(workers):
    for pixels in (PIXELS, PIXELS[:, ::-1]):
        result = workers.run_sync(source(pixels))
        np.testing.assert_array_equal(result.tensors["pixels"], pixels + 1)


def test_megabytes_come_back_and_no_file_stays_open(workers):
    workers.run_sync(source(b"large"))
    before = num_open_files()
    for _ in range(3):
        result = workers.run_sync(source(b"large"))
    np.testing.assert_array_equal(
        result.tensors["pixels"], np.arange(2**20, dtype=np.int32).reshape(2, -1)
    )
    assert num_open_files() <= before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"told", "m[1]: it is wrong"),
        (b"value", "m[1]: a processor does not take it"),
        (b"raise", "m[1]: it cannot be processed: 'a bug'"),
        (b"memory", "m[1]: there is not enough memory to process it. Send a smaller one"),
        (np.zeros((1, 201, 3), np.uint8), "m[1]: it has 201 x 1 pixels: one edge is more than"),
        (b"%PDF-", "m[1]: it is a file of the format PDF; accepted are"),
    ],
)
def test_an_item_that_is_refused_leaves_the_process_alive(workers, content, message):
    pid = pid_of(workers.run_sync(source(PIXELS)))
    with pytest.raises(RequestError) as error:
        workers.run_sync(source(content))
    assert str(error.value).startswith(message)
    assert error.value.param == "m[1]"
    assert pid_of(workers.run_sync(source(PIXELS))) == pid


@pytest.mark.parametrize("content", [b"exit", b"kill"])
def test_a_process_that_ends_costs_one_item(workers, content):
    pid = pid_of(workers.run_sync(source(PIXELS)))
    with pytest.raises(RequestError, match=r"m\[1\]: the process that decodes it has exited"):
        workers.run_sync(source(content))
    assert pid_of(workers.run_sync(source(PIXELS))) != pid


def test_an_item_that_takes_too_long_costs_its_process_and_not_the_next_item():
    before = named_files()
    workers = make_workers(timeout_s=0.3)
    workers.start()
    with pytest.raises(RequestError, match=r"m\[1\]: it was not processed within 0\.3 s"):
        workers.run_sync(source(b"sleep"))
    set_time_limit(workers, 120.0)
    pid = pid_of(workers.run_sync(source(PIXELS)))
    workers.close()
    assert ends_within(pid, 50)
    assert_no_new_files(before)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF"])
def test_an_image_that_needs_too_much_memory_is_refused(tight_workers, format):
    data = save(Image.new("L", (3000, 3000)), format)
    with pytest.raises(RequestError, match=r"m\[1\]: there is not enough memory to decode it"):
        tight_workers.run_sync(source(data))
    assert tight_workers.run_sync(source(PIXELS)).grid == PIXELS.shape[:2]


def test_items_are_processed_at_the_same_time_and_closing_ends_those_at_work():
    workers = make_workers(num_workers=2)
    workers.start()

    async def run():
        sleeping = asyncio.ensure_future(workers.run(source(b"sleep")))
        while num_busy_of(workers) == 0:
            await asyncio.sleep(0.001)
        results = [await workers.run(source(PIXELS)) for _ in range(3)]
        waiting = asyncio.ensure_future(workers.run(source(b"sleep")))
        await asyncio.sleep(0)
        workers.close()
        return results, await asyncio.gather(sleeping, waiting, return_exceptions=True)

    results, ended = asyncio.run(run())
    workers.close()  # closing twice does no harm
    assert len({pid_of(result) for result in results}) == 1
    assert all(isinstance(error, (RequestError, asyncio.CancelledError)) for error in ended)
    assert ends_within(pid_of(results[0]), 50)


class DescribingWorker:
    """A process that writes 64 bytes, and describes them as the test says."""

    pid = None

    def __init__(self, tensors):
        self.tensors = tensors

    def call(self, argument, timeout_s, files):
        os.write(files[1], bytes(64))
        return msgspec.msgpack.encode({"tensors": self.tensors})

    def close(self):
        """Do nothing: there is no process."""


@pytest.mark.parametrize(
    ("dtype", "shape", "offset", "num_tensors"),
    [
        ("|u1", (65,), 0, 1),  # beyond the end of the file
        ("|u1", (1,), 64, 1),
        ("|u1", (2**40,), 0, 1),
        ("<f4", (2, 9), 0, 1),
        ("|u1", (-1,), 0, 1),
        ("|u1", (-4, -4), 0, 1),
        ("|u1", (4,), -4, 1),
        ("|O", (1,), 0, 1),
        ("|S4", (1,), 0, 1),
        ("nonsense", (1,), 0, 1),
        ("|u1", (64,), 0, 3),  # all arrays together exceed the limit
    ],
)
def test_a_description_that_does_not_fit_its_file_is_refused(
    dtype, shape, offset, num_tensors, monkeypatch
):
    tensors = [
        {"name": str(i), "dtype": dtype, "shape": shape, "offset": offset}
        for i in range(num_tensors)
    ]
    monkeypatch.setattr(pool, "DeadlineWorker", lambda server, **_: DescribingWorker(tensors))
    workers = make_workers(memory_limit_bytes=128)
    with pytest.raises(RequestError, match="the process that decodes it has exited"):
        workers.run_sync(source(PIXELS))
    tensors[:] = [{"name": "fits", "dtype": "<f4", "shape": (2, 8), "offset": 0}]
    assert workers.run_sync(source(PIXELS)).tensors["fits"].shape == (2, 8)
    workers.close()


def test_a_job_that_cannot_start_is_told():
    workers = make_workers("tests.multimodal.media_jobs:broken")
    with pytest.raises(ConfigError, match=r"cannot start: cannot start with \{'brightness': 1\}"):
        workers.start()
    workers.close()


def test_a_start_that_is_closed_is_no_error(monkeypatch):
    def fail() -> None:
        raise WorkerError("killed by signal 9")

    server = SimpleNamespace(start=fail, close=lambda: None)
    monkeypatch.setattr(pool, "make_server", lambda target, setup: server)
    workers = make_workers()
    with pytest.raises(ConfigError, match="cannot start: killed"):
        workers.start()
    workers.close()
    workers.start()
