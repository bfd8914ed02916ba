"""Memory that is given back: the system has it, the addresses stay, the bytes are zero."""

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from vllm.platforms.cpu_memory import can_discard, discard, trim_heap

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps the addresses")

PAGE = mmap.PAGESIZE


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


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


@pytest.mark.parametrize(("start", "end"), [(5, 9), (1, PAGE), (PAGE - 1, 3 * PAGE + 2), (0, 0)])
def test_only_these_bytes_are_cleared(start, end):
    data = np.ones(8 * PAGE, np.uint8)
    first = -data.ctypes.data % PAGE + start
    last = -data.ctypes.data % PAGE + end
    discard(data.ctypes.data + first, last - first)
    assert not data[first:last].any()
    assert data[:first].all() and data[last:].all()


def test_memory_that_is_not_there_is_an_error_and_no_crash():
    with pytest.raises(OSError, match=f"madvise of {PAGE} bytes"):
        discard(PAGE, PAGE)  # nothing is ever mapped there
    trim_heap()
