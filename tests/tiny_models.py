"""Tiny seeded checkpoints of every supported family, made with transformers.

Hidden size 64, two or three layers, grouped-query attention, vocabulary of the bundled model's
tokenizer. Weights are large enough that greedy outputs vary; biases and norm weights are also
random, so that a forgotten one is noticed.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig, PreTrainedModel

from tests.kept_folders import kept
from vllm.assets import BUNDLED_MODEL
from vllm.transformers_utils.transformers_version import dtype_argument, is_version_4

VOCAB_SIZE = 4096

DECODER: dict[str, Any] = {
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

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}

_STRETCHED_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0}

FAMILY_CONFIGS: dict[str, tuple[Callable[..., PretrainedConfig], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, DECODER | {"head_dim": 32, "num_hidden_layers": 3}),
    "llama3": (transformers.LlamaConfig, DECODER | {"rope_parameters": LLAMA3_ROPE}),
    "llama_linear": (transformers.LlamaConfig, DECODER | {"rope_parameters": _LINEAR_ROPE}),
    "llama_yarn": (transformers.LlamaConfig, DECODER | {"rope_parameters": YARN_ROPE}),
    "granite_code": (
        transformers.LlamaConfig,
        DECODER | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": (transformers.MistralConfig, DECODER | {"sliding_window": 16}),
    "qwen2": (
        transformers.Qwen2Config,
        DECODER | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3Config, DECODER | {"head_dim": 32, "tie_word_embeddings": True}),
    "opt": (transformers.OPTConfig, _OPT),
    "opt_post_norm": (
        transformers.OPTConfig,
        _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
    ),
}

FAMILIES = tuple(FAMILY_CONFIGS)
"""Families that are run in every mode and feature."""

_GPT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


LOAD_FLOAT32: dict[str, Any] = dtype_argument(torch.float32)
"""Argument of `from_pretrained`."""
WINDOWS_ALL_LAYERS_OR_NONE = is_version_4()
"""Of the installed transformers, which is then no reference for models with both."""
YARN_BY_LONGEST = is_version_4()
"""YaRN of the installed transformers uses `max_position_embeddings`, not by the original length
in the rope parameters, and is then no reference where they differ."""


def _if_known(family: str, config: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return one entry of the table; empty if this transformers is too old for the family (`make
    test-vendor`).
    """
    cls = getattr(transformers, config, None)
    return {} if cls is None else {family: (cls, arguments)}


