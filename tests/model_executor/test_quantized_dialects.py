"""Test different settings of quantized checkpoints with the same meaning, and the names of layers
in them.
"""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.hpu import captured_log
from tests.model_executor.helpers import load, logits_of, make_config, prompt_of
from tests.model_executor.test_quantized_checkpoints import weight_of, weight_of_head
from tests.quantized_checkpoints import FORMATS, made_once, write
from tests.reach import replace_ops
from vllm.distributed import TPGroup
from vllm.errors import ConfigError
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.linear import ParallelLinear
from vllm.model_executor.layers.stored.stored_experts import StoredExperts
from vllm.model_executor.loader import load_model
from vllm.ops.cpu.operators import CPUOps, load_cpu_kernels


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return made_once(tmp_path_factory.mktemp("quantized"))


FILE = "model.safetensors"


def changed_settings(folder, tmp_path, change, *, key="quantization_config", file=None):
    """Return a copy of a checkpoint with other settings, in config.json or in a separate file."""
    copy = shutil.copytree(folder, tmp_path / "changed")
    config = json.loads((copy / "config.json").read_text())
    settings = change(config.pop("quantization_config"))
    if file is not None:
        (copy / file).write_text(json.dumps(settings))
    else:
        config[key] = settings
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def nested(settings):
    algorithm = {"quant_algo": settings["quant_algo"], "exclude_modules": ["lm_head"]}
    return {"producer": {"name": "modelopt"}, "quantization": algorithm}


