"""Test the memory that a forward pass needs on the simulated card, and the text of the log."""

import re

import pytest
import torch

from gaudi_sim.bridge import SimBridge
from vllm.worker.hpu.memory.memory_profile import MemoryProfile, attempt, used_bytes

MIB = 2**20


@pytest.fixture
def lazy() -> SimBridge:
    return SimBridge("gaudi2", is_lazy=True)


@pytest.fixture
def eager() -> SimBridge:
    """Return an eager card. Without recipes there is no workspace, so freed memory is free at
    once.
    """
    return SimBridge("gaudi2")


def take(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device="hpu")


def test_a_profile_says_what_stayed_and_of_how_much(eager):
    with MemoryProfile(eager) as profile:
        kept = take(64 * MIB)
        take(8 * MIB)
    size = r"-?[\d.]+ (B|[KMG]iB)"
    text = (
        rf"64 MiB of device memory \(64 MiB/94\.62 GiB used\) and {size} of host memory "
        rf"\({size}/{size} used\)"
    )
    assert re.fullmatch(text, str(profile))
    with MemoryProfile(eager) as profile:
        del kept
    assert profile.device_bytes == -64 * MIB
    assert str(profile).startswith("-64 MiB of device memory (0 B/94.62 GiB used)")


def test_a_profile_of_the_peak_says_what_was_needed_at_a_time(eager):
    before = take(16 * MIB)
    with MemoryProfile(eager, is_peak=True) as profile:
        take(64 * MIB)
        take(8 * MIB)
    assert profile.device_bytes == 64 * MIB
    assert str(profile).startswith("64 MiB of device memory (80 MiB/94.62 GiB used)")
    assert used_bytes(eager) == before.nbytes


def test_an_attempt_without_memory_leaves_nothing_behind(lazy):
    def run() -> None:
        kept = [take(MIB).add(1)]
        kept.append(kept)  # a reference cycle, as the frames of an error make one
        take(100 * 2**30)

    attempted = attempt(lazy, run, 0)
    assert attempted.refused_bytes == 100 * 2**30
    assert attempted.needed_bytes == 100 * 2**30 + 2 * MIB
    compilations = lazy.counters().compilations
    lazy.mark_step()
    assert lazy.counters().compilations == compilations  # no recorded operators are left


def test_an_attempt_that_runs_to_its_end_says_what_it_needed(lazy):
    resident = take(5 * MIB)
    attempted = attempt(lazy, lambda: take(3 * MIB), resident.nbytes)
    assert attempted.refused_bytes is None and attempted.has_grown
    assert (attempted.needed_bytes, attempted.kept_bytes) == (3 * MIB, 3 * MIB)


def test_a_launch_that_fits_the_workspace_of_others_takes_nothing_more(lazy):
    attempts = [attempt(lazy, lambda n=n: take(n * MIB), 0) for n in (3, 2, 4)]
    assert [attempted.has_grown for attempted in attempts] == [True, False, True]
    assert [attempted.kept_bytes for attempted in attempts] == [3 * MIB, 3 * MIB, 4 * MIB]
    assert not any(attempted.passing_bytes for attempted in attempts)


def test_what_goes_from_recipe_to_recipe_is_needed_beside_the_workspace(lazy):
    def run() -> None:
        passing = take(3 * MIB)
        lazy.mark_step()
        take(2 * MIB)
        del passing

    attempted = attempt(lazy, run, 0)
    assert (attempted.kept_bytes, attempted.passing_bytes) == (2 * MIB, 3 * MIB)


def test_any_other_error_is_not_about_memory(lazy):
    def fail() -> None:
        raise RuntimeError("the device is on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        attempt(lazy, fail, 0)