_GEMMA = DECODER | {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh"}
GEMMA2 = _GEMMA | {"num_hidden_layers": 4, "query_pre_attn_scalar": 24, "sliding_window": 16}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.5 * i for i in range(8)],
}
_PHI3_LONG = DECODER | {"rope_parameters": _LONGROPE}
_MORE: dict[str, tuple[Callable[..., PretrainedConfig], dict[str, Any]]] = {
    "granite": (
        transformers.GraniteConfig,
        DECODER
        | {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
        },
    ),
    "gemma": (transformers.GemmaConfig, _GEMMA | {"tie_word_embeddings": True}),
    "gemma2": (
        transformers.Gemma2Config,
        GEMMA2 | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    ),
    "gemma3": (transformers.Gemma3TextConfig, GEMMA2 | {"num_hidden_layers": 7}),
    "phi": (
        transformers.PhiConfig,
        _GPT | {"intermediate_size": 176, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
    ),
    "phi3": (transformers.Phi3Config, DECODER),
    "phi3_long": (transformers.Phi3Config, _PHI3_LONG | {"original_max_position_embeddings": 64}),
    "phi3_short": (
        transformers.Phi3Config,
        _PHI3_LONG | {"original_max_position_embeddings": 256},
    ),
    "olmo": (transformers.OlmoConfig, DECODER | {"clip_qkv": 0.5}),
    "olmo2": (transformers.Olmo2Config, DECODER),
    **_if_known("olmo3", "Olmo3Config", DECODER | {"num_hidden_layers": 4, "sliding_window": 16}),
    "stablelm": (
        transformers.StableLmConfig,
        DECODER | {"use_qkv_bias": True, "partial_rotary_factor": 0.25},
    ),
    "stablelm_head_norms": (
        transformers.StableLmConfig,
        DECODER | {"qk_layernorm": True, "use_qkv_bias": True},
    ),
    "stablelm_parallel": (transformers.StableLmConfig, DECODER | {"use_parallel_residual": True}),
    "starcoder2": (transformers.Starcoder2Config, DECODER | {"sliding_window": 16}),
    "cohere": (transformers.CohereConfig, DECODER | {"logit_scale": 2.0}),
    "cohere_head_norms": (
        transformers.CohereConfig,
        DECODER | {"use_qk_norm": True, "logit_scale": 2.0},
    ),
    "cohere2": (
        transformers.Cohere2Config,
        DECODER | {"num_hidden_layers": 5, "sliding_window": 16, "logit_scale": 2.0},
    ),
    "glm": (transformers.GlmConfig, DECODER | {"head_dim": 16, "attention_bias": True}),
    "glm4": (transformers.Glm4Config, DECODER | {"head_dim": 16}),
    "gpt2": (transformers.GPT2Config, _GPT | {"n_positions": 512}),
    "gpt_bigcode": (transformers.GPTBigCodeConfig, _GPT | {"n_positions": 512}),
    "gpt_bigcode_multi_head": (
        transformers.GPTBigCodeConfig,
        _GPT | {"n_positions": 512, "multi_query": False},
    ),
    "gpt_neox": (
        transformers.GPTNeoXConfig,
        _GPT | {"intermediate_size": 176, "rotary_pct": 0.25, "max_position_embeddings": 512},
    ),
    "gpt_neox_sequential": (
        transformers.GPTNeoXConfig,
        _GPT | {"intermediate_size": 176, "use_parallel_residual": False},
    ),
    "gptj": (transformers.GPTJConfig, _GPT | {"n_positions": 512, "rotary_dim": 8}),
    "falcon_7b": (transformers.FalconConfig, _GPT | {"parallel_attn": True, "multi_query": True}),
    "falcon_40b": (
        transformers.FalconConfig,
        _GPT | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ),
    "falcon_rw": (
        transformers.FalconConfig,
        _GPT | {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True},
    ),
    "bloom": (transformers.BloomConfig, _GPT),
    "mpt": (
        transformers.MptConfig,
        {
            "vocab_size": VOCAB_SIZE,
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 512,
            "attn_config": {"clip_qkv": 1.0},
        },
    ),
}
_MORE |= _if_known("nemotron", "NemotronConfig", DECODER | {"head_dim": 32, "norm_eps": 1e-5})
_MOE = DECODER | {"num_experts_per_tok": 2}
_MORE |= {
    "mixtral": (transformers.MixtralConfig, _MOE | {"num_local_experts": 4}),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        _MOE
        | {"num_experts": 6, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80},
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        _MOE
        | {"num_experts": 6, "mlp_only_layers": [1], "num_hidden_layers": 3, "head_dim": 32}
        | {"norm_topk_prob": True, "moe_intermediate_size": 48},
    ),
    "granite_moe": (
        transformers.GraniteMoeConfig,
        _MOE | {"num_local_experts": 4, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    ),
    "olmoe": (transformers.OlmoeConfig, _MOE | {"num_experts": 4, "clip_qkv": 1.0}),
}
_MORE |= _if_known(
    "gpt_oss",
    "GptOssConfig",
    _MOE
    | {"num_local_experts": 6, "num_hidden_layers": 4, "head_dim": 32, "sliding_window": 16}
    | {"rope_parameters": YARN_ROPE | {"truncate": False}, "swiglu_limit": 1.0},
)
_MORE |= _if_known(
    "llama4",
    "Llama4TextConfig",
    DECODER
    | {"num_hidden_layers": 4, "head_dim": 32, "num_local_experts": 4, "intermediate_size_mlp": 112}
    | {"interleave_moe_layer_step": 2, "attention_chunk_size": 20, "floor_scale": 8}
    | {"rope_parameters": LLAMA3_ROPE, "attn_scale": 0.5},
)
_LATENT = DECODER | {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
DEEPSEEK = _LATENT | {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 1.5,
    "rope_parameters": YARN_ROPE | {"mscale": 0.8, "mscale_all_dim": 1.3},
}
_MORE |= {
    **_if_known(
        "deepseek_v2", "DeepseekV2Config", DEEPSEEK | {"topk_method": "group_limited_greedy"}
    ),
    **_if_known(
        "deepseek_v2_lite",
        "DeepseekV2Config",
        DEEPSEEK | {"q_lora_rank": None, "attention_bias": True, "rope_parameters": _LINEAR_ROPE},
    ),
    "deepseek_v3": (transformers.DeepseekV3Config, DEEPSEEK),
}
_ROUTED = DECODER | {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "head_dim": 16,
}
_NOT_OF_MIMO = ("first_k_dense_replace", "n_shared_experts")
_PARTLY = {"rope_type": "default", "partial_rotary_factor": 0.5}
_NOT_OF_SOLAR = ("first_k_dense_replace", "intermediate_size")
_LATENT_MIXTURE = {name: value for name, value in DEEPSEEK.items() if name != "rope_parameters"}
_ROW_MIXTURES: dict[str, tuple[Callable[..., PretrainedConfig], dict[str, Any]]] = {
    **_if_known(
        "glm4_moe_lite",
        "Glm4MoeLiteConfig",
        _LATENT_MIXTURE | {"num_hidden_layers": 2, "n_group": 1, "topk_group": 1},
    ),
    **_if_known("glm_moe_dsa", "GlmMoeDsaConfig", _LATENT_MIXTURE | {"num_hidden_layers": 2}),
    **_if_known(
        "deepseek_v32",
        "DeepseekV32Config",
        _LATENT_MIXTURE | {"num_hidden_layers": 2, "rope_parameters": DEEPSEEK["rope_parameters"]},
    ),
    **_if_known("dots1", "Dots1Config", _ROUTED | {"sliding_window": 16, "max_window_layers": 1}),
    **_if_known(
        "solar_open",
        "SolarOpenConfig",
        {name: value for name, value in _ROUTED.items() if name not in _NOT_OF_SOLAR},
    ),
    **_if_known("flex_olmo", "FlexOlmoConfig", _MOE | {"num_experts": 4, "intermediate_size": 48}),
}
_DBRX = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "max_seq_len": 512,
    "attn_config": {"clip_qkv": 0.4, "kv_n_heads": 2, "rope_theta": 5000.0},
    "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
_OWN_MIXTURES: dict[str, tuple[Callable[..., PretrainedConfig], dict[str, Any]]] = {
    **_if_known("dbrx", "DbrxConfig", _DBRX),
    **_if_known(
        "phimoe",
        "PhimoeConfig",
        _MOE
        | {"num_local_experts": 6, "attention_bias": True, "lm_head_bias": True}
        | {"router_jitter_noise": 0.2},
    ),
    **_if_known(
        "glm4_moe",
        "Glm4MoeConfig",
        _ROUTED | {"attention_bias": True, "use_qk_norm": True, "num_hidden_layers": 3},
    ),
    **_if_known(
        "minimax_m2",
        "MiniMaxM2Config",
        _MOE | {"num_local_experts": 6, "intermediate_size": 48, "head_dim": 32, "rotary_dim": 16},
    ),
    **_if_known(
        "ernie4_5_moe",
        "Ernie4_5_MoeConfig",
        DECODER
        | {"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 2}
        # In transformers 4, `use_bias` also gives biases to the experts.
        | {"moe_intermediate_size": 48, "moe_layer_start_index": 1, "use_bias": not is_version_4()},
    ),
    **_if_known(
        "hunyuan_moe",
        "HunYuanMoEV1Config",
        DECODER
        | {"num_experts": 6, "moe_topk": [2, 3], "intermediate_size": 48, "head_dim": 32}
        | {"rope_parameters": _STRETCHED_ROPE},
    ),
}
_MORE |= _ROW_MIXTURES | _OWN_MIXTURES
_MIXERS = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "time_step_limit": (0.01, 2.0),
}
_MAMBA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "state_size": 12,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_MAMBA2 = _MAMBA | {"num_heads": 8, "head_dim": 16, "n_groups": 4, "num_hidden_layers": 2}
_HYBRID = DECODER | _MIXERS | {"num_hidden_layers": 4}
_GRANITE_HYBRID = _HYBRID | {
    "layer_types": ["mamba", "mamba", "attention", "mamba"],  # as in the published config
    "shared_intermediate_size": 80,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.5,
}
_LFM2 = DECODER | {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "norm_eps": 1e-5,
    "conv_bias": True,
}
_FALCON_H1 = (
    DECODER
    | _MIXERS
    | {
        "mamba_d_ssm": 128,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.7,
        "mlp_multipliers": [0.8, 1.3],
        "key_multiplier": 0.6,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.9,
        "ssm_multipliers": [0.7, 1.2, 1.5, 0.8, 1.1],
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.8,
    }
)
_JAMBA = DECODER | {
    "num_hidden_layers": 3,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "mamba_d_state": 12,
    "mamba_dt_rank": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "use_associative_scan": False,
    "use_mamba_kernels": not is_version_4(),  # transformers 4 needs a GPU for these kernels
}
_NEMOTRON_H = DECODER | {
    "hybrid_override_pattern": "M-*E",
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 12,
    "n_groups": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 80,
    "routed_scaling_factor": 2.5,
    "time_step_min": 1e-20,  # transformers applies this lower limit to prompts, but not to decodes
}
DELTA_NET = DECODER | {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
DELTA_NET_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
_KIMI_LINEAR = {
    **{name: value for name, value in DECODER.items() if name != "max_position_embeddings"},
    "num_key_value_heads": 4,
    "model_max_length": 512,
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "kda_layers": [1],
        "full_attn_layers": [2],
    },
    "mla_use_nope": True,
    "rope_theta": 10000.0,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 48,
}
_ZAMBA2 = {name: value for name, value in DECODER.items() if name != "num_key_value_heads"} | {
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "hybrid", "hybrid"],  # as in the published config
    "tie_word_embeddings": True,  # transformers ties the shared blocks only if embeddings are tied
    "num_mem_blocks": 2,
    "use_shared_attention_adapter": True,
    "adapter_rank": 8,
    "use_mem_rope": True,
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "mamba_d_state": 12,
    "time_step_min": 1e-20,  # as in Nemotron-H: the limit applies to prompts, but not to decodes
}
_STATES: dict[str, tuple[Callable[..., PretrainedConfig], dict[str, Any]]] = {
    **_if_known("bamba", "BambaConfig", _HYBRID | {"attn_layer_indices": [1]}),
    **_if_known(
        "granite_hybrid",
        "GraniteMoeHybridConfig",
        _GRANITE_HYBRID | {"num_local_experts": 4, "num_experts_per_tok": 2, "mamba_n_groups": 1},
    ),
    **_if_known(
        "granite_hybrid_dense",
        "GraniteMoeHybridConfig",
        _GRANITE_HYBRID
        | {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_proj_bias": True},
    ),
    **_if_known("falcon_h1", "FalconH1Config", _FALCON_H1),
    **_if_known(
        "falcon_h1_norms",
        "FalconH1Config",
        _FALCON_H1 | {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
    ),
    "jamba": (transformers.JambaConfig, _JAMBA),
    **_if_known("nemotron_h", "NemotronHConfig", _NEMOTRON_H),
    **_if_known(
        "nemotron_h_latent",
        "NemotronHConfig",
        _NEMOTRON_H | {"hybrid_override_pattern": "ME*", "moe_latent_size": 32, "n_groups": 1},
    ),
    **_if_known("lfm2", "Lfm2Config", _LFM2 | {"block_multiple_of": 32}),
    **_if_known(
        "lfm2_moe",
        "Lfm2MoeConfig",
        _LFM2
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        | {"num_dense_layers": 1, "routed_scaling_factor": 1.5},
    ),
    "mamba": (transformers.MambaConfig, _MAMBA | {"use_bias": True}),
    "falcon_mamba": (transformers.FalconMambaConfig, _MAMBA | {"tie_word_embeddings": False}),
    "mamba2": (transformers.Mamba2Config, _MAMBA2),
    **({} if is_version_4() else _if_known("zamba2", "Zamba2Config", _ZAMBA2)),
    **_if_known("kimi_linear", "KimiLinearConfig", _KIMI_LINEAR),
    **_if_known("qwen3_next", "Qwen3NextConfig", DELTA_NET),
    **_if_known("qwen3_5", "Qwen3_5TextConfig", DELTA_NET | {"rope_parameters": DELTA_NET_ROPE}),
    **_if_known(
        "qwen3_5_moe", "Qwen3_5MoeTextConfig", DELTA_NET | {"rope_parameters": DELTA_NET_ROPE}
    ),
}
_MORE |= _STATES
_BIASES = {"attention_bias": True, "mlp_bias": True}
_NTK_ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 8.0}
_ROWS: dict[str, tuple[Callable[..., PretrainedConfig], dict[str, Any]]] = {
    **_if_known("smollm3", "SmolLM3Config", DECODER | {"num_hidden_layers": 4}),
    **_if_known(
        "cwm",
        "CwmConfig",
        DECODER | {"num_hidden_layers": 2, "sliding_window": 16, "head_dim": 16},
    ),
    **_if_known("seed_oss", "SeedOssConfig", DECODER | {"head_dim": 16, "mlp_bias": True}),
    **_if_known("helium", "HeliumConfig", DECODER | {"head_dim": 16}),
    **_if_known("ernie4_5", "Ernie4_5Config", DECODER | {"head_dim": 32, "use_bias": True}),
    **_if_known("youtu", "YoutuConfig", _LATENT | {"rope_interleave": True}),
    **_if_known("vaultgemma", "VaultGemmaConfig", GEMMA2 | {"num_hidden_layers": 2}),
}
_OWN: dict[str, tuple[Callable[..., PretrainedConfig], dict[str, Any]]] = {
    **_if_known(
        "exaone4", "Exaone4Config", DECODER | {"num_hidden_layers": 4, "sliding_window": 16}
    ),
    **_if_known(
        "hunyuan_dense",
        "HunYuanDenseV1Config",
        DECODER | {"head_dim": 16, "attention_bias": True, "rope_parameters": _NTK_ALPHA},
    ),
    **_if_known(
        "minicpm3",
        "MiniCPM3Config",
        _LATENT
        | {"dim_model_base": 128, "scale_emb": 3}
        | {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 256},
    ),
    **_if_known(
        "ministral3",
        "Ministral3Config",
        DECODER | {"head_dim": 16, "rope_parameters": YARN_ROPE | {"llama_4_scaling_beta": 0.5}},
    ),
    **_if_known("apertus", "ApertusConfig", DECODER | {"attention_bias": True}),
    **_if_known("arcee", "ArceeConfig", DECODER | _BIASES | {"head_dim": 16}),
    **_if_known("jais2", "Jais2Config", DECODER | _BIASES | {"head_dim": 16}),
}
_GEMMA4 = _GEMMA | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
}
GEMMA4_SHARING = (
    _GEMMA4
    | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB_SIZE}
    | {"num_kv_shared_layers": 2}
    | {"use_double_wide_mlp": True, "final_logit_softcapping": 8.0}
)
_GEMMA3N = _GEMMA | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE - 96,
    "intermediate_size": [176, 144, 176, 144],
    "activation_sparsity_pattern": [0.8, 0.0, 0.6, 0.0],
    "altup_num_inputs": 3,
    "laurel_rank": 8,
    "final_logit_softcapping": 8.0,
}
_SHARING: dict[str, tuple[Callable[..., PretrainedConfig], dict[str, Any]]] = {
    **_if_known("gemma4", "Gemma4TextConfig", GEMMA4_SHARING),
    **_if_known(
        "gemma4_wide",
        "Gemma4TextConfig",
        _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    **_if_known(
        "gemma4_moe",
        "Gemma4TextConfig",
        _GEMMA4
        | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2}
        | {"moe_intermediate_size": 48},
    ),
}
_MIMO_V2 = {name: value for name, value in _ROUTED.items() if name not in _NOT_OF_MIMO} | {
    "num_hidden_layers": 3,
    "head_dim": 32,
    "v_head_dim": 24,
    "sliding_window": 16,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "num_key_value_heads": 1,
    "rope_parameters": {
        "full_attention": _PARTLY | {"rope_theta": 50000.0},
        "sliding_attention": _PARTLY | {"rope_theta": 10000.0},
    },
}
_LONGCAT = {
    **{
        name: value
        for name, value in _LATENT.items()
        if name not in ("num_hidden_layers", "intermediate_size")
    },
    "num_layers": 2,
    "head_dim": 16,
    "ffn_hidden_size": 80,
    "expert_ffn_hidden_size": 48,
    "n_routed_experts": 6,
    "zero_expert_num": 3,
    "moe_topk": 4,
    "routed_scaling_factor": 2.5,
}
_OWN |= _if_known("mimo_v2", "MiMoV2FlashConfig", _MIMO_V2)
_WITHOUT_PROGRAM: dict[str, tuple[Callable[..., PretrainedConfig], dict[str, Any]]] = {
    **_if_known("gemma3n", "Gemma3nTextConfig", _GEMMA3N),
    **_if_known("longcat_flash", "LongcatFlashConfig", _LONGCAT),
}
_MORE |= _ROWS | _OWN | _WITHOUT_PROGRAM | _SHARING
FAMILY_CONFIGS |= _MORE

