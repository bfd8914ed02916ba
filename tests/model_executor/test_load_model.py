"""Test loading checkpoints of every kind, and the errors of damaged ones."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.model_executor.helpers import (
    load,
    logits_of,
    make_config,
    prompt_of,
    read_arch,
    reference_logits,
)
from tests.tiny_models import make_tiny_model
from vllm.attention import Attention
from vllm.distributed import TPGroup
from vllm.engine.arg_utils import EngineArgs
from vllm.errors import ConfigError, WeightLoadError
from vllm.model_executor.layers.slice import CheckpointTensor
from vllm.model_executor.loader import load_model
from vllm.model_executor.loader.kv_scales import load_kv_scale
from vllm.model_executor.loader.model_loader import build_model
from vllm.transformers_utils.tokenizer import get_tokenizer
from vllm.transformers_utils.transformers_version import is_version_4
from vllm.transformers_utils.weight_headers import has_own_head
from vllm.utils.files.weight_files import find_files, name_some

INPUT_IDS = prompt_of(20)


@pytest.fixture
def llama(tiny_model, tmp_path):
    """Return a copy of the tiny Llama that a test may change."""
    return shutil.copytree(tiny_model("llama"), tmp_path / "llama")


@pytest.fixture
def want(tiny_model):
    return reference_logits(tiny_model("llama"), INPUT_IDS)


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def put(folder, tensors):
    save_file(tensors, folder / "model.safetensors")


def shard(folder, suffix, save):
    """Replace the single file by two files and an index."""
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    stem = {"safetensors": "model", "bin": "pytorch_model"}[suffix]
    names = [f"{stem}-0000{i}-of-00002.{suffix}" for i in (1, 2)]
    weight_map = {name: names[i % 2] for i, name in enumerate(sorted(tensors))}
    for file in names:
        save({n: tensors[n] for n in tensors if weight_map[n] == file}, folder / file)
    index = folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return names


def assert_loads(folder, want, **kw):
    torch.testing.assert_close(logits_of(load(folder, **kw), INPUT_IDS), want, atol=2e-5, rtol=0)


@pytest.mark.parametrize("load_format", ["auto", "safetensors"])
def test_sharded_safetensors(llama, want, load_format):
    shard(llama, "safetensors", save_file)
    assert_loads(llama, want, load_format=load_format)


def test_the_index_says_which_file_has_a_tensor(llama, want, caplog):
    first, second = shard(llama, "safetensors", save_file)
    old, new = load_file(llama / first), load_file(llama / second)
    name, other = next(iter(new)), next(iter(old))
    save_file(old | {name: torch.zeros_like(new[name])}, llama / first)
    save_file(new | {other: torch.zeros_like(old[other])}, llama / second)
    with caplog.at_level(logging.WARNING, "vllm"):
        assert_loads(llama, want)
    assert [r.message for r in caplog.records if "2 copies, such as" in r.message]
    (llama / "model.safetensors.index.json").unlink()
    with pytest.raises(WeightLoadError, match=r"2 tensors .*given twice"):
        load(llama)
    save_file(old | {name: new[name]}, llama / first)
    save_file(new, llama / second)
    assert_loads(llama, want)


def test_shards_without_an_index(llama, want):
    shard(llama, "safetensors", save_file)
    (llama / "model.safetensors.index.json").unlink()
    assert_loads(llama, want)


@pytest.mark.parametrize("load_format", ["auto", "pt"])
def test_bin_files(llama, want, load_format):
    torch.save(tensors_of(llama), llama / "pytorch_model.bin")
    (llama / "model.safetensors").unlink()
    assert_loads(llama, want, load_format=load_format)


def test_sharded_bin_files_of_the_oldest_form(llama, want):
    def save(tensors, path):
        torch.save(tensors, path, _use_new_zipfile_serialization=False)

    shard(llama, "bin", save)
    assert_loads(llama, want)


def test_the_asked_form_is_the_one_that_is_read(llama):
    with pytest.raises(WeightLoadError, match=r"no weights in .*expected pytorch_model\.bin"):
        load(llama, load_format="pt")


def test_a_bfloat16_checkpoint_runs_in_float32(tmp_path):
    folder = make_tiny_model("llama", tmp_path, dtype="bfloat16")
    model = load(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert_loads(folder, reference_logits(folder, INPUT_IDS))


def test_the_dtype_of_the_checkpoint_is_the_default(tmp_path):
    folder = make_tiny_model("llama", tmp_path, dtype="bfloat16")
    model = load(folder, dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}


def test_the_model_is_ready_to_run(llama):
    model = load(llama)
    assert not model.training
    assert not any(p.requires_grad or p.is_meta for p in model.parameters())
    assert len({id(b) for b in model.buffers()}) == 1, "layers share one rotary table"


def test_tied_weights_stay_one(tiny_model, tmp_path):
    model = load(tiny_model("granite_code"))
    assert model.lm_head.weight is model.model.embed_tokens.weight


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("first", [EMBEDDING, HEAD])
@pytest.mark.parametrize("saved", ["twice", "twice, and they differ", "only as the head"])
def test_a_tied_weight_may_have_other_names(tiny_model, tmp_path, saved, first, caplog):
    folder = shutil.copytree(tiny_model("granite_code"), tmp_path / "copy")
    tensors = tensors_of(folder)
    both = {EMBEDDING: tensors[EMBEDDING], HEAD: tensors[EMBEDDING].clone()}
    if saved == "twice, and they differ":
        both[HEAD] = torch.zeros_like(both[HEAD])
    if saved == "only as the head":
        del both[EMBEDDING]
    rest = {name: tensor for name, tensor in tensors.items() if name not in both}
    files = [both, rest] if first == EMBEDDING else [{n: both[n]} for n in reversed(both)] + [rest]
    (folder / "model.safetensors").unlink()
    for number, part in enumerate(files):
        save_file(part, folder / f"model-{number}.safetensors")
    with caplog.at_level(logging.WARNING, "vllm"):
        found = logits_of(load(folder), INPUT_IDS)
    assert torch.equal(found, logits_of(load(tiny_model("granite_code")), INPUT_IDS))
    warnings = [r.message for r in caplog.records if "tie_word_embeddings" in r.message]
    assert len(warnings) == (saved == "twice, and they differ")


@pytest.mark.parametrize(
    ("change", "is_own"),
    [
        ({HEAD: 1.0}, False),  # a copy of the embeddings
        ({HEAD: None}, False),
        ({EMBEDDING: None, HEAD: 1.0}, False),
        ({HEAD: 2.0}, True),
        ({HEAD: None, "lm_head.qweight": 1.0, "lm_head.scales": 1.0}, True),
        ({HEAD: None, "lm_head.bias": 1.0}, False),
        ({HEAD: None, "model.mtp.layers.0.lm_head.weight": 1.0}, False),
    ],
)
@pytest.mark.parametrize("is_split", [False, True])
def test_a_head_of_its_own_has_other_values_than_the_embeddings(llama, change, is_own, is_split):
    tensors = tensors_of(llama)
    table = tensors[EMBEDDING]
    tensors |= {name: factor and table * factor for name, factor in change.items()}
    put(llama, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    if is_split:
        shard(llama, "safetensors", save_file)
    assert has_own_head(llama, "auto") == is_own


@pytest.mark.skipif(is_version_4(), reason="it ties them, whatever the file has")
def test_a_head_of_its_own_is_used_as_transformers_does(llama, want):
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    settings = EngineArgs(str(llama), skip_tokenizer_init=True, dtype="float32")
    assert not settings.create_engine_config().model.arch.tie_word_embeddings
    torch.testing.assert_close(reference_logits(llama, INPUT_IDS), want, atol=2e-5, rtol=0)


def test_the_first_checkpoint_of_yi_is_a_llama_with_other_names(llama, want):
    names = {"input_layernorm": "ln1", "post_attention_layernorm": "ln2"}
    tensors = {}
    for name, tensor in tensors_of(llama).items():
        parts = [names.get(part, part) for part in name.split(".")]
        tensors[".".join(parts)] = tensor
    put(llama, tensors)
    config = json.loads((llama / "config.json").read_text())
    config |= {"architectures": ["YiForCausalLM"], "model_type": "Yi"}
    (llama / "config.json").write_text(json.dumps(config))
    assert any(".ln1." in name for name in tensors)
    assert_loads(llama, want)


@pytest.mark.parametrize(
    ("prefix", "inner"),
    [
        ("language_model.", ""),  # of a fine-tuned Gemma 3 whose config only has the text model
        ("model.language_model.", "model."),
        *((prefix, "") for prefix in ("module.", "_orig_mod.", "base_model.model.")),
        *((prefix, "") for prefix in ("model.", "llm.", "module.student.")),  # of other programs
        ("", "model."),
    ],
)
def test_all_names_may_have_a_longer_beginning(llama, want, prefix, inner):
    tensors = {"vision_tower.a.weight": torch.ones(2), "multi_modal_projector.b": torch.ones(2)}
    for name, tensor in tensors_of(llama).items():
        is_inner = name.startswith(inner)
        tensors[prefix + name.removeprefix(inner) if is_inner else name] = tensor
    put(llama, tensors)
    assert_loads(llama, want)


def test_of_two_models_in_one_checkpoint_none_is_chosen(llama):
    tensors = tensors_of(llama)
    put(llama, {p + n: t.clone() for n, t in tensors.items() for p in ("student.", "teacher.")})
    with pytest.raises(WeightLoadError, match="missing from the checkpoint"):
        load(llama)


def test_names_that_are_no_weights_are_ignored(llama, want):
    tensors = tensors_of(llama)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    put(llama, tensors)
    assert_loads(llama, want)


def test_layers_for_multi_token_prediction_are_not_read(llama, want, caplog):
    tensors = tensors_of(llama)
    layer = {n: t for n, t in tensors.items() if n.startswith("model.layers.0.")}
    more = {"mtp.fc.weight": torch.ones(64, 128), "model.mtp_emb_norm.0.weight": torch.ones(64)}
    more |= {n.replace("layers", "mtp_layers"): t.clone() for n, t in layer.items()}
    behind = {n.replace("layers.0", "layers.3"): t.clone() for n, t in layer.items()}
    put(llama, tensors | more | behind)
    with pytest.raises(WeightLoadError, match=r"9 tensors unknown to .*: model.layers.3.input_l"):
        load(llama)  # config.json may have a wrong number of layers
    put(llama, tensors | more | behind | {"model.layers.3.enorm.weight": torch.ones(64)})
    with caplog.at_level(logging.INFO, "vllm"):
        assert_loads(llama, want)
    assert "21 tensors of layers for multi-token prediction are not read: model." in caplog.text


def test_names_may_have_the_wrappers_of_torch(llama, want):
    ways = {
        ".layers.0.": ".layers.0._fsdp_wrapped_module.",
        ".layers.1.mlp.": ".layers.1._checkpoint_wrapped_module.mlp.",
        ".layers.2.self_attn.": ".layers.2._orig_mod.self_attn.",
    }
    for prefix in ("", "module._orig_mod."):
        tensors = {}
        for name, tensor in tensors_of(llama).items():
            for usual, wrapped in ways.items():
                name = name.replace(usual, wrapped)
            tensors[prefix + name] = tensor
        put(llama, tensors)
        assert_loads(llama, want)


@pytest.mark.parametrize("family", ["opt", "opt_post_norm"])
def test_opt_checkpoints_without_the_level_model(tiny_model, tmp_path, family):
    folder = shutil.copytree(tiny_model(family), tmp_path / "copy")
    put(folder, {name.removeprefix("model."): t for name, t in tensors_of(folder).items()})
    assert_loads(folder, reference_logits(tiny_model(family), INPUT_IDS))


def test_a_missing_tensor_is_named(llama):
    tensors = tensors_of(llama)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    put(llama, tensors)
    with pytest.raises(WeightLoadError, match=r"1 tensors missing .*: model\.layers\.1\..*k_proj"):
        load(llama)


def test_a_missing_head_names_the_key_that_ties_it(llama):
    tensors = tensors_of(llama)
    del tensors["lm_head.weight"]
    put(llama, tensors)
    with pytest.raises(
        WeightLoadError, match=r"lm_head\.weight\. .*set tie_word_embeddings to true"
    ):
        load(llama)


def test_many_missing_tensors_are_counted(llama):
    put(llama, {"lm_head.weight": tensors_of(llama)["lm_head.weight"]})
    with pytest.raises(WeightLoadError, match=r"29 tensors missing .* and 19 more$") as caught:
        load(llama)
    assert "\n" not in str(caught.value)


def test_an_unknown_tensor_is_named(llama):
    put(llama, tensors_of(llama) | {"model.layers.0.router.weight": torch.ones(2)})
    with pytest.raises(WeightLoadError, match=r"1 tensors unknown .*: model\.layers\.0\.router"):
        load(llama)


@pytest.mark.parametrize(
    ("names", "scales"),
    [
        (["k_scale", "v_scale"], (0.5, 0.25)),
        (["k_proj.k_scale", "v_proj.v_scale"], (0.5, 0.25)),
        (["attn.v_scale"], (1.0, 0.5)),
        (["kv_scale"], (0.5, 0.5)),
    ],
)
def test_scales_of_the_kv_cache_reach_their_layer(llama, names, scales):
    scalars = {
        f"model.layers.1.self_attn.{name}": torch.tensor(0.5 ** (i + 1))
        for i, name in enumerate(names)
    }
    put(llama, tensors_of(llama) | scalars)
    first, second, _ = (layer.self_attn.attn for layer in load(llama).model.layers)
    for layer, (key, value) in ((first, (1.0, 1.0)), (second, scales)):
        assert (layer.key_scales == key).all()
        assert (layer.value_scales == value).all()


@pytest.mark.parametrize(("size", "want"), [(1, [[0.5, 2.0]]), (2, [[0.5], [2.0]])])
def test_scales_of_each_head_reach_the_ranks_that_have_it(llama, size, want):
    name = "model.layers.1.self_attn.k_scale"
    put(llama, tensors_of(llama) | {name: torch.tensor([[0.5], [2.0]])})
    found = [
        load(llama, TPGroup(rank, size)).model.layers[1].self_attn.attn for rank in range(size)
    ]
    assert [attn.key_scales.tolist() for attn in found] == want


def test_ranks_that_share_a_head_have_its_scale():
    numbers = torch.tensor([0.5, 2.0])
    source = CheckpointTensor(numbers.shape, lambda index: numbers[index])
    model = nn.ModuleDict({"attn": Attention(4, 8, 1)})
    found = []
    for rank in range(4):
        assert load_kv_scale(nn.ModuleDict({"a": model}), "a.k_scale", source, TPGroup(rank, 4))
        found += model["attn"].key_scales.tolist()
    assert found == [0.5, 0.5, 2.0, 2.0]


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        *((x, "must have values above 0") for x in (0.0, -1.0, float("nan"), float("inf"))),
        ([1.0, 0.0], "must have values above 0 only, got 0.0"),
        ([1.0, 2.0, 3.0], r"must have one value for the layer, or one for each .*\), got 3"),
        ([], r"must have one value .*, got 0"),
    ],
)
def test_a_scale_that_cannot_be_one_is_named(llama, scale, message):
    name = "model.layers.1.self_attn.k_scale"
    put(llama, tensors_of(llama) | {name: torch.tensor(scale)})
    with pytest.raises(WeightLoadError, match=rf"{name} {message}"):
        load(llama)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.self_attn.v_proj.weight", [64, 64]),
        ("model.layers.0.mlp.down_proj.weight", [64, 176]),
        ("model.embed_tokens.weight", [4096, 64]),
        ("model.norm.weight", [64]),
    ],
)
def test_a_wrong_shape_names_tensor_and_both_shapes(llama, name, expected):
    put(llama, tensors_of(llama) | {name: torch.ones(3, 5)})
    with pytest.raises(WeightLoadError) as caught:
        load(llama)
    text = str(caught.value)
    assert text.startswith(f"{llama / 'model.safetensors'}: tensor {name} has shape [3, 5]")
    assert str(expected) in text


def test_another_number_of_tokens_names_the_key_of_the_vocabulary(llama):
    put(llama, tensors_of(llama) | {"model.embed_tokens.weight": torch.ones(4099, 64)})
    with pytest.raises(
        WeightLoadError,
        match=r"\[4099, 64\] .* needs \[4096, 64\].* 4099 tokens, set vocab_size in",
    ):
        load(llama)


def test_of_several_files_the_one_with_the_wrong_tensor_is_named(llama):
    for path in (llama / each for each in shard(llama, "safetensors", save_file)):
        tensors = load_file(path)
        name = next(iter(tensors))
        save_file(tensors | {name: torch.ones(3, 5)}, path)
        with pytest.raises(WeightLoadError) as caught:
            load(llama)
        assert str(caught.value).startswith(f"{path}: tensor {name} has shape [3, 5]")
        save_file(tensors, path)


@pytest.mark.parametrize("keep", [0, 5, 1000, -8])
def test_a_truncated_safetensors_file_is_named(llama, keep):
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightLoadError, match=r"model\.safetensors is damaged") as caught:
        load(llama)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 5, 1000, -8])
def test_a_truncated_bin_file_is_named(llama, keep):
    path = llama / "pytorch_model.bin"
    torch.save(tensors_of(llama), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightLoadError, match=r"pytorch_model\.bin is damaged") as caught:
        load(llama, load_format="pt")
    assert "\n" not in str(caught.value)


class _Trap:
    def __reduce__(self):
        return (pytest.fail, ("code from a checkpoint has run",))


@pytest.mark.parametrize(
    ("content", "message"),
    [({"a": _Trap()}, "objects other than tensors"), ({"a": 1}, "not a dict"), ([1], "not a dict")],
)
def test_a_bin_file_of_something_else_is_refused_and_not_run(llama, content, message):
    torch.save(content, llama / "pytorch_model.bin")
    with pytest.raises(WeightLoadError, match=message):
        load(llama, load_format="pt")


def test_a_missing_shard_is_named(llama):
    first, second = shard(llama, "safetensors", save_file)
    (llama / second).unlink()
    with pytest.raises(WeightLoadError, match=f"1 of 2 files .*: {second}$"):
        load(llama)
    assert (llama / first).exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON"),
        ("[", "is not valid JSON"),
        ("[]", "holds a JSON list, not an object"),
        *((text, "has no 'weight_map' of names") for text in ("{}", '{"weight_map": 3}')),
        ('{"weight_map": {}}', "has no 'weight_map' of names"),
        ('{"weight_map": {"a": 5}}', "has no 'weight_map' of names"),
        (
            '{"weight_map": {"a": "../../b"}}',
            r"names '\.\./\.\./b', which is not a file of its folder",
        ),
        ('{"weight_map": {"a": "/etc/passwd"}}', "names '/etc/passwd', which is not a file"),
        ('{"weight_map": {"a": "b\\u0000"}}', "names .*, which is not a file of its folder"),
    ],
)
def test_a_damaged_index_is_named(llama, text, message):
    (llama / "model.safetensors").unlink()
    (llama / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightLoadError, match=rf"index\.json {message}"):
        load(llama)


def test_a_link_to_nothing_is_named(llama):
    (llama / "model.safetensors").unlink()
    (llama / "model.safetensors").symlink_to(llama / "blobs" / "0")
    with pytest.raises(
        WeightLoadError, match=r"model\.safetensors is a link to a file that does not"
    ):
        load(llama)


def test_a_file_that_git_lfs_has_not_downloaded_is_named(llama):
    for name in ("model.safetensors", "tokenizer.json"):
        (llama / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(
        WeightLoadError, match=r"model\.safetensors is a pointer of Git LFS, .*pull"
    ):
        load(llama)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is a pointer of Git LFS"):
        get_tokenizer(str(llama))


def test_safetensors_of_another_name_are_read(llama, want):
    (llama / "model.safetensors").rename(llama / "my-finetune.safetensors")
    (llama / "adapter_model.safetensors").touch()
    assert_loads(llama, want)


@pytest.mark.parametrize("level", [None, "state_dict", "module"])
def test_pickles_of_another_name_or_form_are_read(llama, want, level):
    tensors = tensors_of(llama)
    torch.save(tensors if level is None else {level: tensors, "epoch": 3}, llama / "final.pt")
    torch.save({"args": 1}, llama / "training_args.bin")
    (llama / "model.safetensors").unlink()
    assert_loads(llama, want)


def test_tensors_of_the_training_are_not_read(llama, want, caplog):
    more = {"optimizer.state.0": torch.ones(2), "v_head.summary.weight": torch.ones(1, 64)}
    put(llama, tensors_of(llama) | more)
    with caplog.at_level(logging.WARNING, "vllm"):
        assert_loads(llama, want)
    assert "2 tensors of the training are not read: optimizer.state.0, v_head" in caplog.text


def test_what_to_do_about_weights_in_another_state_is_said(llama):
    tensors = tensors_of(llama)
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = tensors.pop(name)
    put(llama, tensors | {name.replace(".weight", ".base_layer.weight"): weight})
    with pytest.raises(WeightLoadError, match=r"weights of a LoRA adapter: merge them into its"):
        load(llama)
    put(llama, tensors | {name: weight})
    config = json.loads((llama / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 16}
    (llama / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightLoadError, match=r"there without quantization: remove the key, or"):
        load(llama)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("adapter_model.safetensors", "an adapter. Name the model that it was trained on"),
        ("consolidated.00.pth", "weights in the format of Meta"),
        ("model.safetensors.incomplete", "a file whose download was interrupted"),
        ("tf_model.h5", "weights of another framework"),
        ("global_step100", "a checkpoint of DeepSpeed: run `python zero_to_fp32.py"),
    ],
)
def test_weights_in_another_format_are_named(tmp_path, name, what):
    (tmp_path / name).touch()
    with pytest.raises(WeightLoadError, match=f"index.json. It has {name}, {what}"):
        find_files(tmp_path, "auto")


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(WeightLoadError, match=r"no weights in .* model\.safetensors or .*\.bin"):
        find_files(tmp_path, "auto")


@pytest.mark.parametrize(
    ("family", "values", "experts"),
    [
        ("mixtral", {"num_local_experts": 0}, "got 2 of 0"),
        ("gpt_oss", {"num_experts_per_tok": 7}, "got 7 of 6"),
        ("deepseek_v3", {"num_experts_per_tok": 9}, "got 9 of 8"),
    ],
)
def test_experts_that_a_layer_does_not_have_are_a_config_error(
    family, values, experts, tiny_model, tmp_path
):
    config = json.loads((tiny_model(family) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | values))
    with pytest.raises(ConfigError, match=f"from 1 to the number of experts .*, {experts}"):
        build_model(read_arch(tmp_path), TPGroup(), torch.float32)


def test_an_unknown_architecture_is_a_config_error(llama):
    config = json.loads((llama / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLLM"]
    (llama / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"not supported \(the nearest: LlamaForCausalLM"):
        load(llama)


def test_a_group_that_cannot_split_the_model_is_a_config_error(llama):
    with pytest.raises(ConfigError, match=r"tensor_parallel_size \(3\) must divide .* \(4\)"):
        load(llama, TPGroup(rank=0, size=3))


@pytest.mark.parametrize("load_format", ["dummy", "safetensors"])
def test_weights_that_cannot_be_in_memory_are_refused_before_any_is_taken(llama, load_format):
    path = llama / "config.json"
    sizes = {"hidden_size": 2**16, "intermediate_size": 2**20, "num_hidden_layers": 64}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    with pytest.raises(ConfigError, match=r"weights of the model take \d+\.\d GiB, and"):
        load(llama, load_format=load_format)


def test_dummy_weights_are_seeded_and_usable(tiny_model, tmp_path):
    for family in ("llama", "opt_post_norm"):
        (tmp_path / family).mkdir()
        shutil.copy(tiny_model(family) / "config.json", tmp_path / family)
        first, second = (load(tmp_path / family, load_format="dummy") for _ in range(2))
        logits = logits_of(first, INPUT_IDS)
        assert torch.equal(logits, logits_of(second, INPUT_IDS))
        assert logits.isfinite().all()
        assert logits.std() > 0.1


def test_building_takes_no_memory(tiny_model):
    model = build_model(read_arch(tiny_model("llama")), TPGroup(), torch.bfloat16)
    assert all(p.is_meta and p.dtype is torch.bfloat16 for p in model.parameters())
    assert torch.get_default_dtype() is torch.float32


def test_size_and_time_are_logged(llama, caplog):
    logging.getLogger("vllm").addHandler(caplog.handler)
    try:
        load(llama)
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)
    assert "Loading model weights took 0.00" in caplog.text
    assert "GiB" in caplog.text


@pytest.mark.parametrize("show", [True, False])
def test_progress_is_shown_unless_disabled(llama, capfd, show):
    load_model(make_config(llama, use_tqdm_on_load=show), TPGroup(), torch.device("cpu"))
    assert ("Loading checkpoint files" in capfd.readouterr().err) is show


def test_a_long_list_of_names_is_cut():
    assert name_some(list("abc"), most=3) == "a, b, c"
    assert name_some(list("abcd"), most=3) == "a, b, c and 1 more"
