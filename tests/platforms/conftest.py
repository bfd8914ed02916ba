"""Simulated cards, and the stand-in for the vendor package."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from vllm import envs
from vllm.platforms.habana.sim import SimBridge

STUBS = Path(__file__).parents[1] / "stubs"


@pytest.fixture
def eager() -> SimBridge:
    return SimBridge("gaudi2")


@pytest.fixture
def lazy() -> SimBridge:
    return SimBridge("gaudi2", is_lazy=True)


@pytest.fixture
def strict() -> SimBridge:
    return SimBridge("gaudi2", is_lazy=True, is_strict=True)


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The stand-in `habana_frameworks`, importable while the test runs."""
    monkeypatch.syspath_prepend(str(STUBS))
    importlib.invalidate_caches()
    yield importlib.import_module("habana_frameworks")
    for name in [name for name in sys.modules if name.partition(".")[0] == "habana_frameworks"]:
        del sys.modules[name]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    """Set the variables that `envs.get()` returns, for this test."""

    def set_environment(**variables: str) -> None:
        loaded = envs.Envs.load(variables)
        monkeypatch.setattr(envs, "get", lambda: loaded)

    return set_environment
