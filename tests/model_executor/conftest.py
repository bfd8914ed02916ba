"""Fixtures for tiny checkpoints of families, made once per session, and for the operators of the
CPU.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_model
from vllm.ops import get_ops, set_ops
from vllm.ops.cpu.operators import CPUOps


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture
def cpu_ops() -> Iterator[None]:
    """Install the operators of the CPU, as programs need, for one test."""
    before = get_ops()
    set_ops(CPUOps())
    yield
    set_ops(before)