STATE_FAMILIES = tuple(_STATES)
"""Families with recurrent state."""

ROW_FAMILIES = (*_ROW_MIXTURES, *_ROWS)
"""Families that differ from others only in options. The default run compares their logits, and
the exhaustive run does the rest."""

RARE_FAMILIES = (
    *(*ROW_FAMILIES, *_OWN_MIXTURES),
    *(*_OWN, *_WITHOUT_PROGRAM, "gemma4_wide", "gemma4_moe", "falcon_mamba"),
)
"""Families whose costly settings are for the exhaustive run, as other families have the same
mechanisms."""

SIBLINGS = (
    *("llama3", "llama_linear", "llama_yarn", "granite_code", "mistral", "qwen2", "opt_post_norm"),
    *("phi", "phi3_long", "phi3_short", "gptj", "gpt_neox_sequential", "gpt_bigcode_multi_head"),
    *("stablelm_head_norms", "stablelm_parallel", "cohere_head_norms", "cohere2", "glm", "glm4"),
    *("falcon_7b", "falcon_rw", "mpt", "starcoder2", "gemma", "olmo2", "olmo3", "deepseek_v2"),
    *("deepseek_v2_lite", "qwen3_moe", "granite_moe", "olmoe", "granite_hybrid_dense", "mamba2"),
    *("falcon_h1_norms", "nemotron_h_latent", "lfm2_moe", "qwen3_5", "qwen3_5_moe"),
    *("granite_hybrid", "zamba2", "falcon_h1", "jamba"),
)
"""Families that compute and round where another one does, so the exhaustive run has their ranks,
stages and bfloat16. The default run compares their logits with and without programs."""

