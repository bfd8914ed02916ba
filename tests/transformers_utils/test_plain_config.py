"""Test that configs completed without transformers mean the same as with it."""

import copy
import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.loops import loop_over
from tests.tiny_models import FAMILIES, FAMILY_CONFIGS, spelled
from tests.tiny_pooling_models import MODELS
from vllm.assets import BUNDLED_MODEL
from vllm.config import ModelArch, ModelConfig
from vllm.engine.resolve.pooling import resolve_pooler
from vllm.model_executor.models.bert import num_labels
from vllm.transformers_utils.configs.plain_config import complete_plain_config

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

MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "torch_dtype": "float16",
    "vocab_size": 512,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
}
ROBERTA = BERT | {"architectures": ["RobertaModel"], "model_type": "roberta"}
XLM_ROBERTA = BERT | {"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta"}
CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"]}
LINEAR = {"rope_type": "linear", "factor": 2.0}
SECTIONS = {"mrope_section": [2, 3, 3]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

MODEL_NAMES = {
    transformers.LlamaConfig: "LlamaForCausalLM",
    transformers.MistralConfig: "MistralForCausalLM",
    transformers.Qwen2Config: "Qwen2ForCausalLM",
    transformers.Qwen3Config: "Qwen3ForCausalLM",
    transformers.OPTConfig: "OPTForCausalLM",
}

READ_BY_MODELS = (
    "attention_bias",
    "mlp_bias",
    "eos_token_id",
    "quantization_config",
    "type_vocab_size",
    "pad_token_id",
    "position_embedding_type",
    "word_embed_proj_dim",
    "do_layer_norm_before",
    "_remove_final_layer_norm",
    "enable_bias",
    "layer_norm_elementwise_affine",
    "problem_type",
    "matryoshka_dimensions",
    "sentence_transformers",
)


def facts(config):
    """Return the values that the engine reads; a missing value and a false value are equal."""
    arch = ModelArch.from_hf(config)
    values = {f.name: getattr(arch, f.name) for f in dataclasses.fields(arch)}
    values.pop("hf_config")
    values |= {name: config.get(name) or False for name in READ_BY_MODELS}
    # this is the default, which transformers 4 adds to the config
    if values["position_embedding_type"] == "absolute":
        values["position_embedding_type"] = False
    if not values["word_embed_proj_dim"]:
        values["word_embed_proj_dim"] = arch.hidden_size
    pooler, _ = resolve_pooler(ModelConfig(), arch, Path("no such folder"))
    return values | {"pooler": pooler, "num_labels": num_labels(arch)}


def without(raw, *names):
    return {k: v for k, v in raw.items() if k not in names}


@loop_over(
    "raw",
    [
        LLAMA,
        LLAMA | {"head_dim": 32, "tie_word_embeddings": True, "eos_token_id": [1, 2]},
        LLAMA | {"attention_bias": True, "mlp_bias": True, "sliding_window": None},
        LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
        LLAMA | {"rope_parameters": LINEAR | {"rope_theta": 500000}},
        LLAMA | {"rope_parameters": YARN | {"rope_theta": 5.0, "beta_fast": 16, "mscale": 0.7}},
        LLAMA | {"eos_token_id": None, "head_dim": None, "num_key_value_heads": None},
        LLAMA | CLASSIFIER,
        LLAMA | CLASSIFIER | {"num_labels": 5},
        LLAMA | CLASSIFIER | {"id2label": {"0": "a", "1": "b", "2": "c"}, "num_labels": 3},
        LLAMA | CLASSIFIER | {"id2label": {"0": "a"}, "problem_type": "regression"},
        LLAMA | {"architectures": ["LlamaModel"], "matryoshka_dimensions": [32, 64]},
        without(
            LLAMA, "num_key_value_heads", "dtype", "hidden_act", "rms_norm_eps", "eos_token_id"
        ),
        OLD,
        OLD | {"rope_scaling": LLAMA3},
        OLD | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        OLD | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        OLD | {"rope_scaling": without(YARN, "rope_type") | {"type": "yarn"}},
        without(OLD, "rope_theta"),
        MISTRAL,
        MISTRAL | {"sliding_window": None},
        MISTRAL | {"sliding_window": 16, "head_dim": 32},
        without(OLD, "eos_token_id") | {k: MISTRAL[k] for k in ("architectures", "model_type")},
        MISTRAL | {"architectures": ["MistralModel"]},
        QWEN2,
        QWEN2 | {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1},
        QWEN2 | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        QWEN2 | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
        QWEN2 | {"use_sliding_window": True},
        QWEN2 | {"use_sliding_window": True, "num_hidden_layers": 30},
        QWEN2 | {"use_sliding_window": True, "sliding_window": None},
        QWEN2
        | {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
        QWEN2 | {"layer_types": ["sliding_attention", "full_attention"]},
        QWEN2 | {"architectures": ["Qwen2ForProcessRewardModel"]},
        without(QWEN2, "eos_token_id"),
        QWEN2 | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, **SECTIONS}},
        without(QWEN2, "rope_parameters")
        | {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", **SECTIONS}},
        QWEN3,
        QWEN3 | {"tie_word_embeddings": True, "head_dim": 16},
        without(QWEN3, "head_dim"),
        OPT,
        OPT | {"word_embed_proj_dim": 32, "do_layer_norm_before": False, "pad_token_id": 3},
        OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False},
        OPT | {"_remove_final_layer_norm": True, "activation_function": "gelu"},
        OPT | {"tie_word_embeddings": False, "word_embed_proj_dim": None, "torch_dtype": None},
        BERT,
        BERT | {"type_vocab_size": 1, "pad_token_id": None, "layer_norm_eps": 1e-5},
        BERT | {"position_embedding_type": "absolute", "hidden_act": "relu"},
        BERT | {"architectures": ["BertForSequenceClassification"], "num_labels": 3},
        ROBERTA,
        ROBERTA | {"pad_token_id": 0},
        XLM_ROBERTA,
        XLM_ROBERTA
        | {
            "architectures": ["XLMRobertaForSequenceClassification"],
            "id2label": {"0": "LABEL_0"},
            "sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"},
        },
        json.loads((BUNDLED_MODEL / "config.json").read_text()),
    ],
)
def test_a_plain_config_says_what_transformers_would(raw):
    completed = complete_plain_config(raw)
    assert completed is not None
    theirs = CONFIG_MAPPING[raw["model_type"]].from_dict(copy.deepcopy(raw))
    assert facts(completed) == facts(theirs.to_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_that_transformers_saves_of_a_generative_family_is_plain(family, tmp_path):
    create_config, values = FAMILY_CONFIGS[family]
    values = spelled(values)
    create_config(**values, architectures=[MODEL_NAMES[create_config]]).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    completed = complete_plain_config(raw)
    assert completed is not None
    assert facts(completed) == facts(create_config(**values, **raw_names(raw)).to_dict())


@pytest.mark.parametrize("architecture", MODELS)
def test_the_config_that_transformers_saves_of_a_pooling_model_is_plain(architecture, tmp_path):
    create_config, values = MODELS[architecture]
    create_config(**values, architectures=[architecture]).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    completed = complete_plain_config(raw)
    assert completed is not None
    assert facts(completed) == facts(create_config(**values, **raw_names(raw)).to_dict())


def raw_names(raw):
    return {"architectures": raw["architectures"]}


@loop_over(
    "raw",
    [
        LLAMA | {"model_type": "gemma"},
        LLAMA | {"model_type": None},
        LLAMA | {"architectures": ["MyForCausalLM"]},
        LLAMA | {"auto_map": {"AutoConfig": "a.B"}},
        LLAMA | {"quantization_config": {"quant_method": "awq"}},
        LLAMA | {"per_layer_config": {"0": {"hidden_act": "relu"}}},
        LLAMA | {"hidden_size": "64"},
        LLAMA | {"hidden_size": 66},
        LLAMA | {"head_dim": 15},
        LLAMA | {"num_key_value_heads": 3},
        LLAMA | {"vocab_size": True},
        LLAMA | {"eos_token_id": 512},
        LLAMA | {"eos_token_id": [1, "2"]},
        LLAMA | {"attention_bias": None},
        LLAMA | {"rms_norm_eps": 1},
        LLAMA | {"hidden_act": None},
        LLAMA | {"dtype": "float8_e4m3fn"},
        LLAMA | {"dtype": {"text": "float32"}},
        LLAMA | {"partial_rotary_factor": 0.5},
        LLAMA | {"rope_theta": 5.0},
        LLAMA | {"rope_parameters": {"rope_type": "longrope", "rope_theta": 5.0, "factor": 2.0}},
        LLAMA | {"rope_parameters": {"rope_type": ["yarn"], "rope_theta": 5.0}},
        LLAMA | {"rope_parameters": YARN | {"rope_theta": 5.0, "truncate": False}},
        LLAMA | {"rope_parameters": LLAMA3},
        LLAMA | {"original_max_position_embeddings": 64},
        LLAMA | CLASSIFIER | {"id2label": {"0": "a"}, "num_labels": 3},
        LLAMA | CLASSIFIER | {"id2label": {"0": "a", "2": "c"}},
        LLAMA | CLASSIFIER | {"id2label": {}},
        LLAMA | CLASSIFIER | {"id2label": ["a"]},
        LLAMA | CLASSIFIER | {"num_labels": 1, "problem_type": "single_label_classification"},
        OLD | {"rope_scaling": "linear"},
        OLD | {"rope_scaling": LINEAR | {"type": "linear"}},
        OLD | {"rope_scaling": {"factor": 2.0}},
        OLD | {"rope_theta": None},
        MISTRAL | {"sliding_window": "16"},
        MISTRAL | {"num_key_value_heads": None},
        without(QWEN2, "num_key_value_heads"),
        QWEN2 | {"use_sliding_window": True, "layer_types": ["sliding_attention"]},
        QWEN2 | {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 2},
        QWEN2 | {"use_sliding_window": 1},
        QWEN3 | {"head_dim": None},
        OPT | {"rope_theta": 5.0},
        OPT | {"enable_bias": None},
        without(OPT, "ffn_dim"),
        BERT | {"type_vocab_size": 0},
        BERT | {"pad_token_id": -1},
        *(without(LLAMA, name) for name in ("vocab_size", "intermediate_size")),
    ],
)
def test_what_is_in_doubt_is_left_to_transformers(raw):
    assert complete_plain_config(raw) is None


@pytest.mark.skipif(
    transformers.__version__.startswith("4."), reason="tokenizers of transformers 4 import torch"
)
def test_config_and_tokenizer_of_a_plain_model_load_no_torch(tmp_path):
    shutil.copy(BUNDLED_MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizerFast"}')
    code = (
        "import sys\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        "from vllm.transformers_utils.tokenizer import get_tokenizer, load_tokenizer\n"
        "config = EngineArgs().create_engine_config()\n"
        "tokenizer = load_tokenizer(config.model)\n"
        "tokenizer.decode(tokenizer('import os').input_ids)\n"
        "tokenizer.apply_chat_template([{'role': 'user', 'content': 'x'}], tokenize=False)\n"
        "get_tokenizer(sys.argv[1])  # of another family, with a class of its own\n"
        "sys.exit('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert run.returncode == 0
