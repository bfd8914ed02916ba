"""Remove what planned engines leave in a process, after each module."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def removed(plans_removed: None) -> None:
    """Remove what planned engines leave; see `plans_removed`."""
