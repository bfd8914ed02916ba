"""Test reading config.json: overrides, defaults of the model type, and errors of one line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tiny_models import ALL_FAMILIES, FAMILY_CONFIGS, tiny_config
from vllm.assets import BUNDLED_MODEL
from vllm.config import ModelArch
from vllm.config.families import family_of, usual_architecture
from vllm.errors import ConfigError
from vllm.model_executor.models.registry import ModelRegistry
from vllm.transformers_utils.hf_config import (
    complete_hf_config,
    is_known_to_transformers,
    read_hf_config,
)
from vllm.transformers_utils.transformers_version import is_version_4

CONFIG = json.loads((BUNDLED_MODEL / "config.json").read_text())


def skip_if_unknown(architecture: str) -> None:
    """Skip a test of a model that an older transformers does not have."""
    if not is_known_to_transformers(architecture):
        pytest.skip("this transformers does not know it")


def write(folder: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "config.json").write_text(text)
    return folder


def load(folder: Path, *, trust: bool = False, **overrides: Any) -> dict[str, Any]:
    return complete_hf_config(read_hf_config(folder, overrides), folder, trust_remote_code=trust)


def test_defaults_of_the_model_type_are_filled_in(tmp_path):
    shorter = {k: v for k, v in CONFIG.items() if k != "hidden_act"}
    assert load(write(tmp_path, shorter))["hidden_act"] == "silu"


@pytest.mark.skipif(is_version_4(), reason="its configs do not name the types of their fields")
def test_values_of_other_types_that_mean_the_same_are_read(tmp_path):
    config = CONFIG | {"rms_norm_eps": 1, "attention_bias": 0, "head_dim": 32.0, "mlp_bias": 4}
    found = load(write(tmp_path, config))
    read = {key: found[key] for key in ("rms_norm_eps", "attention_bias", "head_dim", "mlp_bias")}
    assert repr(read) == (
        "{'rms_norm_eps': 1.0, 'attention_bias': False, 'head_dim': 32, 'mlp_bias': True}"
    )


@pytest.mark.skipif(is_version_4(), reason="its configs do not name the types of their fields")
@pytest.mark.parametrize(
    "key",
    [
        *("rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias", "tie_word_embeddings"),
        *("rope_scaling", "rope_parameters", "rope_theta", "head_dim", "text_config"),
    ],
)
def test_null_is_the_same_as_an_absent_key(tmp_path, key):
    absent = {name: value for name, value in CONFIG.items() if name != key}
    want, found = (
        replace(ModelArch.from_hf(load(write(tmp_path, config))), hf_config={})
        for config in (absent, absent | {key: None})
    )
    assert found == want


@pytest.mark.skipif(is_version_4(), reason="its configs do not name the types of their fields")
def test_sizes_that_are_null_mean_what_they_did_in_older_releases(tmp_path):
    config = tiny_config("mistral").to_dict() | {"architectures": ["MistralForCausalLM"]}
    config |= {"num_key_value_heads": None}
    assert load(write(tmp_path, config))["num_key_value_heads"] == config["num_attention_heads"]
    config = tiny_config("qwen3").to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    found = load(write(tmp_path, config | {"max_window_layers": None}))
    assert found["max_window_layers"] == CONFIG_MAPPING["qwen3"]().max_window_layers


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "glm4_moe"])
def test_a_rotary_base_may_be_null_in_every_family(tmp_path, family):
    if family not in FAMILY_CONFIGS:
        pytest.skip("this transformers does not know it")
    config = tiny_config(family).to_dict()
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
    config.pop("rope_parameters", None)
    config.pop("rope_theta", None)
    want, found = (
        ModelArch.from_hf(load(write(tmp_path, each))).layer_ropes
        for each in (config, config | {"rope_theta": None, "rope_local_base_freq": None})
    )
    assert found == want and any(found)


def test_the_architecture_implies_the_model_type(tmp_path):
    want = load(write(tmp_path, CONFIG))
    for absent in ({"model_type": None}, {}):
        rest = {name: value for name, value in CONFIG.items() if name != "model_type"}
        assert load(write(tmp_path, rest | absent)) == want


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # transformers converts head_dim of one
def test_sizes_that_are_whole_floats_are_integers(tmp_path, family):
    config = tiny_config(family).to_dict() | {"head_dim": 16, "intermediate_size": 176}
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    floats = {key: float(config[key]) for key in ("head_dim", "hidden_size", "intermediate_size")}
    want, found = (
        ModelArch.from_hf(load(write(tmp_path, each))) for each in (config, config | floats)
    )
    assert repr(found) == repr(want)


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_values_of_a_language_model_may_be_in_a_config_of_their_own(tmp_path, key):
    rest = {name: value for name, value in CONFIG.items() if name != "architectures"}
    nested = {"architectures": CONFIG["architectures"], "model_type": "llama", key: rest}
    assert load(write(tmp_path, nested)) == load(write(tmp_path, CONFIG))


@pytest.mark.skipif(is_version_4(), reason="its configs do not name the types of their fields")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention_bias": "false"}, "'attention_bias' must be true or false, got 'false'"),
        ({"vocab_size": None}, "'vocab_size' must be an integer, got None"),
        (
            {"eos_token_id": "2"},
            "'eos_token_id' must be an integer or a list of integers or null, got '2'",
        ),
        ({"eos_token_id": [None]}, r"'eos_token_id' must be .*, got \[None\]"),
        ({"pad_token_id": "0"}, "'pad_token_id' must be an integer or null, got '0'"),
    ],
)
def test_a_value_of_a_type_that_transformers_does_not_take_is_named(tmp_path, values, message):
    with pytest.raises(ConfigError, match=f"^config.json: {message}. Correct the file, or give"):
        load(write(tmp_path, CONFIG | values))


def test_a_model_type_by_another_published_name_is_the_usual_one(tmp_path):
    named = CONFIG | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    usual = CONFIG | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    found = load(write(tmp_path, named))
    assert found["model_type"] == "deepseek_v3"
    assert found == load(write(tmp_path, usual))


@pytest.mark.parametrize(
    ("name", "is_known"),
    [("PhimoeForCausalLM", True), ("PhiMoEForCausalLM", True), ("PhiMOEForCausalLM", False)],
)
def test_transformers_is_asked_for_the_usual_name(name, is_known):
    assert is_known_to_transformers(name) == is_known


SIZES = {"vocab_size": 512, "hidden_size": 64, "bos_token_id": 1, "eos_token_id": 2}
RW = SIZES | {"n_layer": 2, "n_head": 4, "parallel_attn": True, "alibi": False, "bias": False}
LLAMA = SIZES | {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
FALCON = SIZES | {"num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
MINIMAX = LLAMA | {"head_dim": 32, "rotary_dim": 16, "num_key_value_heads": 2}
DBRX = {
    "architectures": ["DbrxForCausalLM"],
    "model_type": "dbrx",
    "vocab_size": 64,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 128,
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 500000},
    "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
}
HUNYUAN = LLAMA | {"num_experts": 4, "moe_topk": [2, 2], "eod_token_id": 2, "pad_token_id": 0}
PHI3 = LLAMA | {"model_type": "phi3", "pad_token_id": 0, "max_position_embeddings": 4096}
PHI3 |= {"original_max_position_embeddings": 2048}
OLD_FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Falcon 40B": (
        RW | {"architectures": ["RWForCausalLM"], "model_type": "RefinedWeb", "n_head_kv": 2},
        FALCON | {"num_kv_heads": 2, "new_decoder_architecture": True, "model_type": "falcon"},
    ),
    "Falcon 7B": (
        RW | {"architectures": ["RWForCausalLM"], "model_type": "RefinedWebModel"},
        FALCON | {"multi_query": True, "model_type": "falcon"},
    ),
    "Falcon RW": (
        RW
        | {"architectures": ["RWForCausalLM"], "model_type": "RefinedWebModel", "alibi": True}
        | {"multi_query": False, "parallel_attn": False, "bias": True},
        FALCON
        | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
        | {"model_type": "falcon"},
    ),
    "Llama 1": (
        LLAMA | {"architectures": ["LLaMAForCausalLM"], "model_type": "llama", "pad_token_id": -1},
        LLAMA | {"model_type": "llama", "max_position_embeddings": 2048},
    ),
    "InternLM": (
        LLAMA
        | {"architectures": ["InternLMForCausalLM"], "model_type": "internlm", "bias": True}
        | {"auto_map": {"AutoConfig": "configuration_internlm.InternLMConfig"}},
        LLAMA | {"model_type": "llama", "attention_bias": True},
    ),
    "Aquila": (
        LLAMA | {"architectures": ["AquilaForCausalLM"], "model_type": "aquila"},
        LLAMA | {"model_type": "llama"},
    ),
    "XVERSE": (
        LLAMA | {"architectures": ["XverseForCausalLM"], "model_type": "xverse"},
        LLAMA | {"model_type": "llama"},
    ),
    "Yi": (
        LLAMA | {"architectures": ["YiForCausalLM"], "model_type": "Yi", "rope_theta": 5e6},
        LLAMA | {"model_type": "llama", "rope_theta": 5e6},
    ),
    "StableLM": (
        LLAMA
        | {"architectures": ["StableLMEpochForCausalLM"], "model_type": "stablelm_epoch"}
        | {"rope_pct": 0.5, "norm_eps": 1e-3, "num_key_value_heads": 4},
        LLAMA
        | {"model_type": "stablelm", "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-3}
        | {"num_key_value_heads": 4},
    ),
    "MiniMax M2": (
        MINIMAX | {"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax"},
        MINIMAX | {"model_type": "minimax_m2"},
    ),
    "Hunyuan A13B": (
        HUNYUAN
        | {"architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan"}
        | {"attention_head_dim": 32},
        HUNYUAN | {"model_type": "hunyuan_v1_moe", "head_dim": 32},
    ),
    "DBRX": (
        DBRX,
        DBRX
        | {"num_key_value_heads": 2, "rope_theta": 500000, "intermediate_size": 96}
        | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Phi 3 of 128k": (
        PHI3 | {"architectures": ["Phi3ForCausalLM"], "rope_scaling": FACTORS | {"type": "su"}},
        PHI3 | {"rope_scaling": FACTORS | {"type": "longrope"}},
    ),
}
"""Model -> what its first config.json says, and the same in the words of transformers."""


def test_the_architecture_may_be_in_the_config_of_the_text(tmp_path):
    """transformers 4.57 saves it there for Qwen2-VL."""
    name = ["Qwen2VLForConditionalGeneration"]
    text = {key: value for key, value in LLAMA.items() if key != "architectures"}
    text["model_type"] = "qwen2_vl_text"
    whole = {"model_type": "qwen2_vl", "vision_config": {}, "architectures": name}
    usual = read_hf_config(write(tmp_path, {**whole, "text_config": text}), {})
    del whole["architectures"]
    found = read_hf_config(
        write(tmp_path, {**whole, "text_config": {**text, "architectures": name}}), {}
    )
    assert found == usual
    assert found["architectures"] == name


@pytest.mark.parametrize("name", OLD_FILES)
def test_the_first_config_of_a_model_is_read_as_transformers_spells_it(name, tmp_path):
    old, usual = OLD_FILES[name]
    usual = {**usual, "architectures": [usual_architecture(old["architectures"][0])]}
    assert usual["architectures"][0] in ModelRegistry.supported()
    if name in ("MiniMax M2", "Hunyuan A13B"):
        skip_if_unknown(usual["architectures"][0])
    found, expected = (load(write(tmp_path, content)) for content in (old, usual))
    arch, same = ModelArch.from_hf(found), ModelArch.from_hf(expected)
    spelled = arch.hf_config["model_type"], arch.hf_config.get("attention_bias")
    assert spelled == (same.hf_config["model_type"], same.hf_config.get("attention_bias"))
    of_files = {"hf_config": {}, "architecture": ""}
    assert replace(arch, **of_files) == replace(same, **of_files)


def test_the_result_is_plain_data(tmp_path):
    text = json.dumps(load(write(tmp_path, CONFIG)))
    assert json.loads(text)["vocab_size"] == CONFIG["vocab_size"]


def test_overrides_replace_values(tmp_path):
    folder = write(tmp_path, CONFIG)
    assert load(folder)["max_position_embeddings"] == 2048
    config = load(folder, max_position_embeddings=4096)
    assert config["max_position_embeddings"] == 4096


def test_overrides_of_a_multimodal_model_may_be_nested(tmp_path):
    whole = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    folder = write(tmp_path, whole | {"text_config": CONFIG, "vision_config": {}})
    nested = load(folder, text_config={"max_position_embeddings": 512})
    assert nested["max_position_embeddings"] == 512
    assert nested == load(folder, max_position_embeddings=512)


def test_defaults_of_rotations_do_not_replace_those_of_the_file(tmp_path):
    skip_if_unknown("GptOssForCausalLM")
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    rope |= {"rope_theta": 3.0, "truncate": False}
    content = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}
    content |= {"max_position_embeddings": 512, "rope_parameters": rope}
    found = ModelArch.from_hf(load(write(tmp_path, content))).rope
    assert (found.theta, found.scaling["factor"]) == (3.0, 4.0)
    assert found.scaling["original_max_position_embeddings"] == 128


NEW_LAYER_TYPES = {
    "model_type": "granitemoehybrid",
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
}
NEW_SECTIONS = {
    "model_type": "dbrx",
    "architectures": ["DbrxForCausalLM"],
    "n_layers": 2,
    "attn_config": {"kv_n_heads": 3, "clip_qkv": 0.5, "id2label": {"0": "A"}, "return_dict": True},
    "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 64, "is_encoder_decoder": False},
}


def test_what_transformers_5_has_written_is_read_with_both_releases(tmp_path):
    skip_if_unknown("GraniteMoeHybridForCausalLM")
    arch = ModelArch.from_hf(load(write(tmp_path, NEW_LAYER_TYPES)))
    assert arch.state_layers == (True, False)
    config = load(write(tmp_path, NEW_SECTIONS))
    assert (config["attn_config"]["kv_n_heads"], config["attn_config"]["clip_qkv"]) == (3, 0.5)
    assert config["ffn_config"]["ffn_hidden_size"] == 48


NEW_TO_TRANSFORMERS = [
    family
    for family in ALL_FAMILIES
    if family_of(tiny_config(family).model_type).config_class is not None
]


@pytest.mark.skipif(is_version_4(), reason="this transformers does not know the families")
@pytest.mark.parametrize("family", NEW_TO_TRANSFORMERS)
def test_families_that_transformers_does_not_know_are_read_alike(family, tmp_path, monkeypatch):
    config = tiny_config(family)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(tmp_path)
    want = ModelArch.from_hf(load(tmp_path))
    monkeypatch.delitem(CONFIG_MAPPING._mapping, config.model_type)
    found = ModelArch.from_hf(load(tmp_path))
    has_size = "intermediate_size" in want.hf_config  # otherwise no layer has an MLP
    size = found.intermediate_size if has_size else want.intermediate_size
    assert replace(found, hf_config=want.hf_config, intermediate_size=size) == want


@pytest.mark.parametrize("spelling", ["rope_theta", "rope_parameters"])
def test_rope_overrides_reach_both_spellings_of_the_file(tmp_path, spelling):
    content = {k: v for k, v in CONFIG.items() if k != "rope_theta"}
    content |= {
        "rope_theta": {"rope_theta": 3.0},
        "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}},
    }[spelling]
    folder = write(tmp_path, content)
    assert ModelArch.from_hf(load(folder)).rope.theta == 3.0
    assert ModelArch.from_hf(load(folder, rope_theta=5.0)).rope.theta == 5.0
    scaling = {"rope_type": "linear", "factor": 2.0}
    arch = ModelArch.from_hf(load(folder, rope_scaling=scaling))
    assert (arch.rope.theta, arch.rope.rope_type) == (3.0, "linear")
    assert arch.derived_max_model_len == 4096


OWN_CODE = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
DAMAGED = [
    ("{", r"config\.json is not valid JSON: .* at line 1 column 2"),
    ("[]", r"config\.json holds a JSON list, not an object"),
    ({**CONFIG, "model_type": "lama"}, "model_type 'lama' of .*: transformers .* does not support"),
    ({**CONFIG, "model_type": None, "architectures": ["Own"]}, "has no 'model_type', the family"),
    ({**CONFIG, **OWN_CODE}, "model_type 'own' of .*: the model has its own code"),
    (
        {**CONFIG, "hidden_size": "wide"},
        "'hidden_size' must be an integer from 1 to 1048576, got 'wide'",
    ),
    ({**CONFIG, "rope_scaling": {"rope_type": "linear"}}, "Missing required keys"),
]


NAN, INFINITY = float("nan"), float("inf")
OF_ANOTHER_KIND = [
    ({"auto_map": 5}, "'auto_map' must be an object, or null, got 5. Correct the file"),
    ({"quantization_config": "x"}, "'quantization_config' must be an object"),
    ({"rope_scaling": []}, "'rope_scaling' must be an object"),
    ({"dtype": 5}, "'dtype' must be a string"),
    ({"model_type": ["llama"]}, "'model_type' must be a string"),
    ({"layer_types": 2**40}, "'layer_types' must be a list of strings, or null, got 1099511627776"),
    ({"mlp_layer_types": [1]}, r"'mlp_layer_types' must be a list of strings, or null, got \[1\]"),
    (
        {"moe_intermediate_size": [64, 0.5]},
        r"'moe_intermediate_size' must be an integer .*, got \[64, 0\.5\]",
    ),
    ({"rope_scaling": {"type": "dynamic", "alpha": -1}}, "'rope_scaling.alpha' must be a number"),
    (
        {"layer_types": [None] * 100},
        r"'layer_types' must be a list of strings, .* None, N\.\.\.\. Correct",
    ),
    ({"routed_scaling_factor": NAN}, "'routed_scaling_factor' must be a number, or null, got nan"),
    ({"rms_norm_eps": INFINITY}, "'rms_norm_eps' must be a number of 0 or more, or null, got inf"),
    ({"query_pre_attn_scalar": -1}, "'query_pre_attn_scalar' must be a number above 0"),
    ({"attn_logit_softcapping": 0.0}, "'attn_logit_softcapping' must be a number above 0"),
    ({"layers_block_type": 7}, "'layers_block_type' must be a list of strings, or null, got 7"),
    ({"hybrid_override_pattern": 7}, "'hybrid_override_pattern' must be a string, or null, got 7"),
    ({"attn_layer_indices": 7}, "'attn_layer_indices' must be a list of layers, or null, got 7"),
    ({"mlp_only_layers": ["a"]}, r"'mlp_only_layers' must be a list of layers, .* \['a'\]"),
    ({"hidden_act": ["silu"]}, "'hidden_act' must be a string"),
    ({"partial_rotary_factor": 1.5}, "'partial_rotary_factor' must be a number from 0 to 1"),
    ({"rotary_pct": "x"}, "'rotary_pct' must be a number from 0 to 1, or null, got 'x'"),
    ({"rope_scaling": {"type": []}}, r"'rope_scaling.type' must be a string, or null, got \[\]"),
    ({"rope_scaling": {"mscale": "x"}}, "'rope_scaling.mscale' must be a number of 0 or more"),
    ({"rope_scaling": {"beta_fast": -1}}, "'rope_scaling.beta_fast' must be a number above 0"),
    (
        {"linear_attn_config": {"head_dim": 2**40}},
        "'linear_attn_config.head_dim' must be an integer from 1 to",
    ),
    ({"linear_num_value_heads": -1}, "'linear_num_value_heads' must be an integer from 1 to"),
    (
        {"rope_scaling": {"original_max_position_embeddings": 1}},
        "'rope_scaling.original_max_position_embeddings' must be a number of tokens",
    ),
    ({"attention_chunk_size": -1}, "'attention_chunk_size' must be an integer from 1 to"),
    ({"rms_norm_eps": -1e-5}, "'rms_norm_eps' must be a number of 0 or more"),
    ({"layer_norm_eps": True}, "'layer_norm_eps' must be a number of 0 or more"),
    ({"rope_theta": INFINITY}, "'rope_theta' must be a number above 0, or null, got inf"),
    ({"rope_theta": 0}, "'rope_theta' must be a number above 0"),
    (
        {"rope_scaling": {"factor": 2.0}},
        "'rope_scaling.factor' is 2.0, but 'rope_scaling.rope_type' is missing. Add the type",
    ),
    ({"rope_theta": 10**400}, "'rope_theta' must be a number above 0"),
    ({"rope_parameters": {"rope_theta": "x"}}, r"'rope_parameters\.rope_theta' must be a number"),
    ({"rope_scaling": {"factor": "x"}}, r"'rope_scaling\.factor' must be a number above 0"),
    (
        {"rope_parameters": {"full_attention": 5}},
        r"'rope_parameters\.full_attention' must be an obj",
    ),
    (
        {"rope_parameters": {"sliding_attention": {"factor": NAN}}},
        r"'rope_parameters\.sliding_attention\.factor' must be a number above 0",
    ),
]


@pytest.mark.parametrize(("values", "message"), OF_ANOTHER_KIND)
def test_a_value_of_another_kind_is_named(tmp_path, values, message):
    with pytest.raises(ConfigError, match=f"^config.json: {message}"):
        read_hf_config(write(tmp_path, CONFIG | values), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "it is nested too deeply"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "a number that is too long"),
    ],
)
def test_json_that_python_cannot_read_is_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=f"config.json .*{message}"):
        read_hf_config(write(tmp_path, text), {})


@pytest.mark.parametrize(("content", "message"), DAMAGED)
def test_a_damaged_config_is_an_error_on_one_line(tmp_path, content, message):
    with pytest.raises(ConfigError, match=message) as failure:
        # Transformers 4 accepts values of wrong types.
        ModelArch.from_hf(load(write(tmp_path, content)))
    assert "\n" not in str(failure.value)


def test_an_unknown_dtype_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"'torch_dtype' must be one of bfloat16, .*, got 'fp12'"):
        load(write(tmp_path, CONFIG | {"torch_dtype": "fp12"}))


def test_a_mark_of_the_byte_order_is_left_out(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8-sig")
    assert load(tmp_path) == load(write(tmp_path, CONFIG))


def test_a_folder_without_config_is_named(tmp_path):
    with pytest.raises(ConfigError) as failure:
        load(tmp_path)
    assert str(failure.value) == (
        f"model folder '{tmp_path}' has no config.json. Name the folder of a checkpoint, which "
        f"contains config.json, or a GGUF file"
    )


def test_code_of_the_model_runs_only_when_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    folder = write(tmp_path, {**CONFIG, **OWN_CODE, "max_position_embeddings": 512})
    (folder / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\n"
        "class OwnConfig(LlamaConfig):\n"
        "    model_type = 'own'\n"
    )
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load(folder)
    config = load(folder, trust=True, hidden_act="gelu")
    assert (config["model_type"], config["hidden_act"]) == ("own", "gelu")
    assert config["max_position_embeddings"] == 512


def test_own_code_can_come_from_another_folder_than_the_values(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    values, code = tmp_path / "values", tmp_path / "code"
    for folder, default in ((values, 1), (code, 2)):
        folder.mkdir()
        (folder / "configuration_own.py").write_text(
            "from transformers import PretrainedConfig\n"
            "class OwnConfig(PretrainedConfig):\n"
            "    model_type = 'own'\n"
            f"    default = {default}\n"
            "    def __init__(self, **values):\n"
            "        super().__init__(**values)\n"
            "        self.added = self.default\n"
        )
    raw = read_hf_config(write(values, {**CONFIG, **OWN_CODE, "hidden_act": "relu"}), {})
    found = [
        complete_hf_config(raw, values, trust_remote_code=True, code_folder=folder)
        for folder in (None, code)
    ]
    assert [(config["added"], config["hidden_act"]) for config in found] == [
        (1, "relu"),
        (2, "relu"),
    ]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "LlamaForCausalLM"),
        ({"architectures": None, "model_type": "qwen2"}, "Qwen2ForCausalLM"),
        ({"architectures": [], "model_type": "RefinedWeb"}, "FalconForCausalLM"),
        ({"model_type": "bert"}, "BertModel"),
        ({"model_type": "diffllama"}, "DiffLlamaForCausalLM"),
        ({"architectures": ["FSDPPhi3ForCausalLM"], "model_type": "phi3"}, "Phi3ForCausalLM"),
        ({"architectures": ["PeftModelForCausalLM"], "model_type": "gemma2"}, "Gemma2ForCausalLM"),
        ({"architectures": ["LlamaModel"]}, "LlamaModel"),
        ({"architectures": ["MyModel", 5, "Qwen2ForCausalLM"]}, "Qwen2ForCausalLM"),
        ({"architectures": ["MyModel", "OtherModel"]}, "MyModel"),
        ({"architectures": ["FSDPNopeForCausalLM"]}, "FSDPNopeForCausalLM"),
        # Several classes, none that generates, and values that are an error.
        ({"model_type": "bailing_moe"}, None),
        ({"model_type": "t5"}, None),
        ({"model_type": "clip"}, None),
        ({"architectures": "Llama"}, "L"),
    ],
)
def test_a_missing_architecture_follows_from_the_model_type(tmp_path, values, name):
    config = {key: value for key, value in CONFIG.items() if key != "architectures"} | values
    found = read_hf_config(write(tmp_path, config), {}).get("architectures")
    assert (found[0] if found else None) == name


def test_an_override_of_the_model_type_names_the_class(tmp_path):
    config = {key: value for key, value in CONFIG.items() if key != "architectures"}
    overrides = {"model_type": "mistral"}
    assert read_hf_config(write(tmp_path, config), overrides)["architectures"] == [
        "MistralForCausalLM"
    ]
