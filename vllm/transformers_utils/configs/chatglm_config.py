"""Convert config.json of ChatGLM 2 and 3 to the keys of GLM, which transformers knows."""

from collections.abc import Mapping
from typing import Any

from vllm.errors import ConfigError

_NAMES = {
    "padded_vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "rms_norm_eps",
    "seq_length": "max_position_embeddings",
    "add_qkv_bias": "attention_bias",
}
_ONLY = {
    "apply_residual_connection_post_layernorm": False,
    "post_layer_norm": True,
    "rmsnorm": True,
    "add_bias_linear": False,
    "pre_seq_len": None,
}
"""Settings that are supported with one value only, which is also their default."""
_THETA = 10000.0


def complete_chatglm_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return `raw` with GLM's keys in addition to its own.

    Raises:
        ConfigError: it is ChatGLM 1, or has a setting that is not supported.
    """
    if "padded_vocab_size" not in raw:
        raise ConfigError(
            "config.json of model_type 'chatglm' has no padded_vocab_size: the first ChatGLM is "
            "not supported, only ChatGLM 2, 3 and later"
        )
    for name, value in _ONLY.items():
        if raw.get(name, value) != value:
            raise ConfigError(
                f"config.json of model_type 'chatglm': {name}={raw[name]!r} is not supported; "
                f"supported: {value!r}"
            )
    completed = {theirs: raw[ours] for ours, theirs in _NAMES.items() if ours in raw}
    if raw.get("multi_query_attention"):
        completed["num_key_value_heads"] = raw.get("multi_query_group_num", 1)
    theta = _THETA * float(raw.get("rope_ratio", 1.0))
    rope = {"rope_theta": theta, "partial_rotary_factor": 0.5, "hidden_act": "silu"}
    return {**rope, "tie_word_embeddings": False, **raw, **completed}