def mixed(settings):
    of_all = {"quant_algo": settings["quant_algo"]}
    layers = [f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn", "mlp")]
    return settings | {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": dict.fromkeys(layers, of_all),
    }


def mixed_formats(settings):
    (group,) = settings["config_groups"].values()
    groups = {"group_0": group | {"format": settings["format"]}}
    return settings | {"format": "mixed-precision", "config_groups": groups}


def auto_round(packing, key="packing_format"):
    def change(settings):
        kept = {name: settings[name] for name in ("bits", "group_size", "sym") if name in settings}
        return kept | {"quant_method": "auto-round", "data_type": "int", key: packing}

    return change


def blocks_as_text(settings):
    weights = settings["config_groups"]["group_0"]["weights"]
    weights["block_structure"] = "x".join(map(str, weights["block_structure"]))
    return settings


def without_strategy(settings):
    weights = settings["config_groups"]["group_0"]["weights"]
    assert weights["strategy"] == "group"
    weights["strategy"] = None
    return settings


DIALECTS = {
    "sparsity_config of a dense model": (
        "ct-w4a16",
        lambda s: s | {"sparsity_config": {"format": "dense"}, "kv_cache_scheme": None},
        {},
    ),
    "compression_config": ("ct-w8a8", lambda s: s, {"key": "compression_config"}),
    "hf_quant_config.json": ("modelopt", nested, {"file": "hf_quant_config.json"}),
    "modelopt as the producer": (
        "modelopt",
        lambda s: {"quant_algo": "FP8", "producer": {"name": "modelopt", "version": "0.33"}},
        {},
    ),
    "nested modelopt": ("modelopt", lambda s: nested(s) | {"quant_method": "modelopt"}, {}),
    "hf_quant_config.json of NVFP4": ("nvfp4", nested, {"file": "hf_quant_config.json"}),
    "modelopt_fp4": ("nvfp4", lambda s: s | {"quant_method": "modelopt_fp4"}, {}),
    "NVFP4 by layers": ("nvfp4", mixed, {}),
    "FP8 by layers": ("modelopt", mixed, {}),
    "formats of groups": ("ct-nvfp4", mixed_formats, {}),
    "auto-round as GPTQ": ("gptq-4", auto_round("auto_round:auto_gptq"), {}),
    "old auto-round": ("gptq-4", auto_round("auto_round:gptq:exllamav2", "backend"), {}),
    "auto-round as AWQ": ("awq", auto_round("auto_round:auto_awq"), {}),
    "a longer name of e4m3": ("fp8-static", lambda s: s | {"fmt": "float8_e4m3fn"}, {}),
    "null for defaults": (
        "gptq-4",
        lambda s: s | dict.fromkeys(("checkpoint_format", "lm_head", "is_marlin_format")),
        {},
    ),
    "gptq_marlin": ("gptq-4", lambda s: s | {"quant_method": "gptq_marlin"}, {}),
    "awq_marlin": ("awq", lambda s: s | {"quant_method": "awq_marlin"}, {}),
    "the name in capitals": ("gptq-4", lambda s: s | {"quant_method": "GPTQ"}, {}),
    "values in capitals": ("awq", lambda s: s | {"version": "GEMM"}, {}),
    "an underline in the name": (
        "ct-w4a16",
        lambda s: s | {"quant_method": "compressed_tensors", "format": "pack_quantized"},
        {},
    ),
    "actorder weight": ("ct-w4a16", lambda s: with_order(s, "weight"), {}),
    "actorder static": ("ct-w4a16", lambda s: with_order(s, "static"), {}),
    "actorder true": ("ct-w4a16-asym-order", lambda s: with_order(s, True), {}),
    "a kernel as the version": ("awq", lambda s: s | {"version": "exllama"}, {}),
    "transforms of no layer": (
        "ct-w4a16",
        lambda s: s | {"transform_config": {"config_groups": {}}},
        {},
    ),
    "groups without a strategy": ("ct-w4a16", without_strategy, {}),
    "blocks as a text": ("ct-fp8-block", blocks_as_text, {}),
    "numbers and switches as texts": (
        "gptq-4",
        lambda s: s | {key: str(s[key]) for key in ("bits", "group_size", "desc_act", "sym")},
        {},
    ),
    "the first names of GPTQ": (
        "gptq-4",
        lambda s: s | {"wbits": s.pop("bits"), "groupsize": s.pop("group_size")},
        {},
    ),
}


def with_order(settings, order):
    settings["config_groups"]["group_0"]["weights"]["actorder"] = order
    return settings


@pytest.mark.parametrize("dialect", DIALECTS)
def test_other_dialects_mean_the_same_weights(checkpoint, tmp_path, dialect):
    name, change, where = DIALECTS[dialect]
    folder, dense = checkpoint(name)
    model = load(changed_settings(folder, tmp_path, change, **where))
    twins = dict(load(dense).named_modules())
    stored = [(p, m) for p, m in model.named_modules() if isinstance(m, ParallelLinear)]
    assert len(stored) == 8
    for path, layer in stored:
        assert torch.equal(weight_of(layer), twins[path].weight), path


@pytest.mark.parametrize("keeps_dimensions", [False, True])
def test_fp8_blocks_of_modelopt_are_those_of_fp8(checkpoint, tmp_path, keeps_dimensions):
    folder, _ = checkpoint("fp8-block")
    settings = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "ignore": ["lm_head"]}
    copy = changed_settings(folder, tmp_path, lambda s: settings)
    tensors = {}
    for name, tensor in load_file(copy / FILE).items():
        if name.endswith("_scale_inv"):
            name = name.removesuffix("_inv")
            tensor = tensor[:, None, :, None] if keeps_dimensions else tensor
        tensors[name] = tensor.contiguous()
    save_file(tensors, copy / FILE)
    stored, twin = (
        [weight_of(m) for m in load(each).modules() if isinstance(m, ParallelLinear)]
        for each in (copy, folder)
    )
    assert len(stored) == 8
    assert all(torch.equal(a, b) for a, b in zip(stored, twin, strict=True))


