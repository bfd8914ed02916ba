"""Convert the metadata of a GGUF model to config.json and generation_config.json."""

import math
from typing import Any

import numpy as np

from vllm.errors import WeightLoadError
from vllm.transformers_utils.gguf.header import StoredTensor
from vllm.transformers_utils.gguf.model import GGUFModel, architectures
from vllm.transformers_utils.gguf.sizes import check_encoder_shapes, check_shapes, wrong_layers

ENDS_OF_TURN = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"),
    *("<|return|>", "<|call|>"),
)
"""Tokens that end an answer, in addition to the one that the metadata names. They are control
tokens, even if the metadata has another type for them, as in files of some fine-tuned models."""
_END_OF_PART, _END_OF_ANSWER = "<|end|>", "<|return|>"
"""GPT-OSS has both. The first one ends its thoughts there, and the second one the answer."""

_OLD_LINEAR = ".rope.scale_linear"
"""Metadata of files of 2023 with the factor of linear scaling."""

_SCORES = {1: "softmax", 2: "sigmoid"}
"""Value of `expert_gating_func` -> name in config.json."""

_POOLING = {1: "mean", 2: "cls", 3: "lasttoken"}
"""Value of `pooling_type` -> name in sentence-transformers."""
_NOT_POOLED = (0, 4)
"""Values of models without a way to pool, and of models that score pairs of texts."""


def read_config(model: GGUFModel) -> dict[str, Any]:
    """Return the content of a config.json for the model.

    Raises:
        WeightLoadError: metadata is missing, or contradicts the tensors.
    """
    kind, family, gguf = model.architecture, model.family, model.gguf
    if family.is_encoder:
        return _encoder_config(model)
    hidden_size, head_size = model.size(".embedding_length"), model.head_size
    if gguf.has_latent_attention:
        head_size = model.size(".rope.dimension_count")  # only these elements are rotated
    num_layers = model.num_layers
    names = model.module_names()
    vocab_size = _rows_of(model, "token_embd", "model.embed_tokens")
    config: dict[str, Any] = {
        "architectures": [family.architectures[0]],
        "model_type": family.model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": _inner_size(model),
        "num_hidden_layers": num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_heads if gguf.has_latent_attention else model.num_kv_heads,
        "head_dim": head_size,
        "max_position_embeddings": model.size(".context_length"),
        gguf.norm_key: _norm_eps(model),
        "tie_word_embeddings": "lm_head.weight" not in names,
        "dtype": _dtype(model),
        **_tokens(model, vocab_size),
        **_rope(model, head_size),
    }
    if gguf.has_latent_attention:
        config |= _latent(model)
    if model.metadata.get(f"{kind}.expert_count"):
        config |= _experts(model, config)
    activation_key, activation = gguf.activation
    config |= {activation_key: activation, **gguf.constants}
    first = "model.layers.0."
    config |= {key: first + tensor in names for key, tensor in gguf.flags.items()}
    if gguf.fewer_norms is not None:
        key, tensor = gguf.fewer_norms
        config[key] = 2 if first + tensor in names else 1
    config |= _values(model)
    period = gguf.window_period or family.full_attention_every
    if period is not None:
        config |= _windows(model, num_layers, period)
    if gguf.unscaled_layers is not None:
        config |= _gemma(model, config)
    # The family recognises by this number that a model uses ALiBi.
    if num_layers == gguf.alibi_layers:
        del config["rope_parameters"]
        config["model_max_length"] = config.pop("max_position_embeddings")
    check_shapes(model, config)
    if gguf.omits_head_size:
        del config["head_dim"]
    return config


def _encoder_config(model: GGUFModel) -> dict[str, Any]:
    names, gguf = model.module_names(), model.gguf
    vocab_size = _rows_of(model, "token_embd", "model.embeddings.word_embeddings")
    has_classes = "classifier.weight" in names
    activation_key, activation = gguf.activation
    config: dict[str, Any] = {
        "architectures": [model.family.architectures[1 if has_classes else 0]],
        "model_type": model.family.model_type,
        "vocab_size": vocab_size,
        "type_vocab_size": _rows_of(model, "token_types", "model.embeddings.token_type_embeddings"),
        "hidden_size": model.size(".embedding_length"),
        "intermediate_size": model.size(".feed_forward_length"),
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "max_position_embeddings": model.size(".context_length"),
        gguf.norm_key: _norm_eps(model),
        "dtype": _dtype(model),
        activation_key: activation,
        **_tokens(model, vocab_size),
    }
    if has_classes:
        labels = range(names["classifier.weight"].shape[0])
        config["id2label"] = {str(i): f"LABEL_{i}" for i in labels}
    check_encoder_shapes(model, config)
    return config


