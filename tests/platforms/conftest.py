"""Fixtures for simulated cards, and for the stand-in for the vendor package."""

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gaudi_sim.bridge import SimBridge
from gaudi_sim.vendor import install_vendor, uninstall_vendor
from tests.reach import replace_ops, use_device_nodes
from vllm import envs
from vllm.platforms import registry

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
def vendor(lazy: SimBridge, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Make the stand-in `habana_frameworks` importable while the test runs, over a lazy card."""
    monkeypatch.syspath_prepend(str(STUBS))
    importlib.invalidate_caches()
    yield importlib.import_module("habana_frameworks")
    for name in [name for name in sys.modules if name.partition(".")[0] == "habana_frameworks"]:
        del sys.modules[name]


@pytest.fixture
def hlml(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Make the stand-in for the vendor's package of sensors importable as `pyhlml`."""
    monkeypatch.syspath_prepend(str(STUBS))
    importlib.invalidate_caches()
    module = importlib.import_module("pyhlml")
    module.reset()
    yield module
    sys.modules.pop("pyhlml", None)


@pytest.fixture
def facade() -> Iterator[None]:
    """Make the simulated card importable as `habana_frameworks`, without a stand-in."""
    install_vendor()
    yield
    uninstall_vendor()


@pytest.fixture
def card(vendor: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with the vendor package and a device node."""
    (tmp_path / "accel").mkdir()
    (tmp_path / "accel" / "accel0").touch()
    use_device_nodes(monkeypatch, tmp_path, tmp_path)


@pytest.fixture
def vendor_engine(
    vendor: ModuleType,
    card: None,
    environment: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[ModuleType]:
    """Let an engine of the test run on `RealBridge` over the recording stand-in.

    The card is lazy; for an eager one, make another `SimBridge` before the engine.
    """
    environment()
    replace_ops(monkeypatch, None)
    thresholds = gc.get_threshold()
    registry.resolve_platform.cache_clear()
    vendor.calls.clear()
    with torch._dynamo.config.patch(disable=torch._dynamo.config.disable):
        yield vendor
    registry.resolve_platform.cache_clear()
    gc.set_threshold(*thresholds)
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    """Return a function that sets the variables for `envs.get()` in this test."""

    def set_environment(**variables: str) -> None:
        loaded = envs.Envs.load(variables)
        monkeypatch.setattr(envs, "get", lambda: loaded)

    return set_environment
