"""Test finding architectures by name: built-in ones, plug-ins, and the error for unknown ones."""

import re
import subprocess
import sys
from functools import partial

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tiny_models import FAMILY_CONFIGS, NOT_SAVED
from vllm.config.families import FAMILIES, TEXT_TYPES
from vllm.errors import ConfigError
from vllm.model_executor.models.interface import CausalLM
from vllm.model_executor.models.registry import ModelRegistry

EmptyRegistry = partial(type(ModelRegistry), {})


def test_every_built_in_name_is_the_name_of_its_class_or_another_one_of_it():
    others = {name: f.architectures[0] for f in FAMILIES.values() for name in f.also_published_as}
    for name in ModelRegistry.supported():
        assert ModelRegistry.resolve(name).__name__ == others.get(name, name), name


def test_every_decoder_is_compared_with_transformers():
    configs = {name: create().model_type for name, (create, _) in FAMILY_CONFIGS.items()}
    compared = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind in configs.values()}
    decoders = {
        name
        for name in ModelRegistry.supported()
        if issubclass(ModelRegistry.resolve(name), CausalLM)
    }
    ours = [family for family in FAMILIES.values() if family.module is not None]
    elsewhere = {name for family in ours for name in family.also_published_as}
    elsewhere |= {"TransformersForCausalLM"}  # tested in tests/e2e/test_transformers_model.py
    # Tested in tests/e2e/test_remote_code_families.py.
    elsewhere |= {f"{name}ForCausalLM" for name in ("Baichuan", "InternLM2", "InternLM3")}
    elsewhere |= {f"{name}ForCausalLM" for name in ("BailingMoe", "BailingMoeV2", "Deepseek")}
    elsewhere |= {f"{name}ForCausalLM" for name in ("Exaone", "MiMo", "MiniCPM")}
    elsewhere |= {"ChatGLMModel"}
    elsewhere |= {
        *TEXT_TYPES,
        "MllamaForCausalLM",
        "TransformersForConditionalGeneration",
    }  # tested in tests/e2e/test_text_of_images.py
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *elsewhere} - NOT_SAVED
    # An older release of transformers (`make test-vendor`) does not have all families.
    assert (decoders - compared) & known == elsewhere


def test_an_unknown_architecture_is_named_with_near_matches_and_where_the_list_is():
    with pytest.raises(ConfigError) as caught:
        ModelRegistry.resolve("Qwen2NoForCausalLM")
    message = str(caught.value)
    assert "'Qwen2NoForCausalLM' is not supported" in message
    (near,) = re.search(r"nearest: (.+?)\)\. ", message).groups()
    assert "Qwen2ForCausalLM" in near.split(", ")
    assert "docs/supported_models.md" in message
    assert "\n" not in message and len(message) < 500


def test_plug_ins_are_classes_or_paths():
    class Other:
        pass

    registry = EmptyRegistry()
    registry.register_model("A", Other)
    registry.register_model("B", "collections:OrderedDict")
    assert registry.supported() == ["A", "B"]
    assert registry.resolve("A") is Other
    assert registry.resolve("B").__name__ == "OrderedDict"


@pytest.mark.parametrize("path", ["no_such_module:Class", "collections:NoSuchClass"])
def test_a_plug_in_that_cannot_be_imported_is_a_config_error(path):
    registry = EmptyRegistry()
    registry.register_model("A", path)
    with pytest.raises(ConfigError, match=f"model 'A': cannot import '{path}'"):
        registry.resolve("A")


def test_a_path_without_a_class_is_refused():
    with pytest.raises(ConfigError, match="expected 'module:Class', got 'collections'"):
        EmptyRegistry().register_model("A", "collections")


def test_the_registry_imports_no_torch():
    code = (
        "import sys, vllm.model_executor.models.registry as r; "
        "r.ModelRegistry.supported(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