def _rows_of(model: GGUFModel, stored: str, name: str) -> int:
    """Return the number of entries in an embedding table.

    Args:
        model: model with the table.
        stored: name of the table in the file.
        name: name of the module in this package.

    Raises:
        WeightLoadError: the file has no such tensor.
    """
    table = model.module_names().get(f"{name}.weight")
    if table is None:
        raise WeightLoadError(f"{model.paths[0]} has no tensor {stored}.weight")
    return table.shape[0]


_SAMPLING = "general.sampling."
_OTHER_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
"""Name of a sampling default in the metadata -> its name in generation_config.json, if they
differ."""


def read_generation_config(model: GGUFModel) -> dict[str, Any]:
    """Return the content of a generation_config.json: the tokens that end an output, and defaults
    for sampling.
    """
    named = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [model.metadata.get(f"tokenizer.ggml.{name}") for name in named]
    tokens = model.metadata.get("tokenizer.ggml.tokens") or []
    for text in ENDS_OF_TURN:
        if text in tokens and not (text == _END_OF_PART and _END_OF_ANSWER in tokens):
            ids.append(tokens.index(text))
    found = sorted({i for i in ids if type(i) is int and 0 <= i < len(tokens)})
    sampling = {}
    for key, value in model.metadata.items():
        name = key.removeprefix(_SAMPLING)
        if name != key and isinstance(value, int | float):
            # The file has 0.6 with the rounding of 32 bits.
            sampling[_OTHER_NAMES.get(name, name)] = round(value, 6)
    return ({"eos_token_id": found} if found else {}) | sampling


def read_pooling(model: GGUFModel) -> dict[str, Any]:
    """Return the files in which sentence-transformers describes pooling: name -> content.

    Empty if the metadata does not describe pooling, or the model is a classifier.

    Raises:
        WeightLoadError: the metadata names an unknown kind of pooling.
    """
    kind = model.metadata.get(f"{model.architecture}.pooling_type", 0)
    if kind in _NOT_POOLED:
        return {}
    if type(kind) is not int or kind not in _POOLING:
        raise WeightLoadError(
            f"{model.paths[0]}: the metadata '{model.architecture}.pooling_type' is "
            f"{str(kind)[:40]}; supported: 0 (none), 1 (mean), 2 (CLS), 3 (last), 4 (rank). "
            f"Convert the model again"
        )
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    prefix = "sentence_transformers.models."
    return {
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": prefix + name}
            for i, (path, name) in enumerate(modules.items())
        ],
        "1_Pooling/config.json": {"pooling_mode": _POOLING[kind]},
    }


def _dtype(model: GGUFModel) -> str:
    """Return the dtype of the model: float32 if it is stored in F32, else bfloat16.

    F16 also becomes bfloat16, because kernels compute in it, and most of these files were made from
    bfloat16 checkpoints.
    """
    types = {tensor.type.name for tensor in model.tensors.values() if len(tensor.shape) > 1}
    return "float32" if types == {"F32"} else "bfloat16"


def _tokens(model: GGUFModel, vocab_size: int) -> dict[str, Any]:
    found = {}
    for key, name in (
        ("bos_token_id", "bos_token_id"),
        ("eos_token_id", "eos_token_id"),
        ("pad_token_id", "padding_token_id"),
    ):
        value = model.metadata.get(f"tokenizer.ggml.{name}")
        if value is not None and (type(value) is not int or not 0 <= value < vocab_size):
            raise WeightLoadError(
                f"{model.paths[0]}: the metadata 'tokenizer.ggml.{name}' is {str(value)[:40]}, "
                f"but the model has {vocab_size} tokens"
            )
        found[key] = value
    return found