NOT_SAVED = frozenset({"Zamba2ForCausalLM"} if is_version_4() else ())
"""Architectures whose tiny models transformers cannot save: version 4 refuses shared weights."""

ONE_STAGE = ("gemma3n", "gemma4", "zamba2")
"""Families whose layers read earlier layers or share weights, so that a pipeline cannot divide
them."""

WITHOUT_PROGRAM = (*STATE_FAMILIES, *_WITHOUT_PROGRAM)
"""Families without a program on the CPU: with states, or with an operation that no kernel has."""

ALL_FAMILIES = tuple(FAMILY_CONFIGS)
"""Every family `make_tiny_model` knows."""

MORE_FAMILIES = tuple(name for name in _MORE if name not in ("phi3_long", *_STATES))
"""Families that differ from `FAMILIES` in their layers only. phi3_long is not among them:
transformers
changes its rotations when a request grows beyond a length, which an engine with a cache cannot."""


def sparing(families: Iterable[str], rare: Sequence[str]) -> list[Any]:
    """Return families as parameters of a test, some of them only for the exhaustive run.

    Args:
        families: the parameters.
        rare: families that only the exhaustive run tests.
    """
    marks = pytest.mark.exhaustive
    return [pytest.param(f, marks=marks if f in rare else ()) for f in families]


