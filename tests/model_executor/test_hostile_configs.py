"""Test that a wrong value of any key of config.json gives an error of one line that names the key,
never a traceback.

Configs are completed with the defaults of transformers first, and the value is changed afterwards:
older versions do not check what they read.
"""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.check_model_configs import read_configs
from vllm.config import ModelArch
from vllm.config.arch.model_arch import WHOLE_CONFIG
from vllm.config.arch.sizes import check_kinds
from vllm.config.families import family_of
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.model_executor.loader.model_loader import build_model
from vllm.model_executor.models.registry import ModelRegistry
from vllm.transformers_utils.hf_config import complete_hf_config, read_hf_config
from vllm.transformers_utils.transformers_version import is_version_4

HOSTILE: tuple[Any, ...] = (
    *("x", -1, 2**40, 1.5, True, float("inf")),
    *([], [1], [0.5], [None], ["x"], [1, "x"], {}, {"a": 1}),
)
FEW = (
    *("Gemma3nForConditionalGeneration", "Gemma4ForConditionalGeneration"),
    "MllamaForConditionalGeneration",
    *("Ernie4_5_MoeForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM"),
    *("Llama4ForConditionalGeneration", "KimiLinearForCausalLM", "HunYuanMoEV1ForCausalLM"),
    *("FalconForCausalLM", "MPTForCausalLM", "Exaone4ForCausalLM", "SmolLM3ForCausalLM"),
    *("DbrxForCausalLM", "MiMoV2FlashForCausalLM"),
    *("Qwen3NextForCausalLM", "MambaForCausalLM", "NemotronHForCausalLM"),
)
"""Architectures that are not left to the exhaustive run."""
_OF_ALL = PretrainedConfig().to_dict().keys() | {"architectures", "quantization_config"}
"""Keys that no family reads for itself."""


def published() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return for each architecture the name and the config of one published model."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, (config, files) in read_configs().items():
        architecture = config["architectures"][0]
        if not files and architecture in ModelRegistry.supported():
            found.setdefault(architecture, (name, config))
    return found


PUBLISHED = published()


def completed(config: dict[str, Any], folder: Any) -> dict[str, Any]:
    """Return a config with defaults; skip the test if transformers 4 does not know the family."""
    (folder / "config.json").write_text(json.dumps(config))
    raw = read_hf_config(folder, {})
    model_type = family_of(raw.get("model_type")).model_type
    if is_version_4() and model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no defaults for {model_type}")
    try:
        return complete_hf_config(raw, folder, trust_remote_code=False)
    except ConfigError as error:
        if is_version_4() and ("not support it" in str(error) or "own code" in str(error)):
            pytest.skip(str(error))
        raise


def build(config: dict[str, Any], architecture: str) -> None:
    check_kinds(config)
    arch = replace(ModelArch.from_hf(config), architecture=architecture)
    build_model(arch.for_length(64), TPGroup(), torch.bfloat16)


def wrong_values(
    config: dict[str, Any], architecture: str, shift: int, is_tower: bool = False
) -> list[str]:
    """Give each key another one of the hostile values. Return the values that were not refused
    properly.

    Args:
        config: config with all defaults.
        architecture: architecture of the model.
        shift: index of the value that the first key gets.
        is_tower: the keys are in `vision_config`.
    """
    faults = []
    whole = config.get(WHOLE_CONFIG)
    values = whole["vision_config"] if whole and is_tower else config
    for index, key in enumerate(sorted(values.keys() - _OF_ALL)):
        value = HOSTILE[(index + shift) % len(HOSTILE)]
        changed = {**values, key: value}
        if whole and is_tower:
            changed = {**config, WHOLE_CONFIG: {**whole, "vision_config": changed}}
        try:
            build(changed, architecture)
        except ConfigError as error:
            if "\n" in str(error):
                faults.append(f"{key}={value!r}: several lines: {error}")
        except Exception as error:
            faults.append(f"{key}={value!r}: {type(error).__name__}: {error}")
    return faults