def _rope(model: GGUFModel, head_size: int) -> dict[str, Any]:
    if not model.gguf.has_rotations:
        return {}
    kind = model.architecture
    length = model.size(".context_length")
    original = model.metadata.get(f"{kind}.rope.scaling.original_context_length") or length
    num_rotated = model.get(".rope.dimension_count", int, head_size)
    if not 0 < num_rotated <= head_size:
        raise WeightLoadError(
            f"{model.paths[0]}: the metadata '{kind}.rope.dimension_count' must be a number "
            f"from 1 to {head_size}, the size of a head; got {num_rotated}"
        )
    scaling = _rope_scaling(model, num_rotated, original)
    factors = model.rope_factors
    if factors is not None:
        values = _divisors(factors, num_rotated)
        # Llama 3.1 stores the resulting divisors of the frequencies instead of the RoPE settings.
        scaling = {
            "rope_type": "longrope",
            "short_factor": values,
            "long_factor": values,
            "attention_factor": 1.0,
            "factor": 1.0,
            "original_max_position_embeddings": length,
        }
    full = {"rope_theta": model.get(".rope.freq_base", float, 10000.0), **scaling}
    if num_rotated != head_size:
        full["partial_rotary_factor"] = num_rotated / head_size
    made: dict[str, Any] = {"rope_parameters": full}
    if model.factors_by_length is not None:
        made["original_max_position_embeddings"] = original
    if not model.gguf.has_window_theta:
        return made
    local = model.get(".rope.freq_base_swa", float, 10000.0)
    sliding = {"rope_type": "default", "rope_theta": local}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


def _rope_scaling(model: GGUFModel, num_rotated: int, original: Any) -> dict[str, Any]:
    """Return the parameters of scaled rotary positions that the metadata describes.

    Args:
        model: the model.
        num_rotated: number of rotated elements of a head.
        original: number of positions before they were scaled.
    """
    kind, by_length = model.architecture, model.factors_by_length
    scaling_type = model.get(".rope.scaling.type", str, "none")
    if by_length is not None:
        short, long = (_divisors(factors, num_rotated) for factors in by_length)
        scaling = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
        }
        if f"{kind}.rope.scaling.attn_factor" in model.metadata:
            scaling["attention_factor"] = model.get(".rope.scaling.attn_factor", float)
        return scaling
    if scaling_type != "yarn":
        _check_unscaled(model)
    if scaling_type == "none":
        if f"{kind}{_OLD_LINEAR}" in model.metadata:
            return {"rope_type": "linear", "factor": model.get(_OLD_LINEAR, float)}
        return {"rope_type": "default"}
    if scaling_type not in ("linear", "yarn"):
        raise WeightLoadError(
            f"{model.paths[0]}: the metadata '{kind}.rope.scaling.type' is {scaling_type!r}; "
            f"supported: none, linear, yarn"
        )
    scaling = {"rope_type": scaling_type, "factor": model.get(".rope.scaling.factor", float)}
    if scaling_type == "yarn":
        scaling["original_max_position_embeddings"] = original
        scaling |= {**model.gguf.yarn, **_yarn(model, float(scaling["factor"]))}
    return scaling


_EXTRAPOLATION = ".rope.scaling.yarn_ext_factor"


def _sharpness(model: GGUFModel) -> float:
    """Return the factor of cosines and sines that the metadata adds to the formula of YaRN."""
    names = (".rope.scaling.attn_factor", ".rope.scaling.yarn_attn_factor")
    return math.prod(model.get(name, float, 1.0) for name in names)


def _check_unscaled(model: GGUFModel) -> None:
    """Refuse a factor of cosines and sines for rotary positions that have none."""
    if (given := _sharpness(model)) != 1.0:
        raise WeightLoadError(
            f"{model.paths[0]}: the metadata '{model.architecture}.rope.scaling.attn_factor' is "
            f"{given:g}; without the type yarn it must be 1. Convert the model again"
        )


def _yarn(model: GGUFModel, factor: float) -> dict[str, float]:
    """Return the parameters of YaRN, which few files have.

    Args:
        model: the model.
        factor: how many times longer contexts became.

    Raises:
        WeightLoadError: high frequencies are scaled like low ones, or only in part.
    """
    found: dict[str, float] = {}
    extrapolation = model.get(_EXTRAPOLATION, float, 1.0)
    if extrapolation >= 0 and extrapolation != 1:  # negative: the default
        raise WeightLoadError(
            f"{model.paths[0]}: the metadata '{model.architecture}{_EXTRAPOLATION}' is "
            f"{extrapolation:g}; supported: 1. Convert the model again"
        )
    for key in ("beta_fast", "beta_slow"):
        if f"{model.architecture}.rope.scaling.yarn_{key}" in model.metadata:
            found[key] = model.get(f".rope.scaling.yarn_{key}", float)
    # The factor of the logarithm equals 0.1 * `mscale_all_dim`.
    weight = model.get(".rope.scaling.yarn_log_multiplier", float, 0.0)
    if weight:
        found["mscale"] = found["mscale_all_dim"] = round(weight * 10, 6)
    if (sharpness := _sharpness(model)) != 1.0:
        usual = 1.0 if weight or factor <= 1 else 0.1 * math.log(factor) + 1.0
        found["attention_factor"] = sharpness * usual
    return found


