"""Fixtures of the tests of the server."""

from collections.abc import Iterator

import pytest

from tests.entrypoints.openai.scripted_engine import clients


@pytest.fixture(autouse=True)
def close_clients() -> Iterator[None]:
    """End the engines of the clients that a test has made."""
    with clients:
        yield
