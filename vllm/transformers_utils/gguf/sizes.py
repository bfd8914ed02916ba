"""Check the sizes in the metadata of a GGUF file against the shapes of its tensors.

They are compared before any memory of these sizes is allocated.
"""

from typing import Any

from vllm.errors import WeightLoadError
from vllm.transformers_utils.gguf.header import StoredTensor
from vllm.transformers_utils.gguf.model import GGUFModel
from vllm.utils.files.weight_files import name_some


def wrong_layers(model: GGUFModel, num_layers: int) -> WeightLoadError:
    """Return the error for a number of layers that the file cannot have."""
    return WeightLoadError(
        f"{model.paths[0]}: the metadata '{model.architecture}.block_count' is {num_layers}, but "
        f"the file has only {len(model.tensors)} tensors. It is damaged; download it again"
    )


def _head_norm_shapes(model: GGUFModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the norms of queries and of keys."""
    head, found = model.head_size, {}
    for part, num_heads in (("q_norm", model.num_heads), ("k_norm", model.num_kv_heads)):
        shapes = {"one": (head,), "per_head": (num_heads, head), "all_heads": (num_heads * head,)}
        found[part] = shapes[model.gguf.head_norms]
    return found


def check_shapes(model: GGUFModel, config: dict[str, Any]) -> None:
    """Refuse sizes of a decoder that do not match the tensors.

    Args:
        model: model with the tensors.
        config: config.json, created from the metadata of the file.

    Raises:
        WeightLoadError: a size contradicts a tensor, or a layer lacks one.
    """
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "embed_tokens": (config["vocab_size"], hidden),
        "lm_head": (config["vocab_size"], hidden),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (config["intermediate_size"], hidden),
        "up_proj": (config["intermediate_size"], hidden),
        "down_proj": (hidden, config["intermediate_size"]),
        "embed_positions": (config.get("max_position_embeddings", 0), hidden),
        "sinks": (config["num_attention_heads"],),
        **_head_norm_shapes(model),
    }
    num_experts = config.get("num_experts") or config.get("n_routed_experts") or 0
    shapes |= {"gate": (num_experts, hidden), "shared_expert_gate": (1, hidden)}
    shapes["e_score_correction_bias"] = (num_experts,)
    if model.gguf.has_latent_attention:
        shapes |= _latent_shapes(config)
    names = model.module_names()
    if config["num_hidden_layers"] > len(names):
        raise wrong_layers(model, config["num_hidden_layers"])
    without = range(config["num_hidden_layers"])
    if num_experts:
        first = config.get("first_k_dense_replace", 0)
        without = config.get("mlp_only_layers", range(first))
    last = f"mlp.experts.{num_experts - 1}.down_proj"
    lacking = [
        name
        for i in range(config["num_hidden_layers"])
        for part in ("self_attn.o_proj", "mlp.down_proj" if i in without else last)
        if (name := f"model.layers.{i}.{part}.weight") not in names
    ]
    for half, other in (("keys", "values"), ("values", "keys")):
        end, other_end = f".{half}.weight", f".{other}.weight"
        twins = [name.removesuffix(end) + other_end for name in names if name.endswith(end)]
        lacking += [twin for twin in twins if twin not in names]
    if lacking:
        raise _lacks(model, lacking, config["num_hidden_layers"])
    for name, tensor in names.items():
        stem, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):  # a parameter with a name of its own
            stem = name
        parent, _, part = stem.rpartition(".")
        wanted = shapes.get(part, (hidden,))
        size_name = "moe_intermediate_size" if ".experts." in parent else None
        if parent.endswith(".shared_expert"):
            size_name = "shared_expert_intermediate_size"
        size = config.get(size_name or "")
        if parent.endswith(".shared_experts"):
            size = config["moe_intermediate_size"] * config["n_shared_experts"]
        if size is not None:
            wanted = (hidden, size) if part == "down_proj" else (size, hidden)
        if kind == "bias":
            wanted = wanted[:1]
        _check_shape(name, tensor, wanted)


def _latent_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the projections of latent attention."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key, value = config["qk_nope_head_dim"], config["v_head_dim"]
    queries, compressed = heads * (key + rotated), config["q_lora_rank"] or 0
    return {
        "q_proj": (queries, hidden),
        "q_a_proj": (compressed, hidden),
        "q_a_layernorm": (compressed,),
        "q_b_proj": (queries, compressed),
        "kv_a_proj_with_mqa": (latent + rotated, hidden),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (key + value), latent),
        "keys": (heads * latent, key),
        "values": (heads * value, latent),
        "o_proj": (hidden, heads * value),
    }


def check_encoder_shapes(model: GGUFModel, config: dict[str, Any]) -> None:
    """Refuse sizes of an encoder that do not match the tensors. Arguments and errors as for
    `check_shapes`.
    """
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    num_layers, names = config["num_hidden_layers"], model.module_names()
    if num_layers > len(names):
        raise wrong_layers(model, num_layers)
    vector, square = (hidden,), (hidden, hidden)
    in_layer = {
        **{f"attention.self.{part}": square for part in ("query", "key", "value")},
        "attention.output.dense": square,
        "attention.output.LayerNorm": vector,
        "intermediate.dense": (inner, hidden),
        "output.dense": (hidden, inner),
        "output.LayerNorm": vector,
    }
    shapes = {
        "model.embeddings.word_embeddings": (config["vocab_size"], hidden),
        "model.embeddings.position_embeddings": (config["max_position_embeddings"], hidden),
        "model.embeddings.token_type_embeddings": (config["type_vocab_size"], hidden),
        "model.embeddings.LayerNorm": vector,
    }
    if heads := {"pooler", "classifier"} & {name.rpartition(".")[0] for name in names}:
        if len(heads) == 1:
            raise WeightLoadError(
                f"{model.paths[0]} has only one of the tensors cls.weight and cls.output.weight; "
                "a model that scores texts needs both. Use its safetensors checkpoint"
            )
        shapes |= {"pooler": square, "classifier": (len(config["id2label"]), hidden)}
    for i in range(num_layers):
        shapes |= {f"model.encoder.layer.{i}.{name}": shape for name, shape in in_layer.items()}
    lacking = [name for each in shapes if (name := f"{each}.weight") not in names]
    if lacking:
        raise _lacks(model, lacking, num_layers)
    for name, tensor in names.items():
        stem, _, kind = name.rpartition(".")
        if stem in shapes:
            _check_shape(name, tensor, shapes[stem][:1] if kind == "bias" else shapes[stem])


def _lacks(model: GGUFModel, lacking: list[str], num_layers: int) -> WeightLoadError:
    return WeightLoadError(
        f"{model.paths[0]} lacks the tensors of {name_some(lacking)}: the metadata "
        f"'{model.architecture}.block_count' is {num_layers}"
    )


def _check_shape(name: str, tensor: StoredTensor, wanted: tuple[int, ...]) -> None:
    if tensor.shape != wanted:
        raise WeightLoadError(
            f"tensor {name} in {tensor.path} has the shape {list(tensor.shape)}, but by the "
            f"metadata of the file it must be {list(wanted)}. It is damaged; download it again"
        )