def _latent(model: GGUFModel) -> dict[str, Any]:
    """Return the sizes of latent attention, whose metadata keys depend on the age of the file.

    Raises:
        WeightLoadError: a size is missing or contradicts another one.
    """
    sizes, rank_name = {}, ".attention.q_lora_rank"
    has_ranks = bool(model.metadata.get(model.architecture + rank_name))
    for part in ("key", "value"):
        name = f".attention.{part}_length"
        is_new = f"{model.architecture}{name}_mla" in model.metadata
        sizes[part] = model.size(f"{name}_mla" if is_new else name)
    num_rotated = model.size(".rope.dimension_count")
    if num_rotated >= sizes["key"]:
        raise WeightLoadError(
            f"{model.paths[0]}: the metadata '{model.architecture}.rope.dimension_count' is "
            f"{num_rotated}, but a key has {sizes['key']} elements, and some are not rotated. It "
            "is damaged; download it again"
        )
    return {
        "q_lora_rank": model.size(rank_name) if has_ranks else None,
        "kv_lora_rank": model.size(".attention.kv_lora_rank"),
        "qk_nope_head_dim": sizes["key"] - num_rotated,
        "qk_rope_head_dim": num_rotated,
        "v_head_dim": sizes["value"],
    }


def _divisors(factors: StoredTensor, num_rotated: int) -> list[float]:
    """Return the divisors of the rotary frequencies for `num_rotated` elements.

    Raises:
        WeightLoadError: the tensor has the wrong type or size, or values that cannot be divisors.
    """
    count = num_rotated // 2
    if factors.type.name != "F32" or factors.shape != (count,):
        raise WeightLoadError(
            f"the RoPE factors of {factors.path} must be F32 [{count}], got {factors.type.name} "
            f"{list(factors.shape)}"
        )
    values: list[float] = np.fromfile(factors.path, "<f4", count, offset=factors.start).tolist()
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise WeightLoadError(f"the RoPE factors in {factors.path} must be finite numbers above 0")
    return values


def _inner_size(model: GGUFModel) -> int:
    """Return the size of the MLP; for models that have only experts, the size of one expert."""
    name, of_expert = ".feed_forward_length", ".expert_feed_forward_length"
    has_name, has_other = (
        model.architecture + each in model.metadata for each in (name, of_expert)
    )
    has_experts_only = model.gguf.expert_count_key is not None and has_other
    return model.size(of_expert if has_experts_only or (not has_name and has_other) else name)


def _norm_eps(model: GGUFModel) -> float:
    """Return the epsilon of norms. Files name it after the kind of norm."""
    name = ".attention.layer_norm_epsilon"
    if model.architecture + name not in model.metadata:
        name = ".attention.layer_norm_rms_epsilon"
    return model.get(name, float)


def _values(model: GGUFModel) -> dict[str, Any]:
    """Return the metadata values that only models of this family have.

    Raises:
        WeightLoadError: a value is not a number.
    """
    found: dict[str, Any] = {}
    for key, name in model.gguf.values.items():
        value = model.metadata.get(model.architecture + name)
        if not isinstance(value, int | float | None):
            raise WeightLoadError(
                f"{model.paths[0]}: the metadata '{model.architecture}{name}' must be a number; "
                f"got {str(value)[:40]}"
            )
        if value or value is False:
            outer, _, inner = key.partition(".")
            found[outer] = {inner: value} if inner else value
    return found


def _windows(model: GGUFModel, num_layers: int, usual_period: int) -> dict[str, Any]:
    kind, name = model.architecture, ".attention.sliding_window"
    if num_layers > len(model.tensors):  # the missing tensor is reported by name later
        raise wrong_layers(model, num_layers)
    if model.gguf.windows_are_optional and kind + name not in model.metadata:
        return {"sliding_window": None, "layer_types": ["full_attention"] * num_layers}
    pattern = model.metadata.get(f"{kind}{name}_pattern", usual_period)
    if isinstance(pattern, list) and {type(each) for each in pattern} == {bool}:
        has_window = pattern[:num_layers]
    elif type(pattern) is int and pattern > 0:
        has_window = [(i + 1) % pattern > 0 for i in range(num_layers)]
    else:
        has_window = []
    if len(has_window) != num_layers:
        raise WeightLoadError(
            f"{model.paths[0]}: the metadata '{kind}{name}_pattern' is {str(pattern)[:40]}; it "
            f"must be a number of at least 1, or a list of true and false for {num_layers} layers"
        )
    kinds = [("full_attention", "sliding_attention")[each] for each in has_window]
    return {"sliding_window": model.size(name), "layer_types": kinds}


