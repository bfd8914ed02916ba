"""Test that ModelArch reads configs of transformers 4 and 5 alike."""

import dataclasses
import re

import pytest
import torch
from transformers import AutoConfig, AutoModel

from tests.tiny_models import FAMILIES, WINDOWS_ALL_LAYERS_OR_NONE
from vllm.config import ModelArch
from vllm.errors import ConfigError


def as_transformers_4(config: dict) -> dict:
    """Return the same config as transformers 4.5x spells it."""
    config = dict(config)
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    rope = dict(config.pop("rope_parameters", None) or {})
    if rope:
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config.pop("layer_types", None)
    return config


def as_transformers_5(config: dict) -> dict:
    """Return the same config as transformers 5 spells it."""
    config = dict(config)
    if "torch_dtype" in config:
        config["dtype"] = config.pop("torch_dtype")
    if "rope_theta" in config:
        rope = {"rope_type": "default", **(config.pop("rope_scaling", None) or {})}
        config["rope_parameters"] = {**rope, "rope_theta": config.pop("rope_theta")}
    return config


def facts(arch: ModelArch) -> dict:
    values = {f.name: getattr(arch, f.name) for f in dataclasses.fields(arch)}
    values.pop("hf_config")
    return values


@pytest.mark.parametrize("family", FAMILIES)
def test_both_spellings_mean_the_same(tiny_model, family):
    config = AutoConfig.from_pretrained(tiny_model(family)).to_dict()
    new = ModelArch.from_hf(as_transformers_5(config))
    assert facts(ModelArch.from_hf(as_transformers_4(config))) == facts(new)
    assert new.derived_max_model_len == {"llama_linear": 2048, "llama_yarn": 512}.get(family, 512)


def test_windows_of_layers(tiny_model):
    def windows(family):
        return ModelArch.from_hf(
            AutoConfig.from_pretrained(tiny_model(family)).to_dict()
        ).layer_windows

    assert windows("mistral") == (16, 16)
    assert windows("qwen2") == (None, 16)
    assert windows("llama") == (None, None, None)


TINY = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "sliding_window": 8,
    "pad_token_id": 0,
}
TYPES = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("llama", {}),
        ("mistral", {}),
        ("mistral", {"sliding_window": None}),
        ("ministral", {"layer_types": TYPES, "head_dim": 8}),
        *(
            (model_type, values)
            for model_type in ("qwen2", "qwen3")
            for values in (
                {},
                {"use_sliding_window": False},
                {"use_sliding_window": True},
                {"use_sliding_window": True, "max_window_layers": 1},
                {"use_sliding_window": True, "layer_types": TYPES},
                {"use_sliding_window": True, "sliding_window": None},
                {"layer_types": TYPES},
            )
        ),
    ],
)
def test_layers_have_the_windows_that_transformers_gives_them(model_type, values):
    if WINDOWS_ALL_LAYERS_OR_NONE and {"layer_types", "max_window_layers"} & values.keys():
        pytest.skip("transformers 4 has no windows of some layers only")
    config = AutoConfig.for_model(model_type, **TINY | values)
    with torch.device("meta"):
        layers = AutoModel.from_config(config).layers
    # The layers of Mistral have no attribute for their window: each layer reads the config.
    of_all = config.sliding_window if model_type == "mistral" else None
    expected = tuple(getattr(layer.self_attn, "sliding_window", of_all) for layer in layers)
    arch = {"architectures": ["A"], "model_type": model_type, "max_position_embeddings": 64}
    # First the values of config.json, then the values that transformers adds.
    assert ModelArch.from_hf({**config.to_dict(), **arch}).layer_windows == expected
    raw = {"max_window_layers": 28, **TINY, **values, **arch}
    assert ModelArch.from_hf(raw).layer_windows == expected


@pytest.mark.parametrize(
    "name", ["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"]
)
def test_the_epsilon_of_norms_is_read_under_every_name(name):
    assert ModelArch.from_hf(minimal(**{name: 0.25})).norm_eps == 0.25


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "bert", "roberta"])
def test_the_epsilon_of_norms_is_that_of_transformers(model_type):
    config = AutoConfig.for_model(model_type, **TINY)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    norms = [module for module in model.modules() if type(module).__name__.endswith("Norm")]
    epsilons = {getattr(norm, "eps", None) or norm.variance_epsilon for norm in norms}
    arch = ModelArch.from_hf({**config.to_dict(), "architectures": ["A"]})
    assert epsilons == {arch.norm_eps}


def minimal(**values):
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 16,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        **values,
    }


