"""Cases that only `make test-exhaustive` runs."""

from typing import Any

import pytest


def exhaustive(*case: Any) -> Any:
    """Return the parameters of a test as a case that `make test` does not run."""
    return pytest.param(*case, marks=pytest.mark.exhaustive)


def seeds(num_always: int, num_all: int) -> list[Any]:
    """Return the seeds of a random test, of which `make test` runs the first ones."""
    return [seed if seed < num_always else exhaustive(seed) for seed in range(num_all)]
