"""Test that code in a checkpoint does not run unless trust_remote_code is set."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import make_tiny_model
from vllm import LLM, SamplingParams
from vllm.assets import BUNDLED_MODEL
from vllm.errors import ConfigError
from vllm.transformers_utils.tokenizer import get_tokenizer
from vllm.transformers_utils.transformers_version import attention_can_mask

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 32,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 8,
}
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({marker!r}).touch()

class OwnConfig(LlamaConfig): pass
class OwnModel(LlamaForCausalLM): pass
class OwnTokenizer(PreTrainedTokenizerFast): pass
"""
AUTO_MAP = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Return the path of a file that the code of the model creates when it runs."""
    return tmp_path / "has-run"


@pytest.fixture
def folder(tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a Llama whose config, model and tokenizer have their own code."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    folder = make_tiny_model("llama", tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, folder)
    for name, values in (
        ("config.json", {"auto_map": AUTO_MAP}),
        (
            "tokenizer_config.json",
            {
                "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]},
                "tokenizer_class": "OwnTokenizer",
            },
        ),
    ):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | values))
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    return folder


def test_the_code_of_a_tokenizer_runs_only_when_trusted(folder, marker):
    with pytest.raises(ConfigError, match="trust_remote_code"):
        LLM(str(folder), **SETTINGS)
    assert not marker.exists()
    assert get_tokenizer(str(folder), trust_remote_code=True).encode("a")
    assert marker.exists()


@pytest.mark.parametrize(
    "model_impl",
    [
        "vllm",
        pytest.param(
            "transformers",
            marks=pytest.mark.skipif(
                not attention_can_mask(), reason="the modules here keep their own attention"
            ),
        ),
    ],
)
def test_the_code_of_a_model_is_left_for_the_modules_of_its_family(folder, marker, model_impl):
    llm = LLM(str(folder), model_impl=model_impl, tokenizer=str(BUNDLED_MODEL), **SETTINGS)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6]}], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
    assert not marker.exists()


def test_a_model_that_only_its_code_can_run_is_refused_with_the_flag(folder, marker):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="architecture 'OwnForCausalLM' is not supported"):
        LLM(str(folder), model_impl="transformers", skip_tokenizer_init=True, **SETTINGS)
    assert not marker.exists()