@pytest.mark.parametrize("kind", ["yarn", "llama3", "dynamic"])
def test_a_context_that_was_not_stretched_yet_is_the_original_one(kind):
    scaling = {"type": kind, "factor": 4.0}
    rope = ModelArch.from_hf(minimal(rope_scaling=scaling)).rope
    assert rope is not None and rope.rope_type == kind
    assert rope.scaling == {"factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 128),
        ({"rope_type": "linear", "factor": 2.0}, 256),
        ({"rope_type": "dynamic", "factor": 2.0}, 256),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 4.0}, 512),
    ],
)
def test_longest_sequence(scaling, length):
    assert ModelArch.from_hf(minimal(rope_scaling=scaling)).derived_max_model_len == length


@pytest.mark.parametrize("rope_type", ["yarn", "llama3"])
@pytest.mark.parametrize("inside", [{}, {"original_max_position_embeddings": 16}])
def test_the_original_length_beside_the_parameters_goes_before_the_one_in_them(rope_type, inside):
    scaling = {"rope_type": rope_type, "factor": 4.0, **inside}
    arch = ModelArch.from_hf(minimal(rope_scaling=scaling, original_max_position_embeddings=32))
    assert arch.rope.scaling["original_max_position_embeddings"] == 32


@pytest.mark.parametrize(
    ("model_type", "hidden_act"),
    [("llama", "gelu"), ("gemma2", "gelu_pytorch_tanh"), ("mistral", "gelu")],
)
def test_the_key_of_the_activation_is_that_of_the_family(model_type, hidden_act):
    given = {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}
    found = ModelArch.from_hf(minimal(model_type=model_type, **given))
    assert found.hidden_act == hidden_act


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": None}, "has no 'architectures'"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_size": 66}, r"hidden_size \(66\).*num_attention_heads \(4\)"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\).*num_key_value_heads \(3\)"),
    ],
)
def test_a_bad_config_is_named(values, message):
    with pytest.raises(ConfigError, match=message):
        ModelArch.from_hf(minimal(**values))


@pytest.mark.parametrize(
    ("values", "accepted"),
    [
        ({"num_hidden_layers": 2**40}, "an integer from 1 to 1024"),
        ({"num_hidden_layers": 0}, "an integer from 1 to 1024"),
        ({"num_hidden_layers": -1}, "an integer from 1 to 1024"),
        ({"num_hidden_layers": True}, "an integer from 1 to 1024"),
        ({"n_layer": 10**8}, "an integer from 1 to 1024"),
        ({"hidden_size": 2**40}, "an integer from 1 to 1048576"),
        ({"hidden_size": 64.5}, "an integer from 1 to 1048576"),
        ({"vocab_size": 2**40}, "an integer from 1 to 67108864"),
        ({"vocab_size": -16}, "an integer from 1 to 67108864"),
        ({"num_attention_heads": 0}, "an integer from 1 to 65536"),
        ({"num_attention_heads": -4}, "an integer from 1 to 65536"),
        ({"num_key_value_heads": [2, 4]}, "an integer from 1 to 65536"),
        ({"head_dim": -16}, "an integer from 1 to 16384"),
        ({"intermediate_size": -64}, "an integer from 0 to 1048576"),
        ({"max_position_embeddings": 2**40}, "an integer from 1 to 16777216"),
        ({"num_local_experts": 10**8}, "an integer from 0 to 65536"),
        ({"kv_lora_rank": 2**40}, "an integer from 0 to 1048576"),
    ],
)
def test_a_size_that_no_model_has_is_refused_before_anything_is_made_of_it(values, accepted):
    ((name, value),) = values.items()
    message = re.escape(f"config.json: '{name}' must be {accepted}, got {value!r}")
    with pytest.raises(ConfigError, match=message):
        ModelArch.from_hf(minimal(**values))


def test_layers_times_experts_and_stretched_positions_are_bounded():
    with pytest.raises(ConfigError, match=r"'num_hidden_layers' x 'num_experts' .* 1000 x"):
        ModelArch.from_hf(minimal(num_hidden_layers=1000, num_experts=40000))
    with pytest.raises(ConfigError, match="16777216 positions x 16384 dimensions"):
        ModelArch.from_hf(minimal(max_position_embeddings=2**24, head_dim=2**14))
    with pytest.raises(ConfigError, match="extends 128 positions to 128000000000; accepted: 1 to"):
        ModelArch.from_hf(minimal(rope_scaling={"rope_type": "linear", "factor": 1e9}))


@pytest.mark.parametrize("window", [-3, 0, "wide", 2.5])
def test_a_window_that_is_no_number_of_tokens_is_refused(window):
    config = minimal(model_type="mistral", sliding_window=window)
    with pytest.raises(ConfigError, match=f"'sliding_window' must be .* got {window!r}"):
        ModelArch.from_hf(config)
    assert ModelArch.from_hf({**config, "model_type": "llama"}).layer_windows == (None,)


