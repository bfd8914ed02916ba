"""Read audio files in processes that can be killed, for requests that cut them into pieces.

The media of prompts have separate processes (`MediaReader`), which read an audio file as one item.
"""

from vllm import envs
from vllm.multimodal.audio.sound import Samples
from vllm.multimodal.interface.source import MediaSource
from vllm.multimodal.pool import MediaWorkers

_JOB = "vllm.multimodal.audio.sound:make_reader"
_NUM_WORKERS = 2
_TIMEOUT_S, _SPEED = 60.0, 10.0
"""A file may take this time, or the time of its sound divided by the speed if that is longer."""
_MEMORY_BYTES, _SAMPLE_BYTES = 2**30, 16
"""Bytes that a file may take while it is decoded, and for each of its samples: parts, the whole and
a copy are in memory."""


class AudioReader:
    """Reads the audio files of all requests of a server.

    Its processes start with `prepare`, or with the first file.
    """

    def __init__(self) -> None:
        self._workers: MediaWorkers | None = None

    def prepare(self, sampling_rate: int) -> None:
        """Start the processes in the background.

        Args:
            sampling_rate: sampling rate of `read`.
        """
        self._workers = _make_workers(sampling_rate)
        self._workers.start_in_background()

    async def read(self, source: MediaSource, sampling_rate: int) -> Samples:
        """Return the samples [n] of an audio file, n > 0.

        Args:
            source: has the content of the file.
            sampling_rate: samples per second that the model expects, the same for all files.

        Raises:
            RequestError: the file cannot be read; the message names it.
        """
        if self._workers is None:
            self._workers = _make_workers(sampling_rate)
        return (await self._workers.run(source)).tensors["samples"]

    def shutdown(self) -> None:
        """Kill the processes."""
        if self._workers is not None:
            self._workers.close()


def _make_workers(sampling_rate: int) -> MediaWorkers:
    max_seconds = envs.get().VLLM_MAX_AUDIO_DECODE_DURATION_S
    return MediaWorkers(
        _JOB,
        {"sampling_rate": sampling_rate, "max_seconds": max_seconds},
        num_workers=_NUM_WORKERS,
        memory_limit_bytes=_MEMORY_BYTES + _SAMPLE_BYTES * sampling_rate * max_seconds,
        timeout_s=max(_TIMEOUT_S, max_seconds / _SPEED),
    )
