"""Test models in GGUF files: their logits equal the logits of transformers with the same weights,
dense.
"""

import itertools
import shutil
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from tests.model_executor.helpers import (
    load,
    logits_of,
    make_config,
    prompt_of,
    read_arch,
    reference_logits,
)
from tests.model_executor.test_quantized_checkpoints import weight_of
from tests.tiny_models import DEEPSEEK, make_tiny_model
from tests.tiny_pooling_models import class_logits, hidden_states, make_pooling_model
from vllm.config.pooler import PoolerConfig
from vllm.distributed import TPGroup
from vllm.errors import ConfigError, WeightLoadError
from vllm.model_executor.layers.embedding import VocabParallelEmbedding
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.linear import ParallelLinear
from vllm.model_executor.loader import load_model
from vllm.model_executor.loader.gguf_file import read_gguf, stored_format
from vllm.model_executor.quantization.gguf.blocks import needs_package
from vllm.ops import get_ops, set_ops
from vllm.ops.cpu.library import load_cpu_kernels
from vllm.ops.cpu.operators import CPUOps
from vllm.ops.native.operators import NativeOps
from vllm.transformers_utils.gguf.folder import unpack
from vllm.transformers_utils.gguf.header import BLOCK_TYPES
from vllm.transformers_utils.transformers_version import is_version_4

gguf = pytest.importorskip("gguf")

from tests.gguf_files import (  # noqa: E402
    OUR_TYPES,
    RANDOM_TYPES,
    Type,
    random_blocks,
    write_gguf,
)

SIZES = {"hidden_size": 256, "intermediate_size": 256}
VOCAB_SIZE = 512
"""Large tables of embeddings would take a third of the time of these tests."""
NO_WINDOW = {"use_sliding_window": False, "sliding_window": None}
HEADS = {"head_dim": 64}
NO_BIASES = HEADS | {"attention_bias": False, "mlp_bias": False}
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
TIED = {"tie_word_embeddings": True}
FOUR_TIMES = {"intermediate_size": None}
EXPERT_SIZES = {"moe_intermediate_size": 256}
LATENT_SIZES = {
    "intermediate_size": 512,
    "kv_lora_rank": 256,
    "q_lora_rank": 256,
    "moe_intermediate_size": 256,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
    "rope_parameters": DEEPSEEK["rope_parameters"] | {"mscale": 1.3},
}
LITE = {"attention_bias": False, "q_lora_rank": None, "n_group": 1}
MODELS = {
    "llama": ("F32", HEADS),
    "llama3": ("Q5_0", HEADS),
    "llama_linear": ("Q3_K+Q5_K+Q6_K+F16", HEADS),
    "llama_yarn": ("BF16+IQ4_XS+Q5_K+IQ4_NL+Q8_0", HEADS),
    "granite_code": ("Q5_1", {}),
    "mistral": ("Q8_0", {"sliding_window": None}),
    "qwen2": ("Q4_1", NO_WINDOW),
    "qwen3": ("Q6_K", HEADS | NO_WINDOW),
    "mixtral": ("Q8_0", HEADS | {"sliding_window": None}),
    "qwen2_moe": ("Q4_0", EXPERT_SIZES | {"shared_expert_intermediate_size": 256} | NO_WINDOW),
    "qwen3_moe": ("Q4_K", EXPERT_SIZES | HEADS),
    "granite": ("Q8_0", {}),
    "granite_moe": ("Q8_0", {}),
    "cohere": ("Q8_0", TIED),
    "cohere_head_norms": ("Q4_0", TIED),
    "cohere2": ("Q8_0", TIED),
    "falcon_7b": ("Q8_0", FOUR_TIMES),
    "falcon_40b": ("Q5_0", {"bias": False} | FOUR_TIMES),
    "glm": ("Q8_0", HEADS),
    "glm4": ("Q4_K", HEADS),
    "gpt2": ("Q8_0", FOUR_TIMES),
    "gpt_bigcode": ("Q4_1", FOUR_TIMES),
    "gpt_neox": ("Q8_0", {}),
    "gpt_neox_sequential": ("F16", {}),
    "gpt_oss": ("MXFP4", HEADS | {"swiglu_limit": 7.0}),
    "bloom": ("Q8_0", FOUR_TIMES),
    "mpt": ("Q8_0", FOUR_TIMES),
    "olmo": ("Q8_0", {}),
    "olmo2": ("Q6_K", {}),
    "olmoe": ("Q8_0", {"clip_qkv": None}),
    "phi": ("Q8_0", {}),
    "phi3": ("Q4_K", {}),
    "deepseek_v2": ("F32", LATENT_SIZES),
    "deepseek_v2_lite": ("Q8_0", LATENT_SIZES | LITE),
    "deepseek_v3": ("Q4_K", LATENT_SIZES),
    "smollm3": ("Q8_0", {}),
    "arcee": ("Q8_0", NO_BIASES),
    "ernie4_5": ("Q8_0", HEADS | {"use_bias": False}),
    "hunyuan_dense": ("Q8_0", HEADS | {"attention_bias": False} | PLAIN_ROPE),
    "seed_oss": ("Q8_0", HEADS | {"mlp_bias": False}),
    "exaone4": ("Q8_0", HEADS),
    "nemotron": ("Q8_0", HEADS),
    "dots1": ("Q8_0", EXPERT_SIZES | HEADS | {"sliding_window": None, "num_key_value_heads": 4}),
    "glm4_moe": ("Q8_0", EXPERT_SIZES | HEADS),
    "jais2": ("Q8_0", HEADS),
    "minimax_m2": ("Q8_0", HEADS | {"intermediate_size": 256}),
    "phi3_short": ("F32", {"hidden_size": 64}),
    "stablelm": ("Q8_0", {}),
    "stablelm_head_norms": ("Q8_0", {}),
    "stablelm_parallel": ("Q8_0", {}),
    "starcoder2": ("Q8_0", {}),
    "gemma": ("Q8_0", HEADS),
    "gemma2": ("Q4_K", HEADS | {"query_pre_attn_scalar": 64}),
    "gemma3": ("Q5_K", HEADS | {"query_pre_attn_scalar": 64}),
}