def tiny_config(family: str) -> PretrainedConfig:
    """Return the config of the small model of a family."""
    create_config, values = FAMILY_CONFIGS[family]
    return create_config(**spelled(values))


@kept
def make_tiny_model(
    family: str, folder: Path, *, seed: int = 0, dtype: str = "float32", **overrides: Any
) -> Path:
    """Write config.json and safetensors of a small random model.

    Args:
        family: one of `FAMILIES`.
        folder: created when it is not there.
        seed: seed of the weights.
        dtype: torch dtype the weights are stored in.
        overrides: values of the transformers config instead of the family's.

    Returns:
        The folder.
    """
    if family not in FAMILY_CONFIGS and is_version_4():
        pytest.skip(f"this transformers does not know {family}")
    create_config, values = FAMILY_CONFIGS[family]
    config = create_config(**spelled(values | overrides))
    with _without_initialization():
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    if is_version_4():
        model.tie_weights()  # weights are tied during the initialization, which was skipped
    randomize(model, seed)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    # Sampling defaults do not belong to a family: tests that need defaults write their own file.
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


@kept
def make_short_bundled_model(folder: Path, *, num_layers: int = 2) -> Path:
    """Write a model with the tokenizer and the first layers of the bundled model, which has six.

    Args:
        folder: created when it is not there.
        num_layers: number of layers.

    Returns:
        The folder.
    """
    shutil.copytree(BUNDLED_MODEL, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    (folder / "config.json").write_text(json.dumps(config))
    path, first = folder / "model.safetensors", {str(n) for n in range(num_layers)}
    kept_weights = {
        name: weight
        for name, weight in load_file(path).items()
        if (layer := re.search(r"layers\.(\d+)", name)) is None or layer[1] in first
    }
    save_file(kept_weights, path, {"format": "pt"})
    return folder


def _without_initialization() -> AbstractContextManager[None]:
    """Leave weights uninitialised, because transformers 4 fails to initialise a norm without
    bias.
    """
    if not is_version_4():
        return nullcontext()
    from transformers.modeling_utils import no_init_weights

    return no_init_weights()


def spelled(values: dict[str, Any]) -> dict[str, Any]:
    """Spell values of a config as the installed transformers spells them."""
    rope = dict(values.get("rope_parameters") or {})
    if not is_version_4() or not rope:
        return values
    others = {name: value for name, value in values.items() if name != "rope_parameters"}
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    name = "type" if kind == "longrope" else "rope_type"  # Phi 3 accepts the older name only
    return others | {"rope_theta": theta, "rope_scaling": {name: kind, **rope}}


@torch.no_grad()
def randomize(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # The biases of a router and the factors of layers are buffers, not parameters.
    ends = ("correction_bias", "expert_bias", "layer_scalar")
    buffers = [(n, b) for n, b in model.named_buffers() if n.endswith(ends)]
    for name, param in sorted([*model.named_parameters(), *buffers]):
        values = torch.randn(param.shape, generator=generator)
        if name.endswith("bias"):
            param.copy_(values * 0.1)
        elif param.dim() == 1:  # the weight of a norm
            param.copy_(1 + values * 0.1)
        elif "embed" in name:
            param.copy_(values * 0.2)
        else:
            if "fc2" in name:
                # The mean of ReLU outputs is not zero: unless the rows sum to zero, every token
                # gets the same output.
                values -= values.mean(dim=1, keepdim=True)
            # Blocks of Zamba2 have no residuals: with larger weights, rounding errors grow.
            is_block = "shared_transformer" in name or name.endswith(".linear.weight")
            scale = 0.6 if is_block else 1.5
            param.copy_(values * scale * param.shape[1] ** -0.5)