@pytest.mark.parametrize(
    ("method", "instead"),
    [
        *((name, "use a GPTQ or AWQ checkpoint") for name in ("aqlm", "vptq", "spqr", "higgs")),
        ("bitnet", "use a GPTQ or AWQ checkpoint"),
        *((name, "use an FP8 or compressed-tensors checkpoint") for name in ("eetq", "quanto")),
        ("gptq_marlin_24", "use the GPTQ checkpoint from which it was made"),
        ("gguf", "give the GGUF file as the model"),
        ("new", r"use a checkpoint of a supported format \(auto-round, awq"),
    ],
)
def test_a_format_that_is_not_supported_is_named_with_another(
    checkpoint, tmp_path, method, instead
):
    copy = changed_settings(checkpoint("gptq-4")[0], tmp_path, lambda s: {"quant_method": method})
    with pytest.raises(
        ConfigError, match=rf"quantized with '{method}', .*not supported; {instead}"
    ):
        load(copy)


@pytest.mark.parametrize("algorithm", ["NVFP4_AWQ", "W8A8_SQ_PER_CHANNEL"])
def test_an_algorithm_of_modelopt_that_is_not_supported_is_named(checkpoint, tmp_path, algorithm):
    copy = changed_settings(
        checkpoint("modelopt")[0], tmp_path, lambda s: s | {"quant_algo": algorithm}
    )
    with pytest.raises(ConfigError, match=rf"quant_algo is '{algorithm}'; supported: .*FP8_PB_WO"):
        load(copy)


def test_settings_without_a_name_are_completed_by_the_file_beside_them(checkpoint, tmp_path):
    folder, _ = checkpoint("modelopt")
    copy = changed_settings(folder, tmp_path, lambda s: {"ignore": ["lm_head"]})
    (copy / "hf_quant_config.json").write_text(json.dumps(nested({"quant_algo": "FP8"})))
    stored = [m for m in load(copy).modules() if isinstance(m, ParallelLinear)]
    twin = [m for m in load(folder).modules() if isinstance(m, ParallelLinear)]
    assert len(stored) == 8
    assert all(torch.equal(weight_of(a), weight_of(b)) for a, b in zip(stored, twin, strict=True))


WRONG_IN = {
    "config.json": ("gptq-4", {}, {}, "config.json", "quantization_config.bits"),
    "compression_config": (
        "ct-w8a8",
        {"kv_cache_scheme": 5},
        {"key": "compression_config"},
        "config.json",
        "compression_config.kv_cache_scheme",
    ),
    "mlx": ("mlx-4", {}, {"key": "quantization"}, "config.json", "quantization.bits"),
    "quantize_config.json": (
        "gptq-4",
        {},
        {"file": "quantize_config.json"},
        "quantize_config.json",
        "bits",
    ),
    "hf_quant_config.json": (
        "modelopt",
        {"quantization": {"quant_algo": "X"}},
        {"file": "hf_quant_config.json"},
        "hf_quant_config.json",
        "quantization.quant_algo",
    ),
    "while weights are read": (
        "gptq-4",
        {"group_size": 48, "bits": 4},
        {"file": "quantize_config.json"},
        "quantize_config.json",
        "group_size",
    ),
}


@pytest.mark.parametrize("where", WRONG_IN)
def test_a_wrong_setting_is_named_with_its_file(checkpoint, tmp_path, where):
    name, change, place, file, key = WRONG_IN[where]
    change = change or {"bits": 7}
    copy = changed_settings(checkpoint(name)[0], tmp_path, lambda s: s | change, **place)
    with pytest.raises(ConfigError, match=rf"^{file} of the checkpoint: {key} is "):
        load(copy)


def test_a_setting_of_the_file_beside_is_named_with_that_file(checkpoint, tmp_path):
    folder, _ = checkpoint("modelopt")
    copy = changed_settings(folder, tmp_path, lambda s: {"ignore": 5})
    beside = copy / "hf_quant_config.json"
    for algorithm, message in (
        ("X", "^hf_quant_config.json of the checkpoint: quantization.quant_algo is 'X'"),
        ("FP8", "^config.json of the checkpoint: quantization_config.ignore is 5"),
    ):
        beside.write_text(json.dumps(nested({"quant_algo": algorithm})))
        with pytest.raises(ConfigError, match=message):
            load(copy)


