"""Configs completed without transformers mean what they mean with it."""

import copy
import dataclasses
import json
import subprocess
import sys

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from vllm.assets import BUNDLED_MODEL
from vllm.config import ModelArch
from vllm.transformers_utils.plain_config import complete_plain_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
OLD = {k: v for k, v in LLAMA.items() if k not in ("rope_parameters", "dtype")} | {
    "rope_theta": 5000.0,
    "rope_scaling": None,
    "torch_dtype": "float32",
}

READ_BY_MODELS = ("attention_bias", "mlp_bias", "eos_token_id", "quantization_config")


def facts(config):
    arch = ModelArch.from_hf(config)
    values = {f.name: getattr(arch, f.name) for f in dataclasses.fields(arch)}
    values.pop("hf_config")
    return values | {name: config.get(name) or False for name in READ_BY_MODELS}


@pytest.mark.parametrize(
    "raw",
    [
        LLAMA,
        LLAMA | {"head_dim": 32, "tie_word_embeddings": True, "eos_token_id": [1, 2]},
        LLAMA | {"attention_bias": True, "mlp_bias": True, "sliding_window": None},
        LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
        OLD,
        OLD | {"rope_scaling": LLAMA3},
        QWEN2,
        QWEN2 | {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1},
        QWEN3,
        QWEN3 | {"tie_word_embeddings": True, "head_dim": 16},
        json.loads((BUNDLED_MODEL / "config.json").read_text()),
    ],
)
def test_a_plain_config_says_what_transformers_would(raw):
    completed = complete_plain_config(raw)
    assert completed is not None
    theirs = CONFIG_MAPPING[raw["model_type"]].from_dict(copy.deepcopy(raw))
    assert facts(completed) == facts(theirs.to_dict())


def without(raw, name):
    return {k: v for k, v in raw.items() if k != name}


@pytest.mark.parametrize(
    "raw",
    [
        LLAMA | {"model_type": "mistral"},
        LLAMA | {"auto_map": {"AutoConfig": "a.B"}},
        LLAMA | {"quantization_config": {"quant_method": "awq"}},
        LLAMA | {"architectures": ["LlamaForSequenceClassification"]},
        LLAMA | {"hidden_size": "64"},
        LLAMA | {"hidden_size": 66},
        LLAMA | {"num_key_value_heads": 3},
        LLAMA | {"vocab_size": True},
        LLAMA | {"eos_token_id": 512},
        LLAMA | {"eos_token_id": None},
        LLAMA | {"attention_bias": None},
        LLAMA | {"partial_rotary_factor": 0.5},
        LLAMA | {"rope_theta": 5.0},
        LLAMA | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5.0, "factor": 2.0}},
        LLAMA | {"rope_parameters": LLAMA3},
        OLD | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        OLD | {"rope_scaling": "linear"},
        without(OLD, "rope_theta"),
        without(QWEN3, "head_dim"),
        QWEN2 | {"use_sliding_window": True},
        *(
            without(LLAMA, name)
            for name in ("num_key_value_heads", "dtype", "hidden_act", "rms_norm_eps")
        ),
    ],
)
def test_what_is_in_doubt_is_left_to_transformers(raw):
    assert complete_plain_config(raw) is None


def test_config_and_tokenizer_of_a_plain_model_load_no_torch():
    code = (
        "import sys\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        "from vllm.transformers_utils.tokenizer import load_tokenizer\n"
        "config = EngineArgs().create_engine_config()\n"
        "tokenizer = load_tokenizer(config.model)\n"
        "tokenizer.decode(tokenizer('import os').input_ids)\n"
        "tokenizer.apply_chat_template([{'role': 'user', 'content': 'x'}], tokenize=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
