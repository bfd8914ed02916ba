"""Tiny seeded checkpoints of every supported family, made with transformers.

Hidden size 64, two or three layers, grouped-query attention, vocabulary of the bundled model's
tokenizer. Weights are large enough that greedy outputs vary; every bias and norm weight is
random too, so that one that is forgotten shows.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

VOCAB_SIZE = 4096

_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}

_OPT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "word_embed_proj_dim": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}

_FAMILIES: dict[str, tuple[Callable[..., PretrainedConfig], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, _DECODER | {"head_dim": 32, "num_hidden_layers": 3}),
    "llama3": (transformers.LlamaConfig, _DECODER | {"rope_parameters": _LLAMA3_ROPE}),
    "llama_linear": (transformers.LlamaConfig, _DECODER | {"rope_parameters": _LINEAR_ROPE}),
    "llama_yarn": (transformers.LlamaConfig, _DECODER | {"rope_parameters": _YARN_ROPE}),
    "granite_code": (
        transformers.LlamaConfig,
        _DECODER | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": (transformers.MistralConfig, _DECODER | {"sliding_window": 16}),
    "qwen2": (
        transformers.Qwen2Config,
        _DECODER | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3Config, _DECODER | {"head_dim": 32, "tie_word_embeddings": True}),
    "opt": (transformers.OPTConfig, _OPT),
    "opt_post_norm": (
        transformers.OPTConfig,
        _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
    ),
}

FAMILIES = tuple(_FAMILIES)
"""Every family `make_tiny_model` knows."""


def make_tiny_model(
    family: str, folder: Path, *, seed: int = 0, dtype: str = "float32", **overrides: Any
) -> Path:
    """Write config.json and safetensors of a small random model.

    Args:
        family: one of `FAMILIES`.
        folder: created when it is not there.
        seed: of the weights.
        dtype: torch dtype the weights are stored in.
        overrides: values of the transformers config in place of the family's.

    Returns:
        The folder.
    """
    create_config, values = _FAMILIES[family]
    config = create_config(**values | overrides)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    _randomize(model, seed)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    # Sampling defaults are no part of a family: tests that need some write their own.
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


@torch.no_grad()
def _randomize(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, param in sorted(model.named_parameters()):
        values = torch.randn(param.shape, generator=generator)
        if name.endswith("bias"):
            param.copy_(values * 0.1)
        elif param.dim() == 1:  # a norm
            param.copy_(1 + values * 0.1)
        elif "embed" in name:
            param.copy_(values * 0.2)
        else:
            if "fc2" in name:
                # ReLU outputs have a mean: unless rows sum to zero, every token gets the same.
                values -= values.mean(dim=1, keepdim=True)
            param.copy_(values * 1.5 * param.shape[1] ** -0.5)
