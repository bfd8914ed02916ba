"""Test returning memory to the system: freed memory, and memory that keeps its addresses."""

import asyncio
import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from vllm.utils.process import process_memory
from vllm.utils.process.process_memory import (
    MemoryTrim,
    allocate_pages,
    can_discard,
    discard,
    move_to_huge_pages,
    release_freed_memory,
)

ONLY_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps the addresses")
PAGE = mmap.PAGESIZE


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@ONLY_LINUX
def test_the_system_gets_memory_back_that_can_be_used_again():
    assert can_discard()
    num_bytes = 64 << 20
    data = np.ones(num_bytes, np.uint8)
    before = resident_bytes()
    discard(data.ctypes.data, num_bytes)
    given_back = before - resident_bytes()
    assert given_back > 0.95 * num_bytes
    assert not data.any()
    data[:] = 7
    assert data.min() == 7


@ONLY_LINUX
@pytest.mark.parametrize(("start", "end"), [(5, 9), (1, PAGE), (PAGE - 1, 3 * PAGE + 2), (0, 0)])
def test_only_these_bytes_are_cleared(start, end):
    data = np.ones(8 * PAGE, np.uint8)
    first = -data.ctypes.data % PAGE + start
    last = -data.ctypes.data % PAGE + end
    discard(data.ctypes.data + first, last - first)
    assert not data[first:last].any()
    assert data[:first].all() and data[last:].all()


@ONLY_LINUX
def test_memory_that_is_not_there_is_an_error_and_no_crash():
    with pytest.raises(OSError, match=rf"{PAGE} bytes of memory \(madvise\)"):
        discard(PAGE, PAGE)  # no memory is ever mapped at this address


def test_new_pages_are_zeroed_and_begin_at_a_page():
    data = np.frombuffer(allocate_pages(3 * PAGE + 5), np.uint8)
    assert data.ctypes.data % PAGE == 0 and len(data) == 3 * PAGE + 5 and not data.any()
    data[:] = 7  # may be written


@ONLY_LINUX
def test_memory_keeps_its_content_and_addresses_when_it_moves_to_huge_pages():
    """The ranges are unordered, some overlap, and one has addresses without memory."""
    many = [np.random.default_rng(seed).bytes(700_000) for seed in range(12)]
    arrays = [np.frombuffer(bytearray(each), np.uint8) for each in many]
    big = np.arange(6 << 20, dtype=np.int32)
    ranges = [(each.ctypes.data, each.nbytes) for each in reversed(arrays)]
    ranges += [(big.ctypes.data, big.nbytes), (big.ctypes.data + 99, 3 << 20), (PAGE, 8 << 20)]
    move_to_huge_pages(ranges)
    assert [each.tobytes() for each in arrays] == many
    assert (big == np.arange(len(big), dtype=np.int32)).all()
    move_to_huge_pages([])


def test_giving_back_works_or_says_that_it_does_not():
    assert release_freed_memory() in (True, False)


def test_those_who_ask_together_are_served_together(monkeypatch):
    calls, done = [], asyncio.Event()

    async def main():
        loop = asyncio.get_running_loop()

        def give_back():
            calls.append(1)
            loop.call_soon_threadsafe(done.set)

        monkeypatch.setattr(process_memory, "release_freed_memory", give_back)
        monkeypatch.setattr(process_memory, "DELAY_S", 0.001)
        trim = MemoryTrim()
        for count in (1, 2):
            trim.schedule()
            trim.schedule()
            await done.wait()
            done.clear()
            assert len(calls) == count

    asyncio.run(main())
