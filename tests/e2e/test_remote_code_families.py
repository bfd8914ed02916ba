"""Test families whose reference is code in their checkpoints.

They give the tokens of a Llama of `transformers` with the same weights, or of the formulas in the
paper.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.e2e.reference import (
    Reference,
    TransformersReference,
    assert_all_greedy,
    random_prompts,
)
from tests.hpu import FEW_BUCKETS, simulated_hpu
from tests.tiny_models import LLAMA3_ROPE, make_tiny_model
from vllm import LLM, SamplingParams
from vllm.errors import ConfigError

MAX_TOKENS = 6
PROMPTS = random_prompts(10, 90 - MAX_TOKENS, vocab_size=4096)
SETTINGS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 96,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "enable_chunked_prefill": True,
    "block_size": 16,
    "num_gpu_blocks_override": 70,
}
Tensors = dict[str, Tensor]
HEADS, KV_HEADS, SIZE = 4, 2, 16


def check(folder: Path, reference: Reference) -> None:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    llm = LLM(model=str(folder), **SETTINGS)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert_all_greedy(outputs, PROMPTS, params, reference)


def internlm2(tensors: Tensors) -> Tensors:
    """Convert the tensors of a Llama to InternLM 2: queries, key and value are joined for each
    key/value head, and tensors have other names.
    """
    renames = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
    }
    stored = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            q, k, v = (tensors[name.replace("q_proj", p)] for p in ("q_proj", "k_proj", "v_proj"))
            groups = [x.unflatten(0, (KV_HEADS, -1)) for x in (q, k, v)]
            packed = torch.cat(groups, dim=1).flatten(0, 1)
            stored[name.replace("self_attn.q_proj", "attention.wqkv")] = packed
        elif ".k_proj." not in name and ".v_proj." not in name:
            for ours, theirs in renames.items():
                name = name.replace(ours, theirs)
            stored[name] = tensor
    return stored


def same(tensors: Tensors) -> Tensors:
    return tensors


def baichuan(tensors: Tensors) -> Tensors:
    stored = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace("q_proj", p)] for p in ("q_proj", "k_proj", "v_proj")]
            stored[name.replace("q_proj", "W_pack")] = torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            stored[name] = tensor
    return stored


def exaone(tensors: Tensors) -> Tensors:
    renames = {
        "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f",
        "model.layers": "transformer.h",
        "self_attn.o_proj": "self_attn.out_proj",
        "self_attn": "attn.attention",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "mlp.gate_proj": "mlp.c_fc_0",
        "mlp.up_proj": "mlp.c_fc_1",
        "mlp.down_proj": "mlp.c_proj",
    }
    stored = {}
    for name, tensor in tensors.items():
        for ours, theirs in renames.items():
            name = name.replace(ours, theirs)
        stored[name] = tensor
    return stored


def mimo(tensors: Tensors) -> Tensors:
    """Drop the bias after attention; add a layer of multi-token prediction."""
    kept = {name: tensor for name, tensor in tensors.items() if "o_proj.bias" not in name}
    return kept | {"model.mtp_layers.0.input_proj.weight": torch.ones(2, 2)}


def chatglm(tensors: Tensors) -> Tensors:
    renames = {
        "model.embed_tokens": "transformer.embedding.word_embeddings",
        "lm_head": "transformer.output_layer",
        "model.norm": "transformer.encoder.final_layernorm",
        "model.layers": "transformer.encoder.layers",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }
    stored = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace("q_proj", p)] for p in ("q_proj", "k_proj", "v_proj")]
            name, tensor = (
                name.replace("self_attn.q_proj", "self_attention.query_key_value"),
                (torch.cat(parts)),
            )
        elif ".k_proj." in name or ".v_proj." in name:
            continue
        for theirs, ours in renames.items():
            name = name.replace(theirs, ours)
        stored[name] = tensor
    return stored


CHATGLM = {
    "architectures": ["ChatGLMModel"],
    "model_type": "chatglm",
    "padded_vocab_size": 4096,
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 176,
    "kv_channels": 16,
    "num_attention_heads": 4,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "seq_length": 512,
    "layernorm_epsilon": 1e-5,
    "add_qkv_bias": True,
    "add_bias_linear": False,
    "rmsnorm": True,
    "post_layer_norm": True,
    "rope_ratio": 50,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
"""As ChatGLM 3 and the first GLM-4-9B spell it."""


def test_chatglm_gives_the_tokens_of_a_glm_with_its_weights(tmp_path):
    glm, folder = tmp_path / "glm", tmp_path / "chatglm"
    folder.mkdir()
    rope = {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5}
    make_tiny_model("glm", glm, rope_parameters=rope)
    save_file(chatglm(load_file(glm / "model.safetensors")), folder / "model.safetensors")
    reference = TransformersReference(glm)
    for name in ("ChatGLMModel", "ChatGLMForConditionalGeneration"):
        (folder / "config.json").write_text(json.dumps(CHATGLM | {"architectures": [name]}))
        check(folder, reference)
    (folder / "config.json").write_text(json.dumps(CHATGLM | {"rmsnorm": False}))
    with pytest.raises(ConfigError, match="rmsnorm=False is not supported; supported: True"):
        check(folder, reference)


def with_normed_head(tensors: Tensors) -> Tensors:
    """Return the tensors with normalised rows of the output head."""
    return tensors | {"lm_head.weight": F.normalize(tensors["lm_head.weight"])}


def without_output_bias(tensors: Tensors) -> Tensors:
    return {name: x * 0 if "o_proj.bias" in name else x for name, x in tensors.items()}


def with_mup(tensors: Tensors) -> Tensors:
    """Return the weights of a Llama that computes the same as a MiniCPM with `MUP`."""
    layers = MUP["scale_depth"] / 2**0.5
    factors = {
        "embed_tokens": MUP["scale_emb"],
        "o_proj": layers,
        "down_proj": layers,
        "lm_head": MUP["dim_model_base"] / 64,
    }
    scales = {
        name: next((f for part, f in factors.items() if part in name), 1.0) for name in tensors
    }
    return {name: tensor * scales[name] for name, tensor in tensors.items()}


OF_REFERENCE: dict[str, Callable[[Tensors], Tensors]] = {
    "BaichuanForCausalLM": with_normed_head,
    "MiMoForCausalLM": without_output_bias,
    "MiniCPMForCausalLM": with_mup,
}
"""Weights of the Llama that computes the same, where they differ from the weights of the family."""
MUP = {"scale_emb": 2, "scale_depth": 1.2, "dim_model_base": 128}
FULL = {"num_key_value_heads": HEADS}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Tensors], Tensors]]] = {
    # Architecture: (changes of the Llama that it is made of, its config, how its weights are
    # stored).
    "InternLM2ForCausalLM": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"model_type": "internlm2", "rope_theta": 1e6, "bias": False},
        internlm2,
    ),
    "InternLM3ForCausalLM": (
        {"attention_bias": True, "mlp_bias": True},
        {"model_type": "internlm3", "rope_theta": 1e4, "bias": True, "qkv_bias": True},
        same,
    ),
    "BaichuanForCausalLM": (FULL, {"model_type": "baichuan"}, baichuan),
    "ExaoneForCausalLM": (
        {"rope_parameters": LLAMA3_ROPE},
        {
            "model_type": "exaone",
            "num_layers": 2,
            "activation_function": "silu",
            "layer_norm_epsilon": 1e-5,
            "rope_theta": LLAMA3_ROPE["rope_theta"],
            "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"},
        },
        exaone,
    ),
    "MiMoForCausalLM": (
        {"attention_bias": True},
        {"model_type": "mimo", "rope_theta": 1e4, "sliding_window": 16},
        mimo,
    ),
    "MiniCPMForCausalLM": (
        {},
        {"model_type": "minicpm", "tie_word_embeddings": False, **MUP},
        same,
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the folder of a family, and an equal Llama of transformers."""

    def make(family: str) -> tuple[Path, Reference]:
        llama, folder = (tmp_path_factory.mktemp(family) for _ in range(2))
        options, config, store = FAMILIES[family]
        make_tiny_model("llama", llama, head_dim=SIZE, num_hidden_layers=2, **options)
        tensors = load_file(llama / "model.safetensors")
        save_file(store(tensors), folder / "model.safetensors")
        if family in OF_REFERENCE:
            theirs = OF_REFERENCE[family](tensors)
            save_file(theirs, llama / "model.safetensors", {"format": "pt"})
        known = json.loads((llama / "config.json").read_text())
        kept = {k: v for k, v in known.items() if "rope" not in k and "bias" not in k}
        own = {"architectures": [family], "auto_map": {"AutoConfig": "own.Config"}}
        (folder / "config.json").write_text(json.dumps(kept | own | config))
        return folder, TransformersReference(llama)

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_tokens_of_a_llama_with_its_weights(family, made):
    folder, reference = made(family)
    check(folder, reference)
    if family == "BaichuanForCausalLM":
        with simulated_hpu(has_profiling_run=False, PT_HPU_LAZY_MODE=1, **FEW_BUCKETS):
            check(folder, reference)