@pytest.mark.parametrize("has_lists", [False, True])
def test_modules_of_a_block_that_gptq_does_not_list_are_dense(tmp_path, has_lists):
    folder, dense = write("gptq-4", tmp_path, skipped=("mlp",))
    parts = [f"self_attn.{part}_proj" for part in "qkvo"]
    listed = {"modules_in_block_to_quantize": [parts[:3], parts[3:]] if has_lists else parts}

    def change(settings):
        return {k: v for k, v in settings.items() if k != "modules_to_not_convert"} | listed

    model = load(changed_settings(folder, tmp_path, change))
    twins = dict(load(dense).named_modules())
    for path, layer in model.named_modules():
        if isinstance(layer, ParallelLinear):
            found = layer.weight if ".mlp." in path else weight_of(layer)
            assert torch.equal(found, twins[path].weight), path


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "gptq-4",
            {"dynamic": {r"+:.*\.1\..*v_proj": {"bits": 8}}},
            r"q_proj, .*k_proj, .*v_proj .*the rule '\+:.*v_proj' is for "
            r"model.layers.1.self_attn.v_proj\); they run as one layer",
        ),
        ("gptq-4", {"dynamic": {"-:.*up_proj": {}}}, r"the rule '-:.*up_proj' is for .*up_proj"),
        ("ct-w4a16", {"ignore": ["re:.*v_proj"]}, r"leaves some of .*v_proj unquantized"),
    ],
)
def test_a_rule_for_one_part_of_a_layer_is_named(checkpoint, tmp_path, name, change, message):
    """Its pattern may also match the name of the fused layer, qkv_proj or gate_up_proj."""
    copy = changed_settings(checkpoint(name)[0], tmp_path, lambda s: s | change)
    with pytest.raises(ConfigError, match=message):
        load(copy)


@pytest.mark.parametrize(
    ("name", "key", "entries", "is_dense"),
    [
        # The rows of the fused layer are named by the layer's own name or by a pattern.
        ("ct-w4a16", "ignore", ["lm_head", "model.layers.1.self_attn.qkv_proj"], "qkv_proj"),
        ("ct-w4a16", "ignore", ["lm_head", "re:.*[.]1[.]mlp[.]gate_up_proj"], "gate_up_proj"),
        ("fp8-static", "ignored_layers", ["model.layers.1.mlp.gate_up_proj"], "gate_up_proj"),
        ("gptq-4", "dynamic", {r"-:model\.layers\.1\..*qkv_proj": {}}, "qkv_proj"),
        ("awq", "modules_to_not_convert", ["layers.1.self_attn.qkv_proj"], "qkv_proj"),
        (
            "modelopt",
            "exclude_modules",
            ["*router*", "*.1*gate_up*"],
            "gate_up_proj",
        ),
    ],
)
def test_a_layer_is_left_dense_by_the_name_of_the_fused_one(
    checkpoint, tmp_path, name, key, entries, is_dense
):
    folder, dense_folder = checkpoint(name)
    copy = changed_settings(folder, tmp_path, lambda s: s | {key: entries})
    tensors, dense = (load_file(each / "model.safetensors") for each in (copy, dense_folder))
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for part in parts[is_dense]:
        stem = next(k for k in dense if "layers.1." in k and part in k).removesuffix("weight")
        tensors = {k: t for k, t in tensors.items() if not k.startswith(stem)}
        tensors[f"{stem}weight"] = dense[f"{stem}weight"]
    save_file(tensors, copy / "model.safetensors")
    layers = dict(load(copy).named_modules())
    (layer,) = (m for p, m in layers.items() if "layers.1." in p and p.endswith(is_dense))
    assert torch.equal(
        layer.weight,
        dict(load(dense_folder).named_modules())[
            next(p for p, m in layers.items() if m is layer)
        ].weight,
    )


