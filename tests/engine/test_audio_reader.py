"""Test sound files that are read in separate processes, which end with the engine."""

import asyncio
import os

import numpy as np
import pytest

from tests.sound_files import FORMS, sound_file, tone
from vllm.engine.input.audio_reader import AudioReader
from vllm.errors import RequestError
from vllm.multimodal.interface.source import MediaSource

RATE = 16_000


@pytest.mark.parametrize("is_prepared", [True, False])
def test_files_are_read_in_processes_that_end(is_prepared: bool) -> None:
    reader = AudioReader()

    async def read(data: bytes) -> np.ndarray:
        return await reader.read(MediaSource(modality="audio", where="file", data=data), RATE)

    async def run() -> None:
        whole = sound_file(FORMS["flac"], tone(1.0))
        first, second = await asyncio.gather(read(whole), read(whole))
        assert np.abs(first - tone(1.0)).max() < 1e-4
        np.testing.assert_array_equal(first, second)
        with pytest.raises(RequestError, match="this FLAC file"):
            await read(whole[:-10])

    before = _children()
    if is_prepared:
        reader.prepare(RATE)
    asyncio.run(run())
    assert _children() - before
    reader.shutdown()
    assert not _children() - before


def test_a_reader_that_read_nothing_has_no_processes() -> None:
    before = _children()
    AudioReader().shutdown()
    assert not _children() - before


def _children() -> set[int]:
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:  # the process has ended meanwhile
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            found.add(int(name))
    return found