@pytest.fixture(autouse=True)
def torch_ops():
    """Use the operators of torch. The CPU kernels, which another engine may have installed, round
    inputs of int4.
    """
    before = get_ops()
    set_ops(NativeOps())
    yield
    set_ops(before)


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf"))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    made = {}

    def get(family, kind, **overrides):
        if (family, kind) not in made:
            folder = tmp_path_factory.mktemp("gguf")
            source = make_tiny_model(
                family, folder / "source", vocab_size=VOCAB_SIZE, **(SIZES | overrides)
            )
            kinds = itertools.cycle(kind.split("+"))
            write_gguf(source, folder, lambda name: Type[next(kinds)])
            made[family, kind] = folder
        return made[family, kind]

    return get


def blocks_of(kind, shape):
    if kind in RANDOM_TYPES:
        return random_blocks(Type[kind], shape, 1.0)
    numbers = torch.randn(shape, generator=torch.manual_seed(0)).numpy()
    return gguf.quantize(numbers, Type[kind])


def write_matrices(path, kinds, shape=(7, 768), blocks_of=blocks_of):
    """Write a file with a matrix of each type. Return the tensors that the package reads from
    it.
    """
    writer, want = gguf.GGUFWriter(path, "llama"), {}
    for i, kind in enumerate(kinds):
        data = blocks_of(kind, shape)
        writer.add_tensor(f"blk.{i}.ffn_up.weight", data, raw_dtype=Type[kind])
        numbers = torch.from_numpy(gguf.dequantize(data, Type[kind]).astype("float32"))
        want[f"model.layers.{i}.mlp.up_proj.weight"] = numbers
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return want