def test_layer_types_may_be_longer_but_not_shorter_than_the_layers():
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config = minimal(sliding_window=8, layer_types=kinds, num_hidden_layers=2)
    assert ModelArch.from_hf(config).layer_windows == (None, 8)
    config["num_hidden_layers"] = 4
    with pytest.raises(
        ConfigError,
        match=(
            r"layer_types has 3 entries; it must have one for each layer \(num_hidden_layers: 4\)"
        ),
    ):
        ModelArch.from_hf(config)


FULL, SLIDING = "full_attention", "sliding_attention"


def test_the_last_layers_read_the_last_one_of_their_kind_before_them():
    kinds = [SLIDING, SLIDING, FULL, SLIDING, FULL, SLIDING]
    config = minimal(sliding_window=8, layer_types=kinds, num_hidden_layers=6)
    assert ModelArch.from_hf(config).kv_sources == (None,) * 6
    shared = ModelArch.from_hf(config | {"num_kv_shared_layers": 3})
    assert shared.kv_sources == (None, None, None, 1, 2, 1)
    assert shared.is_one_stage and not ModelArch.from_hf(config).is_one_stage
    with pytest.raises(
        ConfigError, match="at least one layer of the kind 'full_attention' must compute"
    ):
        ModelArch.from_hf(config | {"num_kv_shared_layers": 4})
    with pytest.raises(ConfigError, match="must be from 0 to 5, got 6"):
        ModelArch.from_hf(config | {"num_kv_shared_layers": 6})


def test_layers_have_the_heads_that_the_config_gives_them():
    own = {"1": {"head_dim": 64, "num_key_value_heads": 1}}
    config = minimal(num_hidden_layers=2, head_dim=16, per_layer_config=own)
    arch = ModelArch.from_hf(config)
    sizes = arch.of_layer(1)
    assert (sizes.head_size, sizes.num_kv_heads) == (64, 1)
    assert arch.of_layer(0) is arch and arch.head_size == 16
    own["1"]["num_key_value_heads"] = 3
    with pytest.raises(ConfigError, match="layer 1 has head_dim 64 and num_key_value_heads 3"):
        ModelArch.from_hf(config)
    with pytest.raises(ConfigError, match="must be an object with an object for each layer, got"):
        ModelArch.from_hf(config | {"per_layer_config": ["wide"]})


def test_an_exaone_4_without_windows_has_rotations_in_all_layers():
    config = minimal(model_type="exaone4", num_hidden_layers=2, layer_types=[SLIDING, FULL])
    hybrid = ModelArch.from_hf(config | {"sliding_window": 8, "rope_theta": 1e4})
    plain = ModelArch.from_hf(config | {"sliding_window": None, "rope_theta": 1e4})
    assert [rope is None for rope in hybrid.layer_ropes] == [False, True]
    assert [rope is None for rope in plain.layer_ropes] == [False, False]


def test_the_mlps_of_layers_may_have_sizes_of_their_own():
    assert ModelArch.from_hf(minimal(intermediate_size=[32, 48])).intermediate_size == 48
    with pytest.raises(ConfigError, match="'intermediate_size' must be an integer"):
        ModelArch.from_hf(minimal(intermediate_size=[32, "wide"]))


def test_a_factor_of_the_config_is_a_finite_number():
    given = {"scale_emb": 12, "residual_multiplier": None, "scale_depth": "1.4", "swiglu_limit": []}
    arch = ModelArch.from_hf(minimal(**given, routed_scaling_factor=10**400, logit_scale=True))
    assert [arch.config_number(name) for name in ("scale_emb", "attn_scale")] == [12.0, 1.0]
    assert arch.config_number("residual_multiplier", 0.5) == 0.5
    for name in ("scale_depth", "swiglu_limit", "routed_scaling_factor", "logit_scale"):
        with pytest.raises(ConfigError, match=f"{name} in config.json must be a number, got "):
            arch.config_number(name)


def test_a_switch_may_be_an_integer(tiny_model):
    arch = ModelArch.from_hf(AutoConfig.from_pretrained(tiny_model("llama")).to_dict())
    arch.hf_config.update(on=True, off=False, absent=None, four=4, zero=0, text="false", half=0.5)
    flags = [arch.config_flag(name) for name in ("on", "off", "absent", "four", "zero", "unknown")]
    assert flags == [True, False, False, True, False, False]
    assert arch.config_flag("unknown", True)
    for name in ("text", "half"):
        with pytest.raises(ConfigError, match=f"'{name}' must be true or false"):
            arch.config_flag(name)
