"""Test that `import vllm` is fast, and that every public name exists."""

import subprocess
import sys
from pathlib import Path

import pytest

import vllm

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("statement", ["import vllm", "import vllm.config, vllm.engine.arg_utils"])
def test_importing_loads_neither_torch_nor_transformers_nor_numpy(statement):
    heavy = "{'torch', 'transformers', 'numpy'}"
    code = f"import sys; {statement}; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert (result.stdout, result.stderr) == ("[]\n", "")


@pytest.mark.parametrize("name", vllm.__all__)
def test_every_public_name_resolves(name):
    assert getattr(vllm, name) is not None


def test_dir_lists_the_public_names():
    assert dir(vllm) == sorted(vllm.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'vllm' has no attribute 'LLLM'"):
        vllm.LLLM  # noqa: B018