def test_numbers_of_every_type_are_those_of_the_package(tmp_path, monkeypatch):
    for number, kind in BLOCK_TYPES.items():
        assert (kind.name, number) == (Type(number).name, Type[kind.name].value)
        assert (kind.block_size, kind.block_bytes) == gguf.GGML_QUANT_SIZES[Type(number)]
    kinds = [kind.name for kind in BLOCK_TYPES.values()]
    want = write_matrices(tmp_path / "model.gguf", kinds)
    monkeypatch.setattr("vllm.model_executor.loader.gguf_file.PART_NUMBERS", 2 * 768)
    for (name, source), kind in zip(read_gguf([tmp_path / "model.gguf"]), kinds, strict=True):
        numbers = want[name]
        assert numbers.isfinite().all() and numbers.std() > 0.01, kind
        assert torch.equal(source.read(()).float(), numbers), kind
        part = (slice(1, 6), slice(256, 700))
        assert torch.equal(source.read(part).float(), numbers[part]), kind


def test_scales_that_are_no_numbers_are_refused(tmp_path):
    """A scale with all bits set is NaN."""
    kinds = [kind.name for kind in BLOCK_TYPES.values() if kind.block_size > 1]
    kinds.remove("MXFP4")  # for MXFP4, a scale with all bits set is 2^127
    path = tmp_path / "model.gguf"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_matrices(path, kinds, blocks_of=lambda *args: blocks_of(*args) | 255)
        for (name, source), kind in zip(read_gguf([path]), kinds, strict=True):
            with pytest.raises(WeightLoadError, match=rf"{name} has the type {kind}, .* damaged"):
                source.read(())


def test_the_package_is_needed_for_rarer_types_only(tmp_path, monkeypatch):
    assert not [kind for kind in OUR_TYPES if needs_package(kind)]
    for name, kinds in (("ours", OUR_TYPES), ("all", (*OUR_TYPES, "IQ4_XS"))):
        write_matrices(tmp_path / f"{name}.gguf", kinds)
    assert stored_format([tmp_path / "all.gguf"]) is not None
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert stored_format([tmp_path / "ours.gguf"]) is not None
    with pytest.raises(ConfigError, match=r"type IQ4_XS, .*pip install 'vllm\[gguf\]'; .* Q4_0"):
        stored_format([tmp_path / "all.gguf"])


