"""Models of transformers as references for our models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from vllm.transformers_utils.transformers_version import dtype_argument, is_version_4


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return the model; skip the test if the installed transformers computes something else."""
    config = json.loads((folder / "config.json").read_text())
    if is_version_4() and (reason := _what_version_4_does(config)):
        pytest.skip(f"this transformers is no reference: {reason}")
    # The faster attention of transformers 4 ignores windows and soft caps. Falcon needs the faster
    # one.
    kind = {} if config["model_type"] == "falcon" else {"attn_implementation": "eager"}
    (name,) = config["architectures"]
    has_images = name.endswith("ForConditionalGeneration") and hasattr(transformers, name)
    model_class = getattr(transformers, name) if has_images else AutoModelForCausalLM
    model = model_class.from_pretrained(folder, **dtype_argument(dtype), **kind).eval()
    # Since transformers 5.24, the forward pass of the whole Llama 4 raises an error: use its
    # language model.
    return model.language_model if name == "Llama4ForConditionalGeneration" else model


def _what_version_4_does(config: dict[str, Any]) -> str:
    groups = config.get("n_groups") or config.get("mamba_n_groups") or 1
    heads = config.get("num_heads") or config.get("mamba_n_heads") or 1
    if 1 < groups < heads:
        return "it gives heads the states of other groups"
    if config.get("swiglu_limit", 7.0) != 7.0:
        return "it clamps the experts of GPT-OSS at 7, whatever the config says"
    if config["model_type"] == "granitemoehybrid" and "time_step_limit" in config:
        return "it does not limit the time steps of Granite"
    rope = config.get("rope_scaling") or {}
    if config["model_type"] == "deepseek_v2" and rope.get("mscale_all_dim"):
        return "it leaves YaRN out of the scores of DeepSeek V2"
    if config.get("hidden_act") == "xielu":
        return "it rounds the parameters of xIELU to bfloat16"
    if config["model_type"] == "dots1" and config["n_group"] > 1:
        return "experts of groups that are not chosen have a score of 0, which may be the largest"
    if config.get("vocab_size_per_layer_input", config["vocab_size"]) < config["vocab_size"]:
        return "tokens without features of layers end in an error"
    if config["model_type"] == "llama4_text":
        return "it multiplies numbers of two types"
    if config.get("use_sliding_window") is False and config.get("sliding_window"):
        return "a window that is off hides keys all the same"
    has_window = config.get("use_sliding_window") and config.get("sliding_window")
    layers = config.get("max_window_layers")
    if has_window and layers not in (None, 0, config["num_hidden_layers"]):
        return "windows are of all layers or of none"
    return ""
