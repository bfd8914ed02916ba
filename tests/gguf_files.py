"""Write GGUF files of tiny models with the package gguf, and dense checkpoints with the same
weights.

Names, sizes and the order of rows follow the published description of the format.
"""

import json
import math
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
    "cohere": "command-r",
    "glm": "chatglm",
    "gpt_bigcode": "starcoder",
    "gpt_neox": "gptneox",
    "gpt_oss": "gpt-oss",
    "phi": "phi2",
    "deepseek_v2": "deepseek2",
    "glm4_moe": "glm4moe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "minimax_m2": "minimax-m2",
    "deepseek_v3": "deepseek2",
}
_NEIGHBOURS = (
    "llama",
    "olmo",
    "granite",
    "granitemoe",
    "baichuan",
    "internlm2",
    "smollm3",
    "arcee",
)
"""Architectures whose queries and keys are stored for rotations of neighbouring elements."""
_NAMES |= {
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "bert.pooler.dense": "cls",
    "classifier": "cls.output",
}
_LEFT_OUT = ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias")
"""Tensors that files of encoders lack."""
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
    """Return bytes of random blocks, with finite scales, of a type that the package cannot
    write."""
    rng = np.random.default_rng(seed)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // size, num_bytes), dtype=np.uint8)
    for place, largest in _SCALES.get(kind.name, {}).items():
        scale = np.array([spread * 2 / largest], "<f2").view(np.uint8)
        blocks[..., place : place + 2] = scale
    if kind.name == "IQ1_M":  # the scale of IQ1_M is in the high halves of four bytes
        digits = np.array([spread * 2 / 15], "<f2").view(np.uint16)[0]
        for i in range(4):
            high = int(digits) >> 4 * i & 15
            blocks[..., 49 + 2 * i] = blocks[..., 49 + 2 * i] & 15 | high << 4
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    source: Path,
    target: Path,
    type_of: TypeOf = lambda name: Type.F32,
    architecture: str | None = None,
    splits_latent: bool = True,
    **metadata: Any,
) -> Path:
    """Write a GGUF file of a checkpoint.

    Args:
        source: folder with a dense checkpoint, and perhaps a tokenizer.
        target: folder for model.gguf, and for dense/, the checkpoint with the rounded weights.
        type_of: returns the type of a tensor.
        architecture: architecture in the file; None: the model's own.
        splits_latent: write separate tensors for keys and values of latent attention, as in newer
            files.
        metadata: values that replace others, with "__" for "."; None leaves one out.

    Returns:
        Path of the file.
    """
    config = json.loads((source / "config.json").read_text())
    arch = architecture or _ARCHITECTURES.get(config["model_type"], config["model_type"])
    adds_one = arch.startswith(("gemma", "nemotron"))
    path = target / "model.gguf"
    writer = gguf.GGUFWriter(path, arch)
    values = _metadata(arch, config)
    if config.get("kv_lora_rank"):
        values |= _latent_metadata(arch, config, splits_latent)
    if (source / "tokenizer.json").is_file():
        is_bert = arch == "bert"
        values |= word_piece_metadata(source) if is_bert else byte_level_metadata(source)
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
    dense |= _add_fused_experts(writer, weights, arch, type_of)
    weights = _stacked_head_norms(weights)
    known = gguf.get_tensor_name_map(_ARCH_NUMBERS[arch], 64)
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    for name, tensor in weights.items():
        if name in _LEFT_OUT:
            dense[name] = tensor
            continue
        if name.endswith(".kv_b_proj.weight") and splits_latent:
            dense[name] = _add_latent(writer, name, tensor.float(), config, type_of)
            continue
        stored = _gguf_name(name, _GEMMA_NAMES if arch in ("gemma2", "gemma3") else _NAMES, known)
        values = tensor.float()
        if "shared_expert_gate" in name:
            values = values[0]
        part = stored.split(".")[-2]
        is_transposed = arch == "gpt2" and stored.startswith("blk.") and values.dim() == 2
        if is_transposed:
            values = values.T.contiguous()
        order = None
        if arch in _NEIGHBOURS and part in heads:
            order = _interleaved(torch.arange(len(values)), config[heads[part]])
        elif part == "attn_qkv" and arch in ("bloom", "gptneox", "falcon"):
            order = _one_behind_the_other(len(values), arch, config)
        if order is not None:
            values = values[order]
        is_norm = adds_one and stored.endswith("norm.weight")
        if is_norm:
            values = values + 1
        kind = type_of(stored) if values.dim() == 2 else Type.F32
        rounded = _add_tensor(writer, stored, values, kind, len(dense))
        if is_norm:
            rounded = rounded - 1
        if order is not None:
            rounded = rounded[order.argsort()]
        if is_transposed:
            rounded = rounded.T
        dense |= _as_in_checkpoint(name, rounded.reshape(tensor.shape).contiguous())
    rope = _rope(config)
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
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


