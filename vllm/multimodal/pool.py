"""Killable processes that decode media of clients and prepare them for the model.

The decoder of a damaged file may run for ever, take all memory or crash. Then only the request with
this file fails: the process is killed and a new one is forked.

    parent                                                child
    MediaSource -> file in memory            ->           job(source)
    EncoderInput <- file in memory           <-           tensors, one after the other

Both files belong to the parent and have no name, so nothing is left when a process is killed. Only
their description is sent through the connection.
"""

import asyncio
import importlib
import math
import os
import queue
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm.errors import ConfigError, RequestError
from vllm.logger import init_logger
from vllm.multimodal.images.image import load_decoders
from vllm.multimodal.interface.family import EncoderInput
from vllm.multimodal.interface.source import MediaSource, refuse
from vllm.utils.imports import hide_torch, show_torch
from vllm.utils.process.deadline_worker import (
    CallFailed,
    DeadlineExceeded,
    DeadlineWorker,
    WorkerDied,
    WorkerError,
    make_server,
)
from vllm.utils.process.memory_file import memory_file

logger = init_logger(__name__)

Job = Callable[[MediaSource], EncoderInput]

_TARGET = "vllm.multimodal.pool:_make_handler"
_ALIGNMENT = 64
"""Bytes; each tensor begins at a multiple of it."""
_MAX_REASON_CHARS = 200
"""Longest part of an unexpected error that is shown: it may have content of the item in it."""
_LOOK_S = 0.05
"""Seconds between two attempts to stop the items that are being processed."""
_KINDS = "biuf"
"""Accepted kinds of dtypes: booleans, integers and floats. An object would be an address."""


class _Setup(msgspec.Struct):
    job: str
    settings: dict[str, Any]


class _Tensor(msgspec.Struct):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class _Source(msgspec.Struct):
    """A `MediaSource` without its content, as sent to a process."""

    modality: str
    where: str
    uuid: str | None
    detail: str | None
    sampling_rate: int | None
    overrides: dict[str, Any]
    content: list[_Tensor]


class _Answer(msgspec.Struct):
    """An `EncoderInput` without tensor content, or the reason why there is none; sent by a
    process.
    """

    refusal: str | None = None
    tensors: list[_Tensor] = []
    grid: tuple[int, ...] = ()


