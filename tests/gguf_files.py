"""GGUF files of tiny models, written with the package gguf, and the same weights dense.

Names, sizes and the order of rows are written here by the published description of the format.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

TypeOf = Callable[[str], Type]
"""Name in the GGUF file -> type of a matrix."""

OUR_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""Types of blocks that are read without the package."""
_SCALES = {
    "Q2_K": {80: 3 * 15, 82: 15},
    "Q3_K": {108: 4 * 32},
    "Q4_K": {0: 15 * 40, 2: 40},
    "Q5_K": {0: 31 * 40, 2: 40},
    "Q6_K": {208: 32 * 64},
    "IQ2_XXS": {0: 43 * 4},
    "IQ2_XS": {0: 43 * 4},
    "IQ2_S": {0: 43 * 4},
    "IQ3_XXS": {0: 62 * 8},
    "IQ3_S": {0: 15 * 31},
    "IQ1_S": {0: 15},
    "IQ4_NL": {0: 127},
    "IQ4_XS": {0: 127 * 32},
}
"""Types that the package cannot write -> where a block has float16 scales, and the largest number
that each is multiplied with."""
RANDOM_TYPES = (*_SCALES, "IQ1_M")

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_NAMES = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_ARCHITECTURES = {
    "mistral": "llama",
    "gemma3_text": "gemma3",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
_NAMES |= {
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_EXPERT = re.compile(r"(model\.layers\.(\d+)\.\S+\.experts)\.0\.(\w+)\.weight")
_EXPERT_NAMES = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w2": "down",
    "w3": "up",
}


def random_blocks(kind: Type, shape: tuple[int, ...], spread: float, seed: int = 0) -> np.ndarray:
    """Bytes of random blocks, with finite scales, of a type that the package cannot write."""
    rng = np.random.default_rng(seed)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // size, num_bytes), dtype=np.uint8)
    for place, largest in _SCALES.get(kind.name, {}).items():
        scale = np.array([spread * 2 / largest], "<f2").view(np.uint8)
        blocks[..., place : place + 2] = scale
    if kind.name == "IQ1_M":  # its scale is in the high halves of four bytes
        digits = np.array([spread * 2 / 15], "<f2").view(np.uint16)[0]
        for i in range(4):
            high = int(digits) >> 4 * i & 15
            blocks[..., 49 + 2 * i] = blocks[..., 49 + 2 * i] & 15 | high << 4
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    source: Path,
    target: Path,
    type_of: TypeOf = lambda name: Type.F32,
    **metadata: Any,
) -> Path:
    """Write a GGUF file of a checkpoint.

    Args:
        source: folder with a dense checkpoint, and perhaps a tokenizer.
        target: folder for model.gguf, and for dense/, the checkpoint with the rounded weights.
        type_of: chooses types.
        metadata: values that replace others, with "__" for "."; None leaves one out.

    Returns:
        Path of the file.
    """
    config = json.loads((source / "config.json").read_text())
    arch = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    is_gemma = arch.startswith("gemma")
    path = target / "model.gguf"
    writer = gguf.GGUFWriter(path, arch)
    values = _metadata(arch, config)
    if (source / "tokenizer.json").is_file():
        values |= byte_level_metadata(source)
    values |= {name.replace("__", "."): value for name, value in metadata.items()}
    for name, value in values.items():
        if value is not None:
            _add(writer, name, value)
    dense: dict[str, Tensor] = {}
    weights = load_file(source / "model.safetensors")
    for name in [name for name in weights if _EXPERT.fullmatch(name)]:
        parent, layer, part = _EXPERT.fullmatch(name).groups()
        members = [f"{parent}.{i}.{part}.weight" for i in range(len(weights))]
        members = [member for member in members if member in weights]
        stored = f"blk.{layer}.ffn_{_EXPERT_NAMES[part]}_exps.weight"
        stacked = torch.stack([weights.pop(member).float() for member in members])
        rounded = _add_tensor(writer, stored, stacked, type_of(stored), len(dense))
        dense |= {m: x.clone() for m, x in zip(members, rounded, strict=True)}
    for name, tensor in weights.items():
        stored = _gguf_name(name, _GEMMA_NAMES if arch in ("gemma2", "gemma3") else _NAMES)
        values = tensor.float()
        if "shared_expert_gate" in name:
            values = values[0]
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        part = stored.split(".")[-2]
        if arch == "llama" and part in heads:
            values = _interleaved(values, config[heads[part]])
        if is_gemma and "norm" in stored:
            values = values + 1
        kind = type_of(stored) if values.dim() == 2 else Type.F32
        rounded = _add_tensor(writer, stored, values, kind, len(dense))
        if is_gemma and "norm" in stored:
            rounded = rounded - 1
        if arch == "llama" and part in heads:
            rounded = _halves_apart(rounded, config[heads[part]])
        dense[name] = rounded.reshape(tensor.shape).contiguous()
    rope = _rope(config)
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(rope, config["head_dim"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (target / "dense").mkdir()
    (target / "dense" / "config.json").write_text(json.dumps(config))
    save_file(dense, target / "dense" / "model.safetensors", {"format": "pt"})
    return path


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotations, as transformers 5 or 4 spells them."""
    older = {"rope_theta": config.get("rope_theta")} | (config.get("rope_scaling") or {})
    return config.get("rope_parameters") or older


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, values: Tensor, kind: Type, seed: int
) -> Tensor:
    """Add a tensor in blocks of a type; the numbers that they stand for."""
    if values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = Type.F16  # as converters do
    if kind.name in RANDOM_TYPES:
        data = random_blocks(kind, tuple(values.shape), float(values.std()), seed)
    else:
        data = gguf.quantize(values.numpy(), kind)
    writer.add_tensor(name, data, raw_dtype=None if kind in (Type.F32, Type.F16) else kind)
    return torch.from_numpy(gguf.dequantize(data, kind).astype(np.float32))


def _metadata(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    rope = _rope(config)
    full = rope.get("full_attention", rope)
    values: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim"),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(full["rope_theta"]),
    }
    if full.get("rope_type") in ("linear", "yarn"):
        values["rope.scaling.type"] = full["rope_type"]
        values["rope.scaling.factor"] = full["factor"]
        original = full.get("original_max_position_embeddings")
        values["rope.scaling.original_context_length"] = original
    if "num_experts_per_tok" in config:
        values |= {
            "expert_count": config.get("num_local_experts") or config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config.get("moe_intermediate_size"),
            "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        }
    if arch in ("gemma2", "gemma3"):
        values["attention.sliding_window"] = config["sliding_window"]
        values["attn_logit_softcapping"] = config.get("attn_logit_softcapping")
        values["final_logit_softcapping"] = config.get("final_logit_softcapping")
    named = {f"{arch}.{name}": value for name, value in values.items()}
    return named | {
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.padding_token_id": config["pad_token_id"],
    }


def _llama3_divisors(rope: dict[str, Any], head_size: int) -> np.ndarray:
    """What each frequency is divided by."""
    frequencies = rope["rope_theta"] ** -(np.arange(0, head_size, 2) / head_size)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / (keep + (1 - keep) / rope["factor"])).astype(np.float32)


def byte_level_metadata(folder: Path) -> dict[str, Any]:
    """Of the tokenizer of the bundled model."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    merges = tokenizer["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": settings["chat_template"],
    }


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        (writer.add_uint32 if 0 <= value < 1 << 32 else writer.add_int64)(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def _gguf_name(name: str, names: dict[str, str]) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in names:
        return f"{names[stem]}.{kind}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{names[part]}.{kind}"


def _interleaved(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of a head in the order 0, D / 2, 1, D / 2 + 1..."""
    return rows.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def _halves_apart(rows: Tensor, num_heads: int) -> Tensor:
    """The inverse of `_interleaved`."""
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