def _add_latent(
    writer: gguf.GGUFWriter, name: str, weight: Tensor, config: dict[str, Any], type_of: TypeOf
) -> Tensor:
    """Add the projections of latent vectors, with a matrix for each head; the projection to keys is
    transposed. Return the rounded weight.
    """
    sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
    keys, values = weight.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
    rounded = []
    for part, each in (("k", keys.mT.contiguous()), ("v", values.contiguous())):
        stored = f"blk.{name.split('.')[2]}.attn_{part}_b.weight"
        rounded.append(_add_tensor(writer, stored, each, type_of(stored), 0))
    return torch.cat((rounded[0].mT, rounded[1]), dim=1).flatten(0, 1)


def _latent_metadata(arch: str, config: dict[str, Any], splits_latent: bool) -> dict[str, Any]:
    rotated, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
    key, value = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    values: dict[str, Any] = {
        "rope.dimension_count": rotated,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": latent,
        "attention.head_count_kv": config["num_attention_heads"],
        "attention.key_length": key,
        "attention.value_length": value,
    }
    if splits_latent:
        values |= {
            "attention.head_count_kv": 1,
            "attention.key_length": latent + rotated,
            "attention.value_length": latent,
            "attention.key_length_mla": key,
            "attention.value_length_mla": value,
        }
    return {f"{arch}.{name}": number for name, number in values.items()}


def _routing_metadata(config: dict[str, Any]) -> dict[str, Any]:
    is_sigmoid = config["model_type"] != "deepseek_v2"
    num_groups = config.get("n_group") or 1
    return {
        "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": bool(config.get("norm_topk_prob")),
        "expert_gating_func": 2 if is_sigmoid else 1,
        "expert_group_count": num_groups if num_groups > 1 else None,
        "expert_group_used_count": config["topk_group"] if num_groups > 1 else None,
    }


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of the rotary embedding, as transformers 5 or 4 spells them."""
    older = {"rope_theta": config.get("rope_theta")} | (config.get("rope_scaling") or {})
    return config.get("rope_parameters") or older


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, values: Tensor, kind: Type, seed: int
) -> Tensor:
    """Add a tensor in blocks of a type; return the values that the blocks represent."""
    if values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = Type.F16  # converters use F16 for these tensors
    if kind.name in RANDOM_TYPES:
        data = random_blocks(kind, tuple(values.shape), float(values.std()), seed)
    else:
        data = gguf.quantize(values.numpy(), kind)
    writer.add_tensor(name, data, raw_dtype=None if kind in (Type.F32, Type.F16) else kind)
    return torch.from_numpy(gguf.dequantize(data, kind).astype(np.float32))


_ARCH_NUMBERS = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
_HEAD_NORM = re.compile(r"(.*\.[qk]_layernorm)\.norms\.(\d+)\.weight")


def _stacked_head_norms(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the norms of the heads of StableLM as one tensor."""
    found: dict[str, Any] = {}
    for name in sorted(weights, key=lambda n: [int(d) for d in re.findall(r"\d+", n)]):
        match = _HEAD_NORM.fullmatch(name)
        if match is None:
            found[name] = weights[name]
        else:
            found.setdefault(f"{match[1]}.weight", []).append(weights[name])
    return {n: torch.stack(w) if isinstance(w, list) else w for n, w in found.items()}


