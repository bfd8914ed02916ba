"""Let the engines of these tests have few layers."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def few_layers(two_layers: None) -> None:
    """Use the short model in all modules."""
