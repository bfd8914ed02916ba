"""Read the media of requests in processes that can be killed, and cache the newest results.

An item that is requested several times is decoded once, even if the requests overlap.
"""

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from vllm.engine.input.input_processor import InputProcessor
from vllm.engine.input.media_input import (
    MediaInput,
    ReadMedia,
    cache_salt_of,
    media_key,
    read_media,
    with_read_media,
)
from vllm.engine.metrics.media_metrics import MediaReadStats
from vllm.inputs import PromptType
from vllm.logger import init_logger
from vllm.multimodal import media_file
from vllm.multimodal.interface.family import EncoderInput
from vllm.multimodal.interface.media_times import MediaTimes
from vllm.multimodal.interface.source import MediaSource
from vllm.multimodal.media_file import MediaFile
from vllm.multimodal.pool import MediaWorkers

logger = init_logger(__name__)

_JOB = "vllm.multimodal.job:make_job"
_TIMEOUT_S = 30.0
_MEMORY_LIMIT = 2 * 2**30
"""Bytes that one item may take while it is decoded and resized."""


class PixelCache:
    """Caches the newest encoder inputs, by the keys of their media items.

    Args:
        capacity: size in bytes.

    Attributes:
        num_queries: items that were looked up.
        num_hits: how many of them were in the cache.
    """

    def __init__(self, capacity: int) -> None:
        self.num_queries = 0
        self.num_hits = 0
        self._capacity = capacity
        self._entries: OrderedDict[str, EncoderInput] = OrderedDict()
        self._num_bytes = 0

    def find(self, key: str) -> EncoderInput | None:
        """Return the cached encoder input of an item, or None."""
        self.num_queries += 1
        found = self._entries.get(key)
        if found is not None:
            self.num_hits += 1
            self._entries.move_to_end(key)
        return found

    def keep(self, key: str, given: EncoderInput) -> None:
        """Cache the encoder input of an item, unless it is larger than the whole cache."""
        size = size_of(given)
        if key in self._entries or size > self._capacity:
            return
        self._entries[key] = given
        self._num_bytes += size
        while self._num_bytes > self._capacity:
            _, oldest = self._entries.popitem(last=False)
            self._num_bytes -= size_of(oldest)

    def clear(self) -> None:
        """Empty the cache."""
        self._entries.clear()
        self._num_bytes = 0


def size_of(given: EncoderInput) -> int:
    """Return the total size of the tensors of an item in bytes."""
    return sum(tensor.nbytes for tensor in given.tensors.values())


@dataclass
class _Reading:
    """An item that is being read, for one or several requests."""

    task: asyncio.Task[EncoderInput]
    num_waiting: int = 0


class MediaReader:
    """Reads the images, audio and videos of all requests of a server.

    Args:
        source: returns the processor of the event loop, after it exists.
    """

    def __init__(self, source: Callable[[], InputProcessor]) -> None:
        self._source = source
        self._workers: MediaWorkers | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="media-keys")
        self._reading: dict[str, _Reading] = {}
        self._files: WeakValueDictionary[str, MediaFile] = WeakValueDictionary()
        """Key of an item -> its file, while requests with the item run."""
        self.cache = PixelCache(0)
        self._times = MediaTimes()

    def prepare(self, media: MediaInput) -> "Future[None] | None":
        """Start the processes in the background, if the model reads media.

        Args:
            media: of the engine.

        Returns:
            A future that is done when they have started; None if there are none.

        Raises:
            ConfigError: the settings of the image processor are missing or cannot be used.
        """
        if media.family is None:
            return None
        self.cache = PixelCache(media.cache_bytes)
        self._workers = MediaWorkers(
            _JOB,
            media.job_arguments,
            num_workers=max(1, min(4, (os.cpu_count() or 1) // 2)),
            memory_limit_bytes=_MEMORY_LIMIT,
            timeout_s=_TIMEOUT_S,
        )
        return self._workers.start_in_background()

    def stats(self) -> MediaReadStats | None:
        """Return the counters; None if the model reads only text."""
        if self._workers is None:
            return None
        return MediaReadStats(self._times, self.cache.num_queries, self.cache.num_hits)

    async def read(self, prompt: PromptType) -> PromptType:
        """Return the prompt with its media read.

        Raises:
            RequestError: an item cannot be read; the message names it.
        """
        if isinstance(prompt, Mapping) and "encoder_prompt" in prompt:
            prompt = self._source().media.joined(prompt)
        given: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {}
        if given.get("multi_modal_data") is None or read_media(given) is not None:
            return prompt
        loop = asyncio.get_running_loop()
        # In a thread: hashing large files takes milliseconds.
        sources = await loop.run_in_executor(self._thread, self._find_sources, given)
        tasks = [asyncio.create_task(self._read_one(key, source)) for key, source in sources]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # if one item cannot be read, the others need not be
                task.cancel()
        items = [
            ReadMedia.of(source, key, each)
            for (key, source), each in zip(sources, found, strict=True)
        ]
        if not items:
            return prompt
        return with_read_media(given, items)

    @asynccontextmanager
    async def shared(self, prompt: PromptType) -> AsyncIterator[PromptType]:
        """Yield the prompt with its media read. Inside the context, the engine's other processes
        can read the tensors.

        Raises:
            RequestError: an item cannot be read; the message names it.
        """
        prompt = await self.read(prompt)
        given: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {}
        found = read_media(given)
        if found is None or not self._source().media.uses_files:
            yield prompt
            return
        with ExitStack() as used:
            items = []
            for item in found:
                file = await self._file_of(item)
                items.append(replace(item, file=file and used.enter_context(file)))
            yield with_read_media(given, items)

    def shutdown(self) -> None:
        """Kill the processes."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._workers is not None:
            self._workers.close()

    def _find_sources(self, prompt: Mapping[str, Any]) -> list[tuple[str, MediaSource]]:
        salt = cache_salt_of(prompt)
        return [(media_key(each, salt), each) for each in self._source().media.sources(prompt)]

    async def _read_one(self, key: str, source: MediaSource) -> EncoderInput:
        if source.encoded is not None:
            return source.encoded
        found = self.cache.find(key)
        if found is not None:
            return found
        assert self._workers is not None
        reading = self._reading.get(key)
        if reading is None:
            task = asyncio.create_task(self._timed(source.modality, self._workers.run(source)))
            reading = self._reading[key] = _Reading(task)
        reading.num_waiting += 1
        try:
            # Shielded: another request may wait for the same item.
            given = await asyncio.shield(reading.task)
        finally:
            reading.num_waiting -= 1
            if not reading.num_waiting:
                reading.task.cancel()  # no effect on a finished task
                del self._reading[key]
        self.cache.keep(key, given)
        return given

    async def _timed(self, modality: str, reading: Awaitable[EncoderInput]) -> EncoderInput:
        began = time.monotonic()
        given = await reading
        self._times.add(modality, time.monotonic() - began)
        return given

    async def _file_of(self, item: ReadMedia) -> MediaFile | None:
        """Return an open file with the tensors of an item; None if they are small, or files are not
        possible.
        """
        if size_of(item.given) <= media_file.INLINE_BYTES:
            return None
        found = self._files.get(item.key)
        if found is not None and found.is_open:
            return found
        loop = asyncio.get_running_loop()
        try:
            made = await loop.run_in_executor(self._thread, MediaFile, item.given.tensors)
        except OSError as error:  # such as too many open files
            logger.warning(
                "cannot create a shared file for an image, sound or video: %s. It is copied into "
                "the message to the engine process instead, which is slower",
                error,
            )
            return None
        self._files[item.key] = made
        return made
