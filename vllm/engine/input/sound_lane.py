"""Reads files of sound in processes that can be killed, for requests that cut them into pieces.

The media of prompts have processes of their own (`MediaLane`), which read one sound as one item.
"""

from vllm import envs
from vllm.multimodal.audio.sound import Samples
from vllm.multimodal.interface.source import MediaSource
from vllm.multimodal.pool import MediaWorkers

_JOB = "vllm.multimodal.audio.sound:make_reader"
_NUM_WORKERS = 2
_TIMEOUT_S = 60.0
_MEMORY_LIMIT = 2**30
"""Bytes that one file may take while it is decoded."""


class SoundLane:
    """The files of sound of all requests of a server. Its processes start with the first file."""

    def __init__(self) -> None:
        self._workers: MediaWorkers | None = None

    async def read(self, source: MediaSource, sampling_rate: int) -> Samples:
        """Return the samples [n] of a file, n > 0.

        Args:
            source: has the content of the file.
            sampling_rate: samples per second of the model, the same for all files.

        Raises:
            RequestError: it cannot be read; names it.
        """
        if self._workers is None:
            self._workers = MediaWorkers(
                _JOB,
                {
                    "sampling_rate": sampling_rate,
                    "max_seconds": envs.get().VLLM_MAX_AUDIO_DECODE_DURATION_S,
                },
                num_workers=_NUM_WORKERS,
                memory_limit_bytes=_MEMORY_LIMIT,
                timeout_s=_TIMEOUT_S,
            )
        return (await self._workers.run(source)).tensors["samples"]

    def shutdown(self) -> None:
        """Kill the processes."""
        if self._workers is not None:
            self._workers.close()
