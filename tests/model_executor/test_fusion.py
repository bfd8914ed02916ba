"""Test a decoder that runs in one call against its modules: the same bits, for every option and any
forward pass.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.model_executor.helpers import pack_weights
from vllm.attention import (
    Attention,
    LaunchContext,
    RaggedMetadata,
    ReplacedTokens,
    share_context,
)
from vllm.config import ModelArch
from vllm.distributed import TPGroup
from vllm.model_executor.fusion import fuse, fuse_head
from vllm.model_executor.layers.embedding import VocabParallelEmbedding
from vllm.model_executor.layers.grouped_router import GroupedRouter
from vllm.model_executor.layers.linear import ColumnParallelLinear, UnquantizedLinear
from vllm.model_executor.layers.norm import RMSNorm
from vllm.model_executor.layers.rotary import RotaryEmbedding
from vllm.model_executor.models.cohere import CohereForCausalLM
from vllm.model_executor.models.decoder import DecoderAttention, DecoderForCausalLM
from vllm.model_executor.models.deepseek import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
from vllm.model_executor.models.gemma import Gemma2ForCausalLM
from vllm.model_executor.models.gpt import GPTBigCodeForCausalLM, GPTNeoXForCausalLM
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.mixture import Qwen2MoeForCausalLM
from vllm.model_executor.models.olmo import OlmoForCausalLM
from vllm.model_executor.models.opt import OPTForCausalLM
from vllm.model_executor.models.phi import PhiForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.ops import get_ops, set_ops
from vllm.ops.attention_options import FP8_DTYPES
from vllm.ops.cpu.operators import CPUOps, load_cpu_kernels
from vllm.ops.cpu.operators.program import Program
from vllm.ops.native.operators import NativeOps

pytestmark = pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")

BLOCK_SIZE, NUM_BLOCKS = 4, 1024
CONFIG = {
    "architectures": ["A"],
    "vocab_size": 150,
    "hidden_size": 72,
    "intermediate_size": 120,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Name -> (family, changes of its config).
MODELS: dict[str, tuple[type[DecoderForCausalLM], dict[str, Any]]] = {
    "plain": (LlamaForCausalLM, {}),
    "all biases, tied": (
        LlamaForCausalLM,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama3 rotation of half a head": (
        LlamaForCausalLM,
        {"rope_scaling": LLAMA3, "partial_rotary_factor": 0.5},
    ),
    "window": (MistralForCausalLM, {"sliding_window": 7}),
    "windows of later layers": (
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "head norms": (Qwen3ForCausalLM, {"head_dim": 32}),
    "rotation of neighbours, attention beside the MLP": (CohereForCausalLM, {"logit_scale": 0.5}),
    "norms with weights of each head": (CohereForCausalLM, {"use_qk_norm": True}),
    "soft caps, norms before and after": (
        Gemma2ForCausalLM,
        {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 0.7, "sliding_window": 7}
        | {"query_pre_attn_scalar": 24, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "layer norms, bias of the head": (
        PhiForCausalLM,
        {"num_key_value_heads": 6, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5}
        | {"layer_norm_eps": 1e-5},
    ),
    "learned positions, one KV head, plain MLP": (
        GPTBigCodeForCausalLM,
        {"num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh", "rope_theta": None},
    ),
    "gelu, part of a head rotated": (
        GPTNeoXForCausalLM,
        {"num_key_value_heads": 6, "hidden_act": "gelu", "partial_rotary_factor": 0.5},
    ),
    "limits of query, key and value": (OlmoForCausalLM, {"clip_qkv": 0.4}),
    "experts, and a shared one with a gate": (
        Qwen2MoeForCausalLM,
        {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
        | {"shared_expert_intermediate_size": 48, "norm_topk_prob": False},
    ),
    "sinks, experts with biases": (
        GptOssForCausalLM,
        {"num_local_experts": 5, "num_experts_per_tok": 2, "attention_bias": True}
        | {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
}
LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 40,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 24,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
YARN |= {"mscale": 0.8, "mscale_all_dim": 1.3}
MODELS |= {
    "latent attention, groups of experts by softmax": (
        DeepseekV2ForCausalLM,
        LATENT
        | {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "group_limited_greedy"},
    ),
    "latent attention, one projection of queries, many heads": (
        DeepseekV2ForCausalLM,
        LATENT
        | {"architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None, "v_head_dim": 65}
        | {"num_attention_heads": 12, "num_key_value_heads": 12, "attention_bias": True},
    ),
    "latent attention, groups of experts by sigmoid with a bias": (
        DeepseekV3ForCausalLM,
        LATENT | {"architectures": ["DeepseekV3ForCausalLM"], "rope_scaling": YARN},
    ),
}
# Number of new tokens of each request, for several batches in succession.
MIXED = [[9, 1, 23], [1, 1, 0, 70, 5], [1, 1, 1, 1, 8], [1] * 5, [0, 0, 1], [1, 1, 40, 150]]
DECODES = [[1] * 70, [2] * 70, [1] * 69, [1] * 130]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before, num_threads = get_ops(), torch.get_num_threads()
    set_ops(CPUOps())
    yield
    set_ops(before)
    torch.set_num_threads(num_threads)


def make_opt(**changes: Any) -> OPTForCausalLM:
    """Make an OPT with all biases and norms, in bfloat16."""
    config = CONFIG | {
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "ffn_dim": 120,
        "activation_function": "relu",
    }
    arch = ModelArch.from_hf(config | {"architectures": ["OPTForCausalLM"]} | changes)
    model = OPTForCausalLM(arch, TPGroup())
    for module in model.modules():
        for key, param in module.named_parameters(recurse=False):
            nn.init.normal_(param, std=0.1 if key == "bias" else param.shape[-1] ** -0.5)
    return prepare(model, "dense", torch.bfloat16)


def make_opt_of_narrow_embeddings() -> OPTForCausalLM:
    return make_opt(do_layer_norm_before=False, word_embed_proj_dim=40)


def make_model(
    name: str, stored_as: Any = "dense", dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> DecoderForCausalLM:
    family, options = MODELS[name]
    arch = ModelArch.from_hf(CONFIG | options | changes)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = family(arch, TPGroup())
    finally:
        torch.set_default_dtype(before)
    for module in model.modules():
        for key, param in module.named_parameters(recurse=False):
            nn.init.normal_(param, std=0.1 if "bias" in key else param.shape[-1] ** -0.5)
        if isinstance(module, RMSNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
        if isinstance(module, VocabParallelEmbedding):
            nn.init.normal_(module.weight)
    return prepare(model, stored_as, dtype)


def prepare(model: Any, stored_as: Any, dtype: torch.dtype) -> Any:
    """Pack the weights, and bind caches."""
    model.dtype = dtype
    model.to(dtype)
    for module in model.modules():
        if isinstance(module, (RotaryEmbedding, GroupedRouter)):
            module.float()
        if isinstance(module, DecoderAttention) and module.sinks is not None:
            module.sinks.data = module.sinks.data.float()
    pack_weights(model, stored_as)
    for layer in attention_layers(model):
        bind_caches(layer, dtype)
    return model


def bind_caches(layer: Attention, dtype: torch.dtype) -> None:
    shapes = [(NUM_BLOCKS, BLOCK_SIZE, *t.shape) for t in layer.cache_spec(dtype).tensors]
    layer.bind_kv_cache(*(torch.zeros(shape, dtype=dtype) for shape in shapes))


def caches_of(layer: Attention) -> list[Tensor]:
    return [getattr(layer, name) for name in layer.cache_names]


def attention_layers(model: nn.Module) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


class Requests:
    """Requests whose blocks are in random order; makes forward passes of them."""

    def __init__(self, num_requests: int) -> None:
        self.lengths = np.zeros(num_requests, np.int32)
        num_blocks = (NUM_BLOCKS - 1) // num_requests
        ids = torch.randperm(NUM_BLOCKS - 1)[: num_requests * num_blocks] + 1
        self.tables = ids.view(num_requests, num_blocks).int()

    def launch(self, counts: list[int]) -> tuple[Tensor, Tensor, RaggedMetadata]:
        """Return input ids, positions and the other inputs; requests with one new token come
        first.
        """
        rows = [b for b, count in enumerate(counts) if count]
        rows.sort(key=lambda b: counts[b] > 1)
        new = np.array([counts[b] for b in rows], np.int32)
        starts = self.lengths[rows].copy()
        self.lengths[rows] += new
        positions = torch.from_numpy(
            np.concatenate(
                [np.arange(s, s + n, dtype=np.int64) for s, n in zip(starts, new, strict=True)]
            )
        )
        tables = self.tables[rows]
        token_rows = torch.repeat_interleave(torch.arange(len(rows)), torch.from_numpy(new).long())
        blocks = tables[token_rows, positions // BLOCK_SIZE].long()
        metadata = RaggedMetadata(
            num_decodes=int((new == 1).sum()),
            slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
            block_tables=tables,
            seq_lens=torch.from_numpy(self.lengths[rows]),
            query_start_loc=np.concatenate([[0], np.cumsum(new)]).astype(np.int32),
            host_seq_lens=self.lengths[rows],
        )
        return torch.randint(CONFIG["vocab_size"], (len(positions),)), positions[None], metadata


def run_fused(
    fused: Program,
    inputs: Tensor,
    positions: Tensor,
    metadata: RaggedMetadata,
    replaced: ReplacedTokens | None = None,
) -> Tensor:
    return fused.forward(
        inputs,
        positions,
        metadata.slot_mapping,
        metadata.block_tables,
        metadata.seq_lens,
        torch.from_numpy(metadata.query_start_loc),
        metadata.num_decodes,
        replaced and (replaced.indices, replaced.embeddings),
    )


def run_head(head: Program, hidden_states: Tensor) -> Tensor:
    """Return the logits of dense hidden states [T, hidden], as in a decode step."""
    counts = [1] * len(hidden_states)
    _, positions, metadata = Requests(len(counts)).launch(counts)
    return run_fused(head, hidden_states, positions, metadata)


@torch.inference_mode()
def test_embeddings_that_replace_tokens_have_the_bits_of_the_modules():
    for model in (make_model("plain"), make_model("all biases, tied"), make_opt()):
        fused = fuse(model)
        input_ids, positions, metadata = Requests(3).launch([9, 1, 23])
        replaced = ReplacedTokens(torch.tensor([3, 0, 20]), torch.randn(3, CONFIG["hidden_size"]))
        context = LaunchContext(metadata, positions, replaced)
        with share_context(model).running(context):
            want = model(input_ids, positions)
        assert torch.equal(run_fused(fused, input_ids, positions, metadata, replaced), want)
        assert not torch.equal(run_fused(fused, input_ids, positions, metadata), want)
        with pytest.raises(ValueError, match=r"embeddings must be \[3, 72\], got \[3, 71\]"):
            few = ReplacedTokens(replaced.indices, replaced.embeddings[:, 1:])
            run_fused(fused, input_ids, positions, metadata, few)


@torch.inference_mode()
def assert_same_bits(model: DecoderForCausalLM, launches: list[list[int]]) -> None:
    """Assert after every forward pass that hidden states and the caches of all layers are the
    same."""
    fused = fuse(model)
    assert fused is not None
    caches = [c for a in attention_layers(model) for c in caches_of(a)]
    requests = Requests(max(map(len, launches)))
    for launch in map(requests.launch, launches):
        before = [cache.clone() for cache in caches]
        with share_context(model).running(LaunchContext(launch[2], launch[1])):
            want = model(*launch[:2])
        written = [cache.clone() for cache in caches]
        for cache, old in zip(caches, before, strict=True):
            cache.copy_(old)
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            got = run_fused(fused, *launch)
            torch.set_num_threads(1)
            assert torch.equal(got, want)
        for cache, new in zip(caches, written, strict=True):
            assert torch.equal(cache.view(torch.uint8), new.view(torch.uint8))
        assert want.isfinite().all()


@pytest.mark.parametrize(
    ("name", "stored_as"),
    [
        *((name, "dense") for name in MODELS),
        *(("all biases, tied", f) for f in ("int8", "int4")),
        ("latent attention, groups of experts by softmax", "int4"),
    ],
)
def test_prefills_chunks_and_decodes_have_the_bits_of_the_modules(name, stored_as):
    assert_same_bits(make_model(name, stored_as), MIXED)


@pytest.mark.parametrize(
    ("name", "stored_as"),
    [
        *(("all biases, tied", f) for f in ("dense", "int8", "int4")),
        ("soft caps, norms before and after", "dense"),
        ("latent attention, groups of experts by softmax", "int4"),
    ],
)
def test_every_instruction_set_has_the_bits_of_its_modules(isa, name, stored_as):
    """Only the kernels depend on the instruction set, and other tests test each kernel."""
    assert_same_bits(make_model(name, stored_as), MIXED)


@pytest.mark.parametrize("make", [make_opt, make_opt_of_narrow_embeddings])
def test_a_family_without_rotations_and_gates_has_the_bits_of_its_modules(make):
    assert_same_bits(make(), MIXED)


HEADS: dict[str, Any] = {
    "tied": lambda: make_model("all biases, tied"),
    "opt": make_opt,
    "projection before the product": make_opt_of_narrow_embeddings,
    "scale": lambda: make_model("rotation of neighbours, attention beside the MLP"),
    "bias": lambda: make_model("layer norms, bias of the head"),
    "soft cap": lambda: make_model("soft caps, norms before and after"),
}


@torch.inference_mode()
@pytest.mark.parametrize("name", HEADS)
def test_heads_have_the_bits_of_the_modules(isa, name):
    model = HEADS[name]()
    head = fuse_head(model, fuse(model))
    assert head is not None
    assert (head.given_width, head.width) == (CONFIG["hidden_size"], CONFIG["vocab_size"])
    hidden_states = torch.randn(9, head.given_width).bfloat16()
    assert torch.equal(run_head(head, hidden_states), model.compute_logits(hidden_states))


def test_many_decodes_have_the_bits_of_the_modules(isa):
    assert_same_bits(make_model("plain"), DECODES)


def test_float32_has_the_bits_of_the_modules(isa):
    assert_same_bits(make_model("head norms", dtype=torch.float32), MIXED)


@pytest.mark.parametrize("cache_dtype", FP8_DTYPES)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("window", torch.bfloat16),
        ("window", torch.float32),
        ("latent attention, groups of experts by sigmoid with a bias", torch.bfloat16),
    ],
)
def test_fp8_caches_and_inputs_have_the_bits_of_the_modules(isa, cache_dtype, name, dtype):
    model = make_model(name, "static fp8", dtype, num_hidden_layers=2)
    for layer in attention_layers(model):
        heads = slice(layer.num_kv_heads)
        layer.set_cache_scales(torch.tensor([0.03, 0.06])[heads], torch.tensor([0.3, 0.2])[heads])
        bind_caches(layer, cache_dtype)
    assert_same_bits(model, [[9, 1, 23], [1, 1, 0, 70, 5], [1] * 5])
    assert all(layer.key_cache.view(torch.uint8).any() for layer in attention_layers(model))


def test_weights_that_no_cache_holds_have_the_bits_of_the_modules():
    model = make_model("plain", num_hidden_layers=2, intermediate_size=20480)
    assert_same_bits(model, [[1100, 1], [1, 40], [1, 1]])


def replace_first(model: nn.Module, kind: type[nn.Module], make: Any) -> None:
    """Replace the first module of a type."""
    path, module = next((p, m) for p, m in model.named_modules() if type(m) is kind)
    parent, _, attribute = path.rpartition(".")
    setattr(model.get_submodule(parent), attribute, make(module))


class Wrapper(nn.Module):
    """A wrapper around a layer, like the one of an adapter."""

    def __init__(self, layer: nn.Module, then: Any = lambda x: x * 2 + x) -> None:
        super().__init__()
        self.layer = layer
        self.then = then

    @property
    def split_sizes(self) -> list[int]:
        return self.layer.split_sizes

    def forward(self, *args: Any) -> Any:
        return self.then(self.layer(*args))


class OtherForward(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return super().forward(input_ids, positions) * 2


def change_epsilon(model: nn.Module) -> None:
    model.model.layers[0].input_layernorm.eps = 0.5


def attend_with_slopes_and_soft_cap(model: nn.Module) -> None:
    layer = attention_layers(model)[1]
    layer.alibi_slopes = torch.linspace(0.1, 0.5, layer.num_heads)
    layer.options = replace(layer.options, logits_soft_cap=2.0)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: replace_first(model, ColumnParallelLinear, Wrapper),
        lambda model: replace_first(model, DecoderAttention, Wrapper),
        lambda model: setattr(model, "__class__", OtherForward),
        change_epsilon,
        attend_with_slopes_and_soft_cap,
    ],
)
def test_what_a_module_does_otherwise_is_fused_as_well(change):
    model = make_model("plain")
    change(model)
    assert_same_bits(model, MIXED)


def unbind(model: nn.Module) -> None:
    attention_layers(model)[1].key_cache = None


def store_cache_as_bytes(model: nn.Module) -> None:
    layer = attention_layers(model)[0]
    layer.bind_kv_cache(layer.key_cache.to(torch.uint8), layer.value_cache.to(torch.uint8))


def unpack_first(model: nn.Module) -> None:
    model.model.layers[0].mlp.down_proj.use_method(UnquantizedLinear())


@pytest.mark.parametrize(
    "change",
    [
        lambda model: replace_first(model, RMSNorm, lambda norm: Wrapper(norm, torch.sigmoid)),
        lambda model: replace_first(model, Attention, lambda attn: Wrapper(attn, Tensor.exp)),
        lambda model: replace_first(model, RMSNorm, lambda norm: Wrapper(norm, lambda x: x[1:])),
        lambda model: replace_first(model, RMSNorm, lambda norm: Wrapper(norm, len)),
        unbind,
        store_cache_as_bytes,
        unpack_first,
        lambda model: set_ops(NativeOps()),
        lambda model: model.half(),
    ],
)
def test_what_cannot_be_recorded_is_left_to_the_modules(change):
    model = make_model("plain")
    assert fuse(model) is not None
    change(model)
    before = get_ops()
    assert fuse(model) is None
    assert get_ops() is before