def _gemma(model: GGUFModel, config: dict[str, Any]) -> dict[str, Any]:
    kind, scale_of = model.architecture, config["head_dim"]
    if config["num_hidden_layers"] == model.gguf.unscaled_layers:
        scale_of = config["hidden_size"] // config["num_attention_heads"]
    caps = {
        "attn_logit_softcapping": f"{kind}.attn_logit_softcapping",
        "final_logit_softcapping": f"{kind}.final_logit_softcapping",
    }
    return {
        "query_pre_attn_scalar": scale_of,
        **{key: model.metadata.get(name) for key, name in caps.items()},
    }


def _experts(model: GGUFModel, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json for experts.

    Raises:
        WeightLoadError: models of the architecture have no experts, or the metadata contradicts
            itself.
    """
    kind, names, gguf = model.architecture, model.module_names(), model.gguf
    if not gguf.has_experts:
        raise WeightLoadError(
            f"{model.paths[0]} has a mixture of experts, which is not supported for the "
            f"architecture {kind!r}; supported for {', '.join(architectures(with_experts=True))}. "
            "Use the safetensors checkpoint of the model"
        )
    if config["num_hidden_layers"] > len(names):
        raise wrong_layers(model, config["num_hidden_layers"])
    count, used = model.size(".expert_count"), model.size(".expert_used_count")
    if used > count or count > len(names):
        raise WeightLoadError(
            f"{model.paths[0]}: the metadata '{kind}.expert_count' is {count}, and "
            f"'{kind}.expert_used_count' {used}; at most all experts are used, and the file has "
            f"{len(names)} matrices and vectors. It is damaged; download it again"
        )
    if gguf.is_routed:
        return {"num_experts_per_tok": used, **_routing(model, count)}
    found: dict[str, Any] = {"num_experts_per_tok": used, "num_experts": count}
    if gguf.expert_count_key is not None:
        return found | {gguf.expert_count_key: count}
    layers = range(config["num_hidden_layers"])
    found |= {
        "moe_intermediate_size": model.size(".expert_feed_forward_length"),
        "norm_topk_prob": model.get(".expert_weights_norm", bool, gguf.normalizes_experts),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in layers if f"model.layers.{i}.mlp.gate.weight" not in names],
    }
    if gguf.has_shared_expert:
        size = model.size(".expert_shared_feed_forward_length")
        found["shared_expert_intermediate_size"] = size
    return found


def _routing(model: GGUFModel, num_experts: int) -> dict[str, Any]:
    """Return the keys of config.json (as for DeepSeek) that define how layers choose experts.

    Raises:
        WeightLoadError: the score function of experts is unknown.
    """
    kind, has_bias = model.architecture, model.gguf.has_router_bias
    score = model.get(".expert_gating_func", int, 0) or (2 if has_bias else 1)
    if score not in _SCORES:
        raise WeightLoadError(
            f"{model.paths[0]}: the metadata '{kind}.expert_gating_func' is {score}; supported: "
            f"1 (softmax), 2 (sigmoid)"
        )
    num_groups = model.get(".expert_group_count", int, 0) or 1
    method = "greedy" if num_groups == 1 else "group_limited_greedy"
    return {
        "n_routed_experts": num_experts,
        "n_shared_experts": model.get(".expert_shared_count", int, 0),
        "moe_intermediate_size": model.size(".expert_feed_forward_length"),
        "first_k_dense_replace": model.get(".leading_dense_block_count", int, 0),
        "n_group": num_groups,
        "topk_group": model.get(".expert_group_used_count", int, 0) or 1,
        "topk_method": "noaux_tc" if has_bias else method,
        "scoring_func": _SCORES[score],
        "norm_topk_prob": model.get(".expert_weights_norm", bool, False),
        "routed_scaling_factor": model.get(".expert_weights_scale", float, 0.0) or 1.0,
    }
