"""Test the configs of hybrid models: which layers keep a recurrent state, and refused values."""

import json

import pytest

from tests.model_executor.helpers import load
from tests.tiny_models import make_tiny_model
from vllm.config import ModelArch
from vllm.errors import ConfigError
from vllm.transformers_utils.transformers_version import is_version_4

pytestmark = pytest.mark.skipif(is_version_4(), reason="this transformers knows too few of them")

NVIDIA = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M*E",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
"""A config as the class of NVIDIA completes it: the pattern is all it has of kinds of layers."""


def test_a_pattern_says_the_kinds_of_layers():
    arch = ModelArch.from_hf(NVIDIA)
    assert arch.num_layers == 5
    assert arch.state_layers == (True, False, True, False, False)
    assert arch.layer_kinds[1:] == ("mlp", "linear_attention", "full_attention", "moe")
    assert arch.rope is None, "attention has no positions, whatever the config says"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hybrid_override_pattern": "M-X"},
            "hybrid_override_pattern .* has 'X'; supported: 'M', ",
        ),
        (
            {"num_hidden_layers": 6},
            r"layer_types has 5 entries; it must have one for each layer \(num_hidden_layers: 6\)",
        ),
    ],
)
def test_a_pattern_that_says_too_little_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelArch.from_hf(NVIDIA | changes)


def test_layers_of_jamba_attend_by_their_period():
    sizes = {"attn_layer_period": 4, "attn_layer_offset": 1, "num_hidden_layers": 6}
    arch = ModelArch.from_hf(NVIDIA | sizes | {"model_type": "jamba"})
    assert [index for index, keeps in enumerate(arch.state_layers) if not keeps] == [1, 5]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "falcon_h1",
            {"mlp_multipliers": [1.0]},
            "mlp_multipliers .* must be a list of 2 numbers, got",
        ),
        (
            "falcon_h1",
            {"ssm_multipliers": [0.5] * 4},
            "ssm_multipliers .* must be a list of 5 numbers, got",
        ),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' .* supported: relu2"),
        ("jamba", {"attn_layer_period": 0}, "'attn_layer_period' must be an integer from 1"),
        ("lfm2", {"conv_L_cache": 0}, "'conv_L_cache' must be an integer from 1 to"),
    ],
)
def test_values_that_no_layer_has_are_refused(family, changes, message, tmp_path):
    folder = make_tiny_model(family, tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        load(folder)