class MediaWorkers:
    """Several processes that each process one media item at a time.

    Thread-safe. `run` and `run_sync` may be called from any event loop and any thread.

    Args:
        job: "module:function". It is imported only in the processes, and called once with the
            settings; its result is called for each item. It raises RequestError or ValueError
            for an item that is not accepted.
        settings: keyword arguments of this function: numbers, strings, lists and dictionaries.
        num_workers: number of processes.
        memory_limit_bytes: bytes by which items may enlarge the address space of a process.
        timeout_s: seconds for one item, without the wait for a free process.
    """

    def __init__(
        self,
        job: str,
        settings: Mapping[str, Any],
        *,
        num_workers: int,
        memory_limit_bytes: int,
        timeout_s: float,
    ) -> None:
        self._timeout_s = timeout_s
        self._memory_limit_bytes = memory_limit_bytes
        self._server = make_server(_TARGET, msgspec.msgpack.encode(_Setup(job, dict(settings))))
        self._workers = [
            DeadlineWorker(self._server, max_memory_bytes=memory_limit_bytes)
            for _ in range(num_workers)
        ]
        # Last in, first out: the worker used last has warm caches.
        self._idle: queue.LifoQueue[DeadlineWorker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._is_closed = False
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="media")

    def start(self) -> None:
        """Import the job, so that the first item need not wait for it.

        Blocks; `close` interrupts it.

        Raises:
            ConfigError: the job cannot be imported, or does not accept its settings.
        """
        try:
            self._server.start()
        except WorkerError as error:
            if self._is_closed:
                return
            raise ConfigError(f"the processes that decode media cannot start: {error}") from error

    def start_in_background(self) -> "Future[None]":
        """Begin to import the job, and return a future that is done after that. An error is logged;
        each item reports it again.
        """
        return self._threads.submit(self._start_or_log)

    async def run(self, source: MediaSource) -> EncoderInput:
        """Run the job for an item and return its result.

        Cancelling has an effect only while the item waits for a process.

        Raises:
            RequestError: the item is not accepted, or needs too much time or memory.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._run, source)

    def run_sync(self, source: MediaSource) -> EncoderInput:
        """Run the job for an item and return its result; blocks."""
        return self._threads.submit(self._run, source).result()

    def close(self) -> None:
        """Kill all processes; items that are processed or waiting fail."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        idle: list[DeadlineWorker] = []
        while len(idle) < len(self._workers):
            if all(worker.pid is None for worker in self._workers):
                self._server.close()  # also stops a running start, for which a worker may wait
            for worker in self._workers:
                worker.close()
            self._server.close()
            # Repeat, because a worker that was about to fork may have started another server.
            with suppress(queue.Empty):
                idle.append(self._idle.get(timeout=_LOOK_S))
        for worker in idle:  # put back: waiting items find out that the worker is closed
            self._idle.put(worker)

    def _start_or_log(self) -> None:
        try:
            self.start()
        except ConfigError as error:
            logger.error("%s", error)

    def _run(self, source: MediaSource) -> EncoderInput:
        worker = self._idle.get()  # never waits: there are as many workers as threads
        try:
            return self._run_in(worker, source)
        finally:
            self._idle.put(worker)

    def _run_in(self, worker: DeadlineWorker, source: MediaSource) -> EncoderInput:
        if self._is_closed:
            raise refuse(source.where, "the server is stopping")
        files = [memory_file("media-source"), memory_file("media-tensors")]
        try:
            call = _write_source(source, files[0])
            answer = _decode_answer(worker.call(call, self._timeout_s, files))
            if answer.refusal is None:
                return _read_result(answer, files[1], self._memory_limit_bytes)
            reason = answer.refusal
        except DeadlineExceeded:
            reason = f"it was not processed within {self._timeout_s:g} s. Send a smaller one"
        except WorkerDied:
            reason = (
                "the process that decodes it has exited: the file is damaged, or needs more "
                f"memory than {self._memory_limit_bytes // 2**20} MiB. Send a smaller one"
            )
        except CallFailed as error:
            what = str(error)[:_MAX_REASON_CHARS]
            logger.error("%s cannot be processed: %s", source.where, what)
            reason = f"it cannot be processed: {what}"
        finally:
            for file in files:
                os.close(file)
        raise refuse(source.where, reason)


# ---- content of sources and tensors, in files without a name -----------------------------------


def _write_source(source: MediaSource, file: int) -> bytes:
    """Write the content of a source to a file, and return its description."""
    described = _Source(
        source.modality,
        source.where,
        source.uuid,
        source.detail,
        source.sampling_rate,
        dict(source.overrides),
        _write_tensors(source.arrays, file),
    )
    return msgspec.msgpack.encode(described)


def _read_source(described: _Source, file: int) -> MediaSource:
    arrays = {each.name: _read_tensor(each, file) for each in described.content}
    return MediaSource.with_arrays(
        arrays,
        modality=described.modality,
        where=described.where,
        uuid=described.uuid,
        detail=described.detail,
        sampling_rate=described.sampling_rate,
        overrides=described.overrides,
    )


def _write_tensors(tensors: Mapping[str, NDArray[Any]], file: int) -> list[_Tensor]:
    """Write tensors to a file, and return their description."""
    described = []
    end = 0
    for name, tensor in tensors.items():
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        described.append(_Tensor(name, tensor.dtype.str, tensor.shape, offset))
        _write(file, _bytes_of(tensor), offset)
        end = offset + tensor.nbytes
    return described


