"""What a launch needs of the simulated card's memory, and the text of the log."""

import re

import pytest
import torch

from vllm.platforms.habana.sim import SimBridge
from vllm.worker.hpu.memory_profile import MemoryProfile, attempt

MIB = 2**20


@pytest.fixture
def lazy() -> SimBridge:
    return SimBridge("gaudi2", is_lazy=True)


def take(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device="hpu")


def test_a_profile_says_what_stayed_and_of_how_much(lazy):
    with MemoryProfile(lazy) as profile:
        kept = take(64 * MIB)
        take(8 * MIB)
    size = r"-?[\d.]+ (B|[KMG]iB)"
    text = (
        rf"64 MiB of device memory \(64 MiB/94\.62 GiB used\) and {size} of host memory "
        rf"\({size}/{size} used\)"
    )
    assert re.fullmatch(text, str(profile))
    with MemoryProfile(lazy) as profile:
        del kept
    assert profile.device_bytes == -64 * MIB
    assert str(profile).startswith("-64 MiB of device memory (0 B/94.62 GiB used)")


def test_a_profile_of_the_peak_says_what_was_needed_at_a_time(lazy):
    before = take(16 * MIB)
    with MemoryProfile(lazy, is_peak=True) as profile:
        take(64 * MIB)
        take(8 * MIB)
    assert profile.device_bytes == 64 * MIB
    assert str(profile).startswith("64 MiB of device memory (80 MiB/94.62 GiB used)")
    assert lazy.memory_info().total_bytes - lazy.memory_info().free_bytes == before.nbytes


def test_an_attempt_without_memory_leaves_nothing_behind(lazy):
    def run() -> None:
        kept = [take(MIB).add(1)]
        kept.append(kept)  # a cycle, as the frames of an error are
        take(100 * 2**30)

    attempted = attempt(lazy, run)
    assert attempted.refused_bytes == 100 * 2**30
    assert attempted.needed_bytes == 100 * 2**30 + 2 * MIB
    compilations = lazy.counters().compilations
    lazy.mark_step()
    assert lazy.counters().compilations == compilations  # nothing recorded is left


def test_an_attempt_that_runs_to_its_end_says_what_it_needed(lazy):
    attempted = attempt(lazy, lambda: take(3 * MIB))
    assert attempted.refused_bytes is None
    assert attempted.needed_bytes == 3 * MIB


def test_any_other_error_is_not_about_memory(lazy):
    def fail() -> None:
        raise RuntimeError("the device is on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        attempt(lazy, fail)