def by_formulas(tensors: Tensors, token_ids: list[int]) -> Tensor:
    """Compute logits [T, vocab] of Baichuan 2 13B (arXiv 2309.10305) by its formulas: RMS norms,
    ALiBi, SwiGLU, and an output head with rows of length 1.
    """

    def normed(x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * tensors[f"{name}.weight"]

    x = tensors["model.embed_tokens.weight"][token_ids]
    age = torch.arange(len(token_ids))[:, None] - torch.arange(len(token_ids))
    slopes = 2.0 ** -(torch.arange(1, HEADS + 1) * 8 / HEADS)
    bias = -slopes[:, None, None] * age
    bias = bias.masked_fill(age < 0, float("-inf"))
    for layer in ("model.layers.0", "model.layers.1"):
        y = normed(x, f"{layer}.input_layernorm")
        packed = (y @ tensors[f"{layer}.self_attn.W_pack.weight"].T).unflatten(-1, (3, HEADS, SIZE))
        q, k, v = packed.permute(1, 2, 0, 3)
        attended = (q @ k.transpose(1, 2) * SIZE**-0.5 + bias).softmax(-1) @ v
        x = x + attended.transpose(0, 1).flatten(1) @ tensors[f"{layer}.self_attn.o_proj.weight"].T
        y = normed(x, f"{layer}.post_attention_layernorm")
        gate, up = (y @ tensors[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ tensors[f"{layer}.mlp.down_proj.weight"].T
    return normed(x, "model.norm") @ F.normalize(tensors["lm_head.weight"]).T


def test_baichuan_13b_gives_the_tokens_of_its_formulas(made, tmp_path):
    folder, _ = made("BaichuanForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    config["model_max_length"] = config.pop("max_position_embeddings")
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    check(tmp_path, lambda prompt, output: by_formulas(tensors, [*prompt, *output]))


def deepseek(tensors: Tensors) -> Tensors:
    """Convert the shared expert to the names of DeepSeek, and halve it: in the reference, a gate
    with zeros as weights halves its output.
    """
    stored = {}
    for name, tensor in tensors.items():
        half = 0.5 if ".shared_expert.down_proj." in name else 1.0
        if ".shared_expert_gate." not in name:
            stored[name.replace(".shared_expert.", ".shared_experts.")] = tensor * half
    return stored


def bailing(tensors: Tensors) -> Tensors:
    renames = {
        "model.embed_tokens": "model.word_embeddings",
        "self_attn.qkv_proj": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm",
        "gate.e_score_correction_bias": "gate.expert_bias",
    }
    stored = {}
    for name, tensor in deepseek(tensors).items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            parts = [tensors[name.replace("q_proj", p)] for p in ("q_proj", "k_proj", "v_proj")]
            name, tensor = name.replace("q_proj", "qkv_proj"), torch.cat(parts)
        for ours, theirs in renames.items():
            name = name.replace(ours, theirs)
        stored[name] = tensor
    return stored


_WITHOUT_GATE = {
    "num_hidden_layers": 2,
    "mlp_only_layers": [0],
    "qkv_bias": False,
    "shared_expert_intermediate_size": 96,
}
_SIZES = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "rope_theta": 10000.0,
    "head_dim": 16,
}
_LING = {"model_type": "bailing_moe", "num_shared_experts": 2, "norm_head": False}
LING_2 = {
    **_LING,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
}
MIXTURES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Callable[[Tensors], Tensors]]] = {
    # Architecture: (the family of transformers with values of its config, its own config, how its
    # weights are stored).
    "DeepseekForCausalLM": (
        "qwen2_moe",
        _WITHOUT_GATE | {"norm_topk_prob": False},
        {"model_type": "deepseek", "n_routed_experts": 6, "num_experts_per_tok": 2}
        | {"n_shared_experts": 2, "norm_topk_prob": False, "scoring_func": "softmax"},
        deepseek,
    ),
    "BailingMoeForCausalLM": (
        "qwen2_moe",
        _WITHOUT_GATE | {"norm_topk_prob": True},
        _LING | {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True},
        bailing,
    ),
    "BailingMoeV2ForCausalLM": (
        "glm4_moe",
        {"attention_bias": False, "num_hidden_layers": 2},
        LING_2,
        bailing,
    ),
}
_COMMON = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "dtype"),
)
"""Keys that all of them spell the same."""


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_gives_the_tokens_of_another_with_its_weights(name, tmp_path):
    family, values, config, store = MIXTURES[name]
    known, folder = tmp_path / "known", tmp_path / "own"
    folder.mkdir()
    make_tiny_model(family, known, **values)
    tensors = load_file(known / "model.safetensors")
    for each in tensors:
        if ".shared_expert_gate." in each:
            tensors[each].zero_()
    save_file(tensors, known / "model.safetensors", {"format": "pt"})
    save_file(store(tensors), folder / "model.safetensors")
    given = json.loads((known / "config.json").read_text())
    own = {"architectures": [name], "auto_map": {"AutoConfig": "own.Config"}}
    kept = {key: given[key] for key in _COMMON}
    (folder / "config.json").write_text(json.dumps(kept | own | _SIZES | config))
    check(folder, TransformersReference(known))


def test_a_head_that_is_normed_as_it_runs_is_refused(tmp_path):
    config = MIXTURES["BailingMoeForCausalLM"][2] | _SIZES | {"norm_head": True}
    make_tiny_model("llama", tmp_path, num_hidden_layers=2)
    given = json.loads((tmp_path / "config.json").read_text())
    kept = {key: given[key] for key in _COMMON}
    own = {"architectures": ["BailingMoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(kept | own | config))
    with pytest.raises(ConfigError, match="norm_head in config"):
        LLM(model=str(tmp_path), **SETTINGS)