def _decode_answer(data: bytes) -> _Answer:
    try:
        return msgspec.msgpack.decode(data, type=_Answer)
    except msgspec.MsgspecError:
        raise WorkerDied from None


def _read_result(answer: _Answer, file: int, max_bytes: int) -> EncoderInput:
    """Copy the tensors of a result to memory of this process.

    Args:
        answer: description from the process, which is not trusted: it may be compromised.
        file: file with the content.
        max_bytes: limit of all tensors together, the most a process has memory for.

    Raises:
        WorkerDied: the description does not fit the file or the limit.
    """
    tensors: dict[str, NDArray[Any]] = {}
    num_bytes = os.fstat(file).st_size
    left_bytes = max_bytes
    for each in answer.tensors:
        try:
            dtype = np.dtype(each.dtype)
        except TypeError:
            raise WorkerDied from None
        size = math.prod(each.shape) * dtype.itemsize
        left_bytes -= size
        is_inside = min(each.offset, *each.shape, 0) == 0 and each.offset + size <= num_bytes
        if dtype.kind not in _KINDS or not is_inside or left_bytes < 0:
            raise WorkerDied
        tensors[each.name] = _read_tensor(each, file)
    return EncoderInput(tensors, answer.grid)


def _read_tensor(described: _Tensor, file: int) -> NDArray[Any]:
    """Read one tensor from the file."""
    dtype = np.dtype(described.dtype)
    size = math.prod(described.shape) * dtype.itemsize
    return _read(file, size, described.offset).view(dtype).reshape(described.shape)


def _bytes_of(tensor: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data


def _write(file: int, left: memoryview, offset: int) -> None:
    """Write all bytes; one system call writes at most 2 GiB."""
    while left:
        written = os.pwrite(file, left, offset)
        left, offset = left[written:], offset + written


def _read(file: int, num_bytes: int, offset: int) -> NDArray[np.uint8]:
    """Read `num_bytes` bytes, which the file must have."""
    content = np.empty(num_bytes, np.uint8)
    left = content.data
    while left:
        num_read = os.preadv(file, [left], offset)
        if not num_read:  # the file became shorter meanwhile
            raise WorkerDied
        left, offset = left[num_read:], offset + num_read
    return content


# ---- the process ------------------------------------------------------------------------------


def _make_handler(setup: bytes) -> Callable[[bytes, Sequence[int]], bytes]:
    """Make the handler of the worker; input and output are descriptions, with two files."""
    load_decoders()  # imported before the fork, so that children need not import it
    start = msgspec.msgpack.decode(setup, type=_Setup)
    job = _without_torch(partial(_make_job, start))

    def handle(argument: bytes, files: Sequence[int]) -> bytes:
        described = msgspec.msgpack.decode(argument, type=_Source)
        try:
            result = job(_read_source(described, files[0]))
            answer = _Answer(tensors=_write_tensors(result.tensors, files[1]), grid=result.grid)
        except RequestError as error:
            answer = _Answer(refusal=str(error).removeprefix(f"{described.where}: "))
        except ValueError as error:
            answer = _Answer(refusal=str(error))
        except MemoryError:
            answer = _Answer(refusal="there is not enough memory to process it. Send a smaller one")
        return msgspec.msgpack.encode(answer)

    return handle


def _make_job(start: _Setup) -> Job:
    module, _, name = start.job.partition(":")
    return getattr(importlib.import_module(module), name)(**start.settings)


def _without_torch(make: Callable[[], Job]) -> Job:
    """Call `make` without torch if that is possible, and return its result.

    transformers imports torch if it is installed, which takes seconds and 400 MB. Its image
    processors do not use it, except some classes of older releases.
    """
    if "torch" in sys.modules:
        return make()
    hide_torch()
    try:
        return make()
    except (ImportError, ConfigError):
        show_torch()
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
    return make()