def _as_in_checkpoint(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Undo `_stacked_head_norms`: return one tensor for each head."""
    if not re.search(r"\.[qk]_layernorm\.weight$", name):
        return {name: tensor}
    stem = name.removesuffix("weight")
    return {f"{stem}norms.{i}.weight": row.clone() for i, row in enumerate(tensor)}


def _add_fused_experts(
    writer: gguf.GGUFWriter, weights: dict[str, Tensor], arch: str, type_of: TypeOf
) -> dict[str, Tensor]:
    """Write the tensors that contain all experts of a layer, and remove them from `weights`. Return
    the rounded tensors.
    """
    dense: dict[str, Tensor] = {}
    for name in [
        n for n in weights if re.search(r"\.(experts|block_sparse_moe)\.(?!e_score)\w+_", n)
    ]:
        values = weights[name].float()
        layer, kind = name.split(".")[2], "bias" if name.endswith("_bias") else "weight"
        if "gate_up" in name or "input_linear" in name:
            half = values.shape[1] // 2
            if arch == "gpt-oss":
                parts = {"gate": values[..., ::2], "up": values[..., 1::2]}
            else:
                parts = {"gate": values[:, :half], "up": values[:, half:]}
        else:
            parts = {"down": values}
        is_turned = arch == "gpt-oss" and kind == "weight"
        rounded = {}
        for part, each in parts.items():
            stored = f"blk.{layer}.ffn_{part}_exps.{kind}"
            each = (each.mT if is_turned else each).contiguous()
            type_ = type_of(stored) if kind == "weight" else Type.F32
            made = _add_tensor(writer, stored, each, type_, len(dense))
            rounded[part] = made.mT if is_turned else made
        if "down" in rounded:
            dense[name] = rounded["down"].contiguous()
        elif arch == "gpt-oss":
            dense[name] = torch.stack([rounded["gate"], rounded["up"]], -1).flatten(-2)
        else:
            dense[name] = torch.cat([rounded["gate"], rounded["up"]], 1)
        del weights[name]
    return dense


def _one_behind_the_other(num_rows: int, arch: str, config: dict[str, Any]) -> Tensor:
    """Return, for the order of all queries, all keys, all values, the index of each row in the
    order by groups.
    """
    num_heads = _first(config, "num_attention_heads", "n_head")
    groups = num_heads
    if arch == "falcon":
        groups = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
    size = num_rows // (num_heads + 2 * groups)
    rows = torch.arange(num_rows).view(groups, -1, size)
    return torch.cat([rows[:, :-2].flatten(), rows[:, -2].flatten(), rows[:, -1].flatten()])


def _first(config: dict[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _num_kv_heads(config: dict[str, Any]) -> int | None:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return _first(config, "num_key_value_heads", "num_kv_heads")


def _metadata(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    rope = _rope(config)
    full = rope.get("full_attention", rope)
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    num_heads = _first(config, "num_attention_heads", "n_head", "n_heads")
    inner = _first(config, "intermediate_size", "n_inner", "ffn_hidden_size") or 4 * hidden
    head = config.get("head_dim") or hidden // num_heads
    layer_norm = _first(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    values: dict[str, Any] = {
        "context_length": _first(config, "max_position_embeddings", "n_positions", "max_seq_len")
        or 2048,
        "embedding_length": hidden,
        "block_count": _first(config, "num_hidden_layers", "n_layer", "n_layers"),
        "feed_forward_length": None if arch == "gpt-oss" else inner,
        "attention.head_count": num_heads,
        "attention.head_count_kv": _num_kv_heads(config),
        "attention.key_length": config.get("head_dim"),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": 1e-5 if arch == "olmo" else layer_norm,
        "attention.clamp_kqv": _first(config, "clip_qkv")
        or (config.get("attn_config") or {}).get("clip_qkv"),
        "attention.max_alibi_bias": 8.0 if arch in ("mpt", "bloom") else None,
        "use_parallel_residual": config.get("use_parallel_residual"),
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
        "attention.scale": config.get("attention_multiplier"),
        "logit_scale": _first(config, "logits_scaling", "logit_scale"),
    }
    if full.get("rope_theta"):
        partial = full.get("partial_rotary_factor") or 1.0
        values["rope.freq_base"] = float(full["rope_theta"])
        values["rope.dimension_count"] = int(head * partial)
    if full.get("rope_type") == "longrope":
        original = config["original_max_position_embeddings"]
        values["rope.scaling.original_context_length"] = original
        stretch = config["max_position_embeddings"] / original
        values["rope.scaling.attn_factor"] = (
            math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
        )
    if arch in ("phi3", "cohere2", "gpt-oss", "starcoder2", "exaone4"):
        values["attention.sliding_window"] = config.get("sliding_window")
    if full.get("rope_type") in ("linear", "yarn"):
        values["rope.scaling.type"] = full["rope_type"]
        values["rope.scaling.factor"] = full["factor"]
        if full.get("mscale_all_dim"):
            values["rope.scaling.yarn_log_multiplier"] = 0.1 * full["mscale_all_dim"]
        original = full.get("original_max_position_embeddings")
        values["rope.scaling.original_context_length"] = original
    if "num_experts_per_tok" in config:
        values |= {
            "expert_count": _first(config, "num_local_experts", "num_experts", "n_routed_experts"),
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config.get("moe_intermediate_size")
            or (inner if arch in ("gpt-oss", "minimax-m2") else None),
            "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        }
    if arch == "minimax-m2":
        values["expert_gating_func"] = 2
    if "n_routed_experts" in config:
        values |= _routing_metadata(config)
    if arch in ("gemma2", "gemma3"):
        values["attention.sliding_window"] = config["sliding_window"]
        values["attn_logit_softcapping"] = config.get("attn_logit_softcapping")
        values["final_logit_softcapping"] = config.get("final_logit_softcapping")
    named = {f"{arch}.{name}": value for name, value in values.items()}
    return named | {
        "tokenizer.ggml.bos_token_id": config.get("bos_token_id"),
        "tokenizer.ggml.eos_token_id": config.get("eos_token_id"),
        "tokenizer.ggml.padding_token_id": config.get("pad_token_id"),
    }


def _llama3_divisors(rope: dict[str, Any], head_size: int) -> np.ndarray:
    """Return the factor by which each frequency is divided."""
    frequencies = rope["rope_theta"] ** -(np.arange(0, head_size, 2) / head_size)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / (keep + (1 - keep) / rope["factor"])).astype(np.float32)


def byte_level_metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata of the tokenizer of the bundled model."""
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


def word_piece_metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata of a BERT tokenizer: pieces that begin a word have a space in front, and
    other pieces have no marks.
    """
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = []
    for piece in sorted(vocabulary, key=vocabulary.__getitem__):
        is_kept = piece in special or piece.startswith("[unused")
        tokens.append(piece if is_kept else f"\u2581{piece}".replace("\u2581##", ""))
    ids = {"unknown": "[UNK]", "seperator": "[SEP]", "padding": "[PAD]", "mask": "[MASK]"}
    named = {name: special[token] for name, token in (ids | {"cls": "[CLS]"}).items()}
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        **{f"tokenizer.ggml.{name}_token_id": i for name, i in named.items()},
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


def _gguf_name(name: str, names: dict[str, str], known: gguf.TensorNameMap) -> str:
    """Return the name in a GGUF file, by the table here or by the table of the package."""
    name = name.replace(".e_score_correction_bias", ".e_score_correction.bias")
    stem, _, kind = name.rpartition(".")
    if name.endswith(".sinks"):
        return f"{known.get_name(name)}.weight"
    found = None if stem.startswith("model.layers") else names.get(stem)
    if stem.startswith("model.layers."):
        _, _, index, part = stem.split(".", 3)
        found = names.get(part) and f"blk.{index}.{names[part]}"
    if names is _NAMES and not stem.startswith("classifier"):
        found = _by_package(stem, known) or found
    assert found is not None, name
    return f"{found}.{kind}"


def _by_package(stem: str, known: gguf.TensorNameMap) -> str | None:
    """Return the name in the table of the package, trying several prefixes because the package does
    not know all of them.
    """
    spellings = (
        *(stem, f"transformer.{stem}", stem.removeprefix("transformer.")),
        stem.removeprefix("bert."),
    )
    found: str | None = next((n for n in map(known.get_name, spellings) if n is not None), None)
    return found


def _interleaved(rows: Tensor, num_heads: int) -> Tensor:
    """Return the rows of a head in the order 0, D / 2, 1, D / 2 + 1..."""
    return rows.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