@pytest.mark.parametrize("architecture", FEW)
def test_a_wrong_value_of_a_key_is_a_config_error(architecture, tmp_path):
    _, config = PUBLISHED[architecture]
    whole = completed(config, tmp_path)
    build(whole, architecture)
    for shift in (0, 7):
        assert wrong_values(whole, architecture, shift) == []


def test_a_wrong_value_of_a_tower_is_a_config_error(tmp_path):
    architecture = "MllamaForConditionalGeneration"
    whole = completed(PUBLISHED[architecture][1], tmp_path)
    assert whole[WHOLE_CONFIG]["vision_config"]
    build(whole, architecture)
    for shift in range(len(HOSTILE)):
        assert wrong_values(whole, architecture, shift, is_tower=True) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", PUBLISHED)
def test_all_wrong_values_of_all_keys_are_config_errors(architecture, tmp_path):
    _, config = PUBLISHED[architecture]
    whole = completed(config, tmp_path)
    for shift in range(len(HOSTILE)):
        assert wrong_values(whole, architecture, shift) == []


@pytest.mark.parametrize(
    ("architecture", "key", "value", "message"),
    [
        ("Ernie4_5_MoeForCausalLM", "moe_layer_interval", "x", "an integer from 0"),
        ("Ernie4_5_MoeForCausalLM", "moe_layer_end_index", [], "an integer from 0"),
        ("BailingMoeForCausalLM", "num_shared_experts", "x", "an integer from 0"),
        ("Gemma3nForConditionalGeneration", "intermediate_size", [64], "each of the 10 layers"),
        ("Gemma3nForConditionalGeneration", "activation_sparsity_pattern", ["x"] * 10, "'x'"),
        (
            "Gemma3nForConditionalGeneration",
            "layer_types",
            ["full_attention"],
            "layer_types has 1 entries",
        ),
        (
            "Gemma4ForConditionalGeneration",
            "layer_types",
            ["full_attention"],
            "layer_types has 1 entries",
        ),
        ("HunYuanMoEV1ForCausalLM", "moe_topk", [2], "each of the 2 layers, got 1"),
        ("Llama4ForConditionalGeneration", "no_rope_layers", [1], "each of the 4 layers, got 1"),
        ("Llama4ForConditionalGeneration", "moe_layers", "x", "a list of layers"),
        ("MllamaForConditionalGeneration", "cross_attention_layers", [4], "of the 4 layers"),
        ("MPTForCausalLM", "attn_config", [1], "an object"),
        ("MiniCPMForCausalLM", "num_experts", 8, "experts of MiniCPM-MoE are not supported"),
        ("MiMoV2FlashForCausalLM", "v_head_dim", 64, "at most head_dim"),
        ("DbrxForCausalLM", "ffn_config", {"moe_normalize_expert_weights": 2}, "null or 1"),
        ("DbrxForCausalLM", "ffn_config", {"ffn_act_fn": "gelu"}, "must have the name 'silu'"),
        ("DeciLMForCausalLM", "layer_intermediate_sizes", [1], "for each of the 2 layers, got 1"),
        ("DeciLMForCausalLM", "layers_with_mlp", {"a": 1}, "must be true or false"),
        ("Zamba2ForCausalLM", "attention_head_dim", 1.5, "an integer from 1 to 16384"),
        ("LongcatFlashForCausalLM", "num_layers", [], "an integer from 1 to 1024"),
        ("FalconMambaForCausalLM", "time_step_rank", 2**40, "an integer from 1 to 1048576"),
        ("LlamaForCausalLM", "attention_bias", "false", "must be true or false, got 'false'"),
        ("OlmoForCausalLM", "clip_qkv", "x", "must be a number, got 'x'"),
        ("PhiMoEForCausalLM", "rope_parameters", {"long_factor": [1, "x"]}, "a list of numbers"),
    ],
)
def test_the_message_names_the_key_and_what_it_may_be(architecture, key, value, message, tmp_path):
    whole = completed(PUBLISHED[architecture][1], tmp_path)
    with pytest.raises(ConfigError, match=message) as error:
        build({**whole, key: value}, architecture)
    assert key in str(error.value)