def test_renamed_experts_are_left_dense_by_their_names_in_the_checkpoint(tiny_model, tmp_path):
    """Mixtral's `w1` and `block_sparse_moe` have other names in this package."""
    folder, dense = write("ct-w8a16-channel", tmp_path, tiny_model("mixtral"), ("experts",))
    model = load(folder)
    experts = [layer for layer in model.modules() if isinstance(layer, Experts)]
    assert experts and not any(isinstance(each.method, StoredExperts) for each in experts)
    assert torch.equal(
        experts[0].gate_up,
        next(layer.gate_up for layer in load(dense).modules() if isinstance(layer, Experts)),
    )


def test_scales_of_queries_are_known_and_not_needed(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("fp8-static")[0], tmp_path / "scaled")
    tensors = load_file(folder / "model.safetensors")
    for name in ("q_scale", "attn.q_scale", "q_proj.q_scale", "prob_scale"):
        tensors[f"model.layers.0.self_attn.{name}"] = torch.tensor(0.5)
    save_file(tensors, folder / "model.safetensors")
    assert logits_of(load(folder), prompt_of(3)).isfinite().all()


def test_old_checkpoints_of_bitsandbytes_do_not_name_it(checkpoint, tmp_path):
    folder = checkpoint("bnb-int8")[0]
    old = changed_settings(folder, tmp_path, lambda s: {"load_in_8bit": True})
    assert torch.equal(*(logits_of(load(each), prompt_of(3)) for each in (old, folder)))


@pytest.mark.parametrize("keys", [("quantization",), ("quantization", "quantization_config")])
def test_checkpoints_of_mlx_do_not_name_it(checkpoint, tmp_path, keys):
    folder, dense = checkpoint("mlx-4")
    copy = shutil.copytree(folder, tmp_path / "mlx")
    config = json.loads((copy / "config.json").read_text())
    del config["quantization_config"]
    config |= {key: {"group_size": 32, "bits": 4} for key in keys}
    (copy / "config.json").write_text(json.dumps(config))
    twins = dict(load(dense).named_modules())
    layers = [(p, m) for p, m in load(copy).named_modules() if isinstance(m, ParallelLinear)]
    assert all(torch.equal(weight_of(layer), twins[path].weight) for path, layer in layers)


@pytest.mark.parametrize("is_tied", [True, False])
def test_embeddings_of_mlx_are_stored_as_layers_are(checkpoint, tmp_path, is_tied):
    """One layer has its own settings, and another one is dense."""
    folder, dense_folder = checkpoint("mlx-4")
    copy, twin = (shutil.copytree(each, tmp_path / each.name) for each in (folder, dense_folder))
    tensors, dense = (load_file(each / "model.safetensors") for each in (copy, twin))

    def store(name, bits):
        found = [key for key in tensors if key.startswith(f"{name}.")]
        for key in found:
            del tensors[key]
        tensors[f"{name}.weight"] = weight = dense[f"{name}.weight"]
        if bits is not None:
            parts, dense[f"{name}.weight"] = FORMATS[f"mlx-{bits}"].quantize(weight)
            tensors.update({f"{name}.{part}": values for part, values in parts.items()})

    other, plain = "model.layers.1.self_attn.o_proj", "model.layers.1.mlp.down_proj"
    for name, bits in (("model.embed_tokens", 4), (other, 5), (plain, None)):
        store(name, bits)
    for path, values in ((copy, tensors), (twin, dense)):
        config = json.loads((path / "config.json").read_text())
        config["tie_word_embeddings"] = is_tied
        if path == copy:
            config["quantization_config"] |= {other: {"group_size": 32, "bits": 5}, plain: False}
        if is_tied:
            del values["lm_head.weight"]
        (path / "config.json").write_text(json.dumps(config))
        save_file({key: each.contiguous() for key, each in values.items()}, path / FILE)
    got, want = load(copy), load(twin)
    ids = prompt_of(20)
    assert torch.equal(got.model.embed_tokens(ids), want.model.embed_tokens(ids))
    for name in (other, plain):
        packed = getattr(got.get_submodule(name), "weight", None)
        packed = weight_of(got.get_submodule(name)) if packed is None else packed
        assert torch.equal(packed, want.get_submodule(name).weight)
    logits, wanted = logits_of(got, ids), logits_of(want, ids)
    assert (logits - wanted).norm() < 0.2 * wanted.norm()


