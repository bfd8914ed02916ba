"""Read models in the format of Mistral AI: `params.json` with `consolidated*.safetensors`.

The names of the tensors are in `loader/mistral_file`.
"""

from pathlib import Path
from typing import Any

from vllm.config.families import FAMILIES, Family
from vllm.errors import ConfigError
from vllm.utils.files.json_file import read_json_object

PARAMS = "params.json"

_LENGTH = 32768
"""Maximum length of models that do not have one in their file: the length of the first models, 7B
and 8x7B."""
_NEEDED = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
_OPTIONAL = {
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "sliding_window": "sliding_window",
    "tied_embeddings": "tie_word_embeddings",
}
"""Key there -> key in config.json."""
_READ = frozenset(
    (*_NEEDED, *_OPTIONAL, "rope_theta", "moe", "max_seq_len", "max_position_embeddings")
)
_WITHOUT_EFFECT = frozenset(
    ("model_type", "max_batch_size", "causal", "use_cache", "ragged_attention")
)


def _family(kind: str) -> Family:
    return next(family for family in FAMILIES.values() if family.in_params_json == kind)


def read_params(folder: Path) -> dict[str, Any]:
    """Read `params.json` and return it as a config.json of the same model.

    Raises:
        ConfigError: broken JSON, a size is missing, or the model has parts that are not supported
            in this format.
    """
    params = read_json_object(folder / PARAMS)
    given = {key for key, value in params.items() if value not in (None, False)}
    if unknown := sorted(given - _READ - _WITHOUT_EFFECT):
        raise ConfigError(
            f"{PARAMS} of '{folder}' has {unknown[0]!r}, which this engine cannot read from this "
            "format. Load the files of the same model with a config.json"
        )
    config: dict[str, Any] = {}
    for name, key in _NEEDED.items():
        if params.get(name) is None:
            raise ConfigError(f"{PARAMS} of '{folder}' has no {name!r}. Download the file again")
        config[key] = params[name]
    config |= {key: params[name] for name, key in _OPTIONAL.items() if name in params}
    config.setdefault("sliding_window", None)
    if experts := params.get("moe"):
        config |= {
            "num_local_experts": experts["num_experts"],
            "num_experts_per_tok": experts["num_experts_per_tok"],
        }
    length = params.get("max_position_embeddings") or params.get("max_seq_len") or _LENGTH
    family = _family("experts" if experts else "dense")
    return config | {
        "model_type": family.model_type,
        "architectures": [family.architectures[0]],
        "max_position_embeddings": length,
        "rope_theta": float(params.get("rope_theta") or 10000.0),
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
