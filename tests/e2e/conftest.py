"""Models of the parity tests."""

from functools import cache
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_model
from vllm.assets import BUNDLED_MODEL


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory):
    """Folder of a tiny model of a family, made once; 'bundled' is the trained one."""

    @cache
    def folder(family: str) -> Path:
        if family == "bundled":
            return BUNDLED_MODEL
        return make_tiny_model(family, tmp_path_factory.mktemp(family))

    return folder