SELDOM = {
    *("granite", "cohere", "cohere2", "falcon_7b", "glm", "gpt_bigcode", "gpt_neox", "bloom"),
    *("gpt_neox_sequential", "mpt", "olmo", "olmoe", "phi", "phi3", "starcoder2"),
    *("stablelm", "stablelm_head_norms", "stablelm_parallel", "smollm3", "arcee", "ernie4_5"),
    *("hunyuan_dense", "seed_oss", "exaone4", "nemotron", "dots1", "jais2", "deepseek_v2_lite"),
}
"""Families whose files are like the files of another family here."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.exhaustive) if f in SELDOM else f for f in MODELS],
)
def test_logits_are_those_of_transformers(written, family):
    if is_version_4() and family in ("gpt_oss", "phi3_short"):
        pytest.skip("this transformers does not read rope_parameters, which version 5 has")
    kind, overrides = MODELS[family]
    folder, input_ids = written(family, kind, **overrides), prompt_of(100) % VOCAB_SIZE
    want = reference_logits(folder / "dense", input_ids)
    got = logits_of(load(unpack(folder / "model.gguf")), input_ids)
    assert want.std() > 1, "logits too flat to tell anything"
    torch.testing.assert_close(got, want, atol=2e-4 * max(1, want.std().item()), rtol=0)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_older_files_have_keys_and_values_of_latents_in_one_tensor(tmp_path, family):
    source = make_tiny_model(
        family, tmp_path / "source", vocab_size=VOCAB_SIZE, **(SIZES | LATENT_SIZES)
    )
    path = write_gguf(source, tmp_path, lambda name: Type.Q8_0, splits_latent=False)
    input_ids = prompt_of(40) % VOCAB_SIZE
    want = reference_logits(tmp_path / "dense", input_ids)
    got = logits_of(load(unpack(path)), input_ids)
    torch.testing.assert_close(got, want, atol=2e-4 * want.std().item(), rtol=0)


def test_ranks_have_the_latent_projections_of_their_heads(written):
    folder = written("deepseek_v3", *MODELS["deepseek_v3"][:1], **MODELS["deepseek_v3"][1])
    for rank in range(2):
        tp = TPGroup(rank, 2)
        models = [load(path, tp) for path in (unpack(folder / "model.gguf"), folder / "dense")]
        got, want = (model.model.layers[0].self_attn.kv_b_proj for model in models)
        for half in ("key_up", "value_up"):
            assert torch.equal(getattr(got, half).dense(), getattr(want, half).dense())


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K+Q6_K+F16"])
@pytest.mark.parametrize(
    ("architecture", "labels"),
    [("BertModel", 0), ("BertForSequenceClassification", 3), ("BertForSequenceClassification", 1)],
)
def test_encoders_are_those_of_transformers(tmp_path, architecture, labels, kind):
    sizes = SIZES | ({"num_labels": labels} if labels else {})
    source = make_pooling_model(architecture, tmp_path / "source", **sizes)
    kinds = itertools.cycle(kind.split("+"))
    path = write_gguf(source, tmp_path, lambda name: Type[next(kinds)])
    config, input_ids = make_config(unpack(path)), prompt_of(60)
    pooler = PoolerConfig(task="embed", pooling_type="CLS", is_causal=False)
    config = replace(config, model=replace(config.model, pooler=pooler))
    model = load_model(config, TPGroup(), torch.device("cpu"))
    dense = tmp_path / "dense", architecture, input_ids.tolist()
    with torch.inference_mode():
        got = model(input_ids, torch.arange(60))
        want = hidden_states(*dense)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
        if labels:
            torch.testing.assert_close(
                model.head(got[:1])[0], class_logits(*dense), atol=1e-4, rtol=0
            )


def test_a_classifier_of_one_tensor_is_refused(tmp_path):
    source = make_pooling_model("BertForSequenceClassification", tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    others = {name: w for name, w in weights.items() if not name.startswith("classifier")}
    save_file(others, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightLoadError, match=r"one of the tensors cls\.weight and cls\.output"):
        unpack(write_gguf(source, tmp_path))


@pytest.mark.parametrize("architecture", ["baichuan", "internlm2"])
def test_families_that_are_llamas_in_these_files(tmp_path, architecture):
    source = make_tiny_model("llama", tmp_path / "source")
    path = write_gguf(source, tmp_path, architecture=architecture)
    want = reference_logits(tmp_path / "dense", prompt_of(40))
    got = logits_of(load(unpack(path)), prompt_of(40))
    torch.testing.assert_close(got, want, atol=2e-4 * want.std().item(), rtol=0)


def test_a_number_of_layers_says_which_baichuan_has_alibi(tmp_path):
    source = make_tiny_model("llama", tmp_path / "source", num_hidden_layers=40)
    path = write_gguf(source, tmp_path, architecture="baichuan")
    arch = read_arch(unpack(path))
    assert arch.rope is None and arch.max_position_embeddings == 512
    load(unpack(path))


@pytest.mark.parametrize(
    "kind",
    [
        *("Q4_0", "Q8_0", "Q8_0+Q4_0+Q6_K"),
        *("Q4_1", "Q5_1", "Q4_K", "Q5_K+Q4_K+Q4_0", "Q5_0+Q4_1"),
        *("Q2_K", "Q3_K+Q2_K+Q4_K", "Q3_K+Q5_K"),
        "Q4_K+Q6_K+Q5_1",  # the parts of this fused layer have formats that cannot be fused
    ],
)
def test_blocks_stay_as_they_are(written, kind):
    folder = written("llama", kind, **HEADS, intermediate_size=512)
    for tp in (TPGroup(), TPGroup(1, 2)):
        if tp.size == 1 and load_cpu_kernels() is not None:
            set_ops(CPUOps())
        model, dense = (load(f, tp) for f in (unpack(folder / "model.gguf"), folder / "dense"))
        set_ops(NativeOps())
        twins, num_compared = dict(dense.named_modules()), 0
        for path, layer in model.named_modules():
            if isinstance(layer, ParallelLinear) and not hasattr(layer, "weight"):
                assert torch.equal(weight_of(layer), twins[path].weight), path
                num_compared += 1
        assert num_compared == 12


@pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")
def test_experts_stay_as_they_are(written):
    """They are stored in the layout of the kernels. A token with one expert gets the output of this
    expert.
    """
    folder = written("qwen3_moe", *MODELS["qwen3_moe"][:1], **MODELS["qwen3_moe"][1])
    set_ops(CPUOps())
    model = load(unpack(folder / "model.gguf"))
    set_ops(NativeOps())
    dense = dict(load(folder / "dense").named_modules())
    x = torch.randn(5, 256, generator=torch.manual_seed(0)) / 8
    ids, weights = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 3]]), torch.full((5, 2), 0.5)
    experts = {n: layer for n, layer in model.named_modules() if isinstance(layer, Experts)}
    assert experts
    for path, layer in experts.items():
        packed = layer.method.packed
        assert packed.num_bytes < 5 * layer.intermediate_size * 256 * 3 * packed.num_experts / 8
        want = dense[path].forward(x, ids, weights)
        error = (packed.forward(x, ids, weights) - want).norm() / want.norm()
        assert error < 0.02  # inputs are rounded to int8


@pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")
@pytest.mark.parametrize(("family", "kind"), [("gemma", "Q8_0"), ("llama", "Q4_K+Q6_K+Q5_1")])
def test_embeddings_and_heads_stay_as_they_are(written, family, kind):
    """In gemma, the embedding and the head are one tensor."""
    folder = written(family, kind, **HEADS)
    set_ops(CPUOps())
    model = load(unpack(folder / "model.gguf"))
    set_ops(NativeOps())
    twin = load(folder / "dense")
    twins = dict(twin.named_modules())
    ids = torch.arange(40)
    tables = {n: t for n, t in model.named_modules() if isinstance(t, VocabParallelEmbedding)}
    assert len(tables) == 2
    for path, table in tables.items():
        assert not list(table.parameters())
        assert torch.equal(table.method.embed(table, ids), twins[path].weight[ids])
        x = torch.randn(3, 256, generator=torch.manual_seed(0))
        want = x @ twins[path].weight.T
        assert (table.method.multiply(table, x) - want).norm() / want.norm() < 0.02


def test_a_rank_needs_whole_groups(written):
    with pytest.raises(ConfigError, match="cannot be split over ranks: a rank would have 16 inp"):
        load(
            unpack(written("qwen2", "Q8_0", **NO_WINDOW, intermediate_size=64) / "model.gguf"),
            TPGroup(0, 4),
        )


def test_a_split_model_is_one(written, tmp_path):
    folder = written("mistral", "Q8_0", sliding_window=None)
    reader = gguf.GGUFReader(folder / "model.gguf")
    tensors = list(reader.tensors)
    for number, part in enumerate((tensors[:5], tensors[5:])):
        name = f"model-{number + 1:05}-of-00002.gguf"
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        if number == 0:
            for field in reader.fields.values():
                if field.name.startswith(("llama.", "tokenizer.")):
                    writer.add_key_value(field.name, field.contents(), field.types[0])
        writer.add_uint16("split.count", 2)
        writer.add_uint16("split.no", number)
        writer.add_int32("split.tensors.count", len(tensors))
        for tensor in part:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    got = [
        logits_of(load(unpack(path)), prompt_of(20) % VOCAB_SIZE)
        for path in (tmp_path / "model-00002-of-00002.gguf", folder / "model.gguf")
    ]
    assert torch.equal(*got)
    shutil.move(tmp_path / "model-00002-of-00002.gguf", tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match=r"1 of 2 files of the model .*: model-00002-of"):
        unpack(tmp_path / "model-00001-of-00002.gguf")