def test_auto_round_has_settings_of_single_layers(checkpoint, tmp_path):
    """Layers with 16 bits are dense, and the head is quantized if it has settings."""
    folder, dense_folder = checkpoint("gptq-4")
    dense = "model.layers.1.mlp.down_proj"
    extra = {dense: {"bits": 16, "data_type": "fp"}, "lm_head": {"bits": 4}}

    def change(settings):
        return auto_round("auto_round:auto_gptq")(settings) | {"extra_config": extra}

    copy = changed_settings(folder, tmp_path, change)
    tensors, twin = (load_file(each / "model.safetensors") for each in (copy, dense_folder))
    tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(dense)}
    tensors[f"{dense}.weight"] = twin[f"{dense}.weight"]
    parts, head = FORMATS["gptq-4"].quantize(tensors.pop("lm_head.weight"))
    tensors |= {f"lm_head.{part}": values.contiguous() for part, values in parts.items()}
    save_file(tensors, copy / "model.safetensors")
    model = load(copy)
    assert torch.equal(weight_of_head(model), head)
    assert torch.equal(model.get_submodule(dense).weight, twin[f"{dense}.weight"])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("packing_format", "auto_round", "packing_format is 'auto_round'; supported: auto_round:a"),
        (
            "backend",
            "itrex",
            "backend is 'itrex'; supported: auto_round:auto_gptq",
        ),
        ("data_type", "mx_fp4", "data_type is 'mx_fp4'; supported: int"),
        ("act_bits", 8, "act_bits is 8"),
        ("extra_config", ["lm_head"], "extra_config is "),
        ("sym", False, None),
    ],
)
def test_what_auto_round_may_say(checkpoint, tmp_path, key, value, message):
    folder, _ = checkpoint("gptq-4")
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 32, key: value}
    copy = changed_settings(folder, tmp_path, lambda s: settings)
    if message is None:
        assert logits_of(load(copy), prompt_of(3)).isfinite().all()
        return
    with pytest.raises(ConfigError, match=message):
        load(copy)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("nvfp4", "NVFP4 (W4A4, read as W4A16) and kept as NVFP4"),
        ("ct-mxfp4", "MXFP4 and kept as MXFP4"),
        ("bnb-nf4", "bitsandbytes nf4 and kept as 4 bits with a table"),
        ("mlx-4", "MLX affine, 4 bits and kept as numbers of 4 bits with minimums"),
    ],
)
def test_the_log_says_what_layers_are_kept_as(checkpoint, monkeypatch, name, stored):
    if load_cpu_kernels() is None:
        pytest.skip("the kernels are not built")
    replace_ops(monkeypatch, CPUOps())
    with captured_log() as messages:
        load(checkpoint(name)[0])
    stored, kept = stored.rsplit(" and kept as ", 1)
    line = f"8 layers: stored as {stored} in the checkpoint, kept as {kept} in memory (0.1 MiB)"
    assert line in messages


def test_the_log_says_what_dense_layers_have_become(checkpoint, monkeypatch):
    if load_cpu_kernels() is None:
        pytest.skip("the kernels are not built")
    replace_ops(monkeypatch, CPUOps())
    config = make_config(checkpoint("bnb-nf4")[1], "bfloat16")
    config = replace(config, model=replace(config.model, quantization="bitsandbytes"))
    with captured_log() as messages:
        load_model(config, TPGroup(), torch.device("cpu"))
    stored = "8 layers: stored as bfloat16 in the checkpoint, kept as 4 bits with a table"
    assert stored in "\n".join(messages)
