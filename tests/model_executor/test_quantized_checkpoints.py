"""Test checkpoints of each quantized format: the loaded weights, and refused checkpoints."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model_executor.helpers import load, logits_of, prompt_of
from tests.quantized_checkpoints import FORMATS, each_format, made_once, write
from tests.reach import replace_ops
from vllm.distributed import TPGroup
from vllm.errors import ConfigError, WeightLoadError
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.layers.linear import ParallelLinear
from vllm.model_executor.layers.stored.stored_experts import StoredExperts
from vllm.ops.cpu.operators import CPUOps, load_cpu_kernels
from vllm.ops.native.operators import NativeOps
from vllm.transformers_utils.hf_config import read_hf_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return made_once(tmp_path_factory.mktemp("quantized"))


@pytest.fixture(params=["cpu", "native"])
def ops(request, monkeypatch):
    if request.param == "cpu" and load_cpu_kernels() is None:
        pytest.skip("the kernels are not built")
    replace_ops(monkeypatch, CPUOps() if request.param == "cpu" else NativeOps())
    return request.param


def weight_of(layer):
    """Return the weight [out, in] in float32, as the layer multiplies with it."""
    packed = layer.method.packed
    if hasattr(packed, "rows"):
        return packed.rows(torch.arange(packed.out_features), torch.float32)
    return packed.weight


@pytest.mark.parametrize("name", each_format())
def test_weights_are_those_of_the_format_bit_for_bit(checkpoint, ops, name):
    folder, dense_folder = checkpoint(name)
    model, dense = load(folder), load(dense_folder)
    twins = dict(dense.named_modules())
    num_compared = 0
    for path, layer in model.named_modules():
        if isinstance(layer, ParallelLinear) and not hasattr(layer, "weight"):
            FORMATS[name].check(weight_of(layer), twins[path].weight, path)
            num_compared += 1
    assert num_compared == (6 if FORMATS[name].skipped else 8)
    got, want = (logits_of(each, prompt_of(20)) for each in (model, dense))
    rounds = FORMATS[name].is_rounding_inputs and ops == "cpu"
    # Random zero points make large sums that cancel each other, so the tolerance is higher.
    assert_close(name, got, want, rounds=rounds, most=2e-4)


def assert_close(name, got, want, *, rounds, most):
    if rounds or FORMATS[name].rounding:
        assert (got - want).norm() < 0.2 * want.norm()
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=most)


@pytest.mark.parametrize(
    "name",
    [
        *("fp8-block", "gptq-4", "ct-w4a16-asym-order", "nvfp4", "bnb-nf4"),
        *("mxfp8", "bnb-int8", "awq-gemv", "mlx-4", "hqq-4", "torchao-int4"),
    ],
)
def test_a_format_takes_dummy_weights(checkpoint, ops, name):
    model = load(checkpoint(name)[0], load_format="dummy")
    assert logits_of(model, prompt_of(3)).isfinite().all()


@pytest.mark.parametrize(
    "name", ["fp8-static", "fp8-block", "gptq-4-rows", "ct-w8a16-channel", "nvfp4", "bnb-nf4"]
)
def test_experts_are_those_of_the_format(tiny_model, tmp_path, ops, name):
    """The weights of experts can only be observed by their outputs, so logits are compared."""
    folders = write(name, tmp_path, tiny_model("qwen3_moe"))
    quantized, dense = (load(folder) for folder in folders)
    experts = [layer for layer in quantized.modules() if isinstance(layer, Experts)]
    assert experts and all(isinstance(layer.method, StoredExperts) for layer in experts)
    assert all((layer.method.packed is None) == (ops == "native") for layer in experts)
    got, want = (logits_of(model, prompt_of(20)) for model in (quantized, dense))
    rounds = FORMATS[name].is_rounding_inputs and ops == "cpu"
    assert_close(name, got, want, rounds=rounds, most=1e-3)


def test_deepseek_in_blocks_of_fp8(tiny_model, tmp_path, ops):
    """Like the published DeepSeek-V3, the model has compressed queries and keys, and experts."""
    folders = write("fp8-block", tmp_path, tiny_model("deepseek_v3"))
    quantized, dense = (load(folder) for folder in folders)
    linears = [layer for layer in quantized.modules() if isinstance(layer, ParallelLinear)]
    routers = [layer for layer in linears if hasattr(layer, "weight")]
    assert routers and all(layer.keeps_precision for layer in routers)
    got, want = (logits_of(each, prompt_of(20)) for each in (quantized, dense))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)


def test_words_on_several_ranks_are_refused(checkpoint):
    message = "3 bits: 16 features of .*o_proj do not fill whole 32-bit words"
    with pytest.raises((ConfigError, WeightLoadError), match=message):
        load(checkpoint("gptq-3")[0], TPGroup(0, 4))


@pytest.fixture(scope="module")
def with_head(tmp_path_factory):
    return made_once(tmp_path_factory.mktemp("heads"), stores_head=True)


HEADS = [
    *("gptq-4", "gptq-8", "awq-symmetric", "ct-w4a16", "ct-w8a8", "ct-fp8-static"),
    *("fp8-static", "fp8-block", "fp8-channel-ignored", "modelopt"),
    *("nvfp4", "bnb-nf4", "mlx-8", "hqq-4", "torchao-int4"),
]


@pytest.mark.parametrize("name", HEADS)
def test_an_output_head_may_be_quantized(with_head, ops, name):
    folder, dense_folder = with_head(name)
    model, twin = load(folder), load(dense_folder)
    FORMATS[name].check(weight_of_head(model), twin.lm_head.weight)
    got, want = (logits_of(each, prompt_of(20)) for each in (model, twin))
    rounds = FORMATS[name].is_rounding_inputs and ops == "cpu"
    assert_close(name, got, want, rounds=rounds, most=1e-3)
    if name != "fp8-block":  # layers of fp8-block cannot be divided between ranks here
        part = load(folder, TPGroup(1, 2))
        assert torch.equal(weight_of_head(part), weight_of_head(model)[2048:])


def test_a_rank_has_its_part_of_a_head_in_blocks(tmp_path, ops):
    layers = ("model.layers",)
    folder, dense = write("fp8-block", tmp_path, skipped=layers, stores_head=True)
    part = load(folder, TPGroup(1, 2))
    assert torch.equal(weight_of_head(part), load(dense).lm_head.weight[2048:])


def test_a_head_without_its_scales_is_refused(with_head, tmp_path):
    folder = shutil.copytree(with_head("fp8-static")[0], tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight_scale"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightLoadError, match=r"lm_head.weight .* float8_e4m3fn .* lack its scale"):
        load(folder)


def weight_of_head(model):
    packed = model.lm_head.method.linear.packed
    if hasattr(packed, "rows"):
        return packed.rows(torch.arange(packed.out_features), torch.float32)
    return packed.weight


def test_act_order_that_the_settings_do_not_name_is_refused_on_several_ranks(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("gptq-4-order")[0], tmp_path / "order")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["desc_act"] = False
    (folder / "config.json").write_text(json.dumps(config))
    assert logits_of(load(folder), prompt_of(3)).isfinite().all()
    with pytest.raises(ConfigError, match=r"_proj are ordered .*desc_act is not true"):
        load(folder, TPGroup(0, 2))


@pytest.mark.parametrize("name", ["gptq-4", "gptq-4-rows"])
def test_checkpoints_of_old_versions_of_autogptq(checkpoint, tmp_path, name):
    """They have no g_idx, biases of zeros, and settings in a separate file."""
    folder, _ = checkpoint(name)
    old = shutil.copytree(folder, tmp_path / name)
    config = json.loads((old / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (old / "config.json").write_text(json.dumps(config))
    (old / "quantize_config.json").write_text(json.dumps(settings))
    tensors = load_file(old / "model.safetensors")
    for key in [key for key in tensors if key.endswith(".g_idx")]:
        stem = key.removesuffix(".g_idx")
        del tensors[key]
        tensors[f"{stem}.bias"] = torch.zeros(tensors[f"{stem}.qweight"].shape[1])
    save_file(tensors, old / "model.safetensors")
    assert read_hf_config(old, {})["quantization_config"] == settings | {"quant_method": "gptq"}
    config["quantization_config"] = settings | {"quant_method": "gptq"}
    (old / "config.json").write_text(json.dumps(config))
    for tp in (TPGroup(), TPGroup(1, 2)):
        got, want = (dict(load(each, tp).named_modules()) for each in (old, folder))
        for path, layer in want.items():
            if isinstance(layer, ParallelLinear):
                assert torch.equal(weight_of(got[path]), weight_of(layer)), path
    tensors[f"{GATE}.bias"][3] = 1
    save_file(tensors, old / "model.safetensors")
    with pytest.raises(WeightLoadError, match=rf"1 tensors unknown .*{GATE}\.bias"):
        load(old)


CONFIG = "^config.json of the checkpoint: quantization_config."
GATE = "model.layers.1.mlp.gate_proj"


def changed(*path, to):
    """Return a function that changes `quantization_config`."""

    def change(settings, tensors):
        for key in path[:-1]:
            settings = settings[key]
        settings[path[-1]] = to

    return change


def filled(tensor, value):
    """Return a function that changes the first value of a tensor."""

    def change(settings, tensors):
        tensors[f"{GATE}.{tensor}"].flatten()[0] = value

    return change


def rolled(tensor):
    def change(settings, tensors):
        tensors[f"{GATE}.{tensor}"] = tensors[f"{GATE}.{tensor}"].roll(1)

    return change


def reshaped(tensor, *shape):
    def change(settings, tensors):
        tensors[f"{GATE}.{tensor}"] = tensors[f"{GATE}.{tensor}"].reshape(*shape)

    return change


def one_number(tensor):
    def change(settings, tensors):
        tensors[f"{GATE}.{tensor}"] = tensors[f"{GATE}.{tensor}"].flatten()[:1]

    return change


def without(tensor):
    def change(settings, tensors):
        del tensors[f"{GATE}.{tensor}"]

    return change


def cast(tensor, dtype):
    def change(settings, tensors):
        tensors[f"{GATE}.{tensor}"] = tensors[f"{GATE}.{tensor}"].to(dtype)

    return change


def replaced(tensor, values):
    def change(settings, tensors):
        tensors[f"{GATE}.{tensor}"] = values

    return change


def other_state(settings, tensors):
    name = f"{GATE}.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[name].tolist())) | {"blocksize": 96}
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


QUARK = ("global_quant_config", "weight")
HQQ = ("quant_config", "weight_quant_params")
PARAMS = "quant_config.weight_quant_params"
AO = ("quant_type", "default")
AO_DATA = (*AO, "_data")
ZERO = "the scales of .*gate_up_proj .* are 0, but its values are not"
WEIGHTS = ("config_groups", "group_0", "weights")
INPUTS = ("config_groups", "group_0", "input_activations")

WRONG = [
    ("fp8-static", changed("activation_scheme", to="x"), CONFIG + "activation_scheme is 'x'"),
    ("fp8-block", changed("activation_scheme", to="static"), "activation_scheme is 'static'"),
    ("fp8-block", changed("weight_block_size", to=[0, 128]), "weight_block_size is .0, 128."),
    (
        "fp8-block",
        changed("weight_block_size", to=[64, 64]),
        r"down_proj.weight_scale_inv has shape \[1, 2\]",
    ),
    (
        "fp8-block",
        filled("weight_scale_inv", 0.0),
        ZERO,
    ),
    ("fp8-static", filled("weight_scale", float("nan")), f"tensor {GATE}.weight_scale .* nan"),
    ("fp8-static", filled("weight", float("nan")), "gate_up_proj in the checkpoint contains NaN"),
    ("fp8-static", without("input_scale"), f"1 tensors missing .*{GATE}.input_scale"),
    ("fp8-static", changed("ignored_layers", to=["q_proj"]), "leaves some of .*self_attn.q_proj"),
    ("fp8-static", changed("ignored_layers", to="lm_head"), "ignored_layers is 'lm_head'"),
    ("modelopt", changed("quant_algo", to="W4A8"), "quant_algo is 'W4A8'; supported: FP8, .*NVFP4"),
    ("modelopt", changed("quant_algo", to="NVFP4"), "weight_scale has the dtype float32 .* float8"),
    ("nvfp4", changed("group_size", to=32), CONFIG + "group_size is 32; supported: 16"),
    ("nvfp4", changed("kv_cache_quant_algo", to="NVFP4"), "kv_cache_quant_algo is 'NVFP4'"),
    ("nvfp4", without("weight_scale"), f"1 tensors missing .*{GATE}.weight_scale"),
    ("nvfp4", without("weight_scale_2"), f"1 tensors missing .*{GATE}.weight_scale_2"),
    ("nvfp4", filled("weight_scale", -1.0), "weight_scale contains NaN or negative scales"),
    ("nvfp4", filled("weight_scale_2", 0.0), "weight_scale_2 contains a factor that is not a pos"),
    (
        "nvfp4",
        reshaped("weight_scale", -1, 2),
        r"weight_scale has shape \[384, 2\] .* needs \[192, 4\]: a value for each 16 of its 64",
    ),
    ("nvfp4", changed("quant_algo", to="MXFP4"), "group_size is 16; supported: 32"),
    ("nvfp4", changed("quant_algo", to="MIXED_PRECISION"), "quantized_layers is None; supported"),
    ("mxfp4", filled("weight_scale", 255), "weight_scale contains 255, which is NaN"),
    ("mxfp8", filled("weight", float("nan")), "gate_up_proj in the checkpoint contains NaN"),
    ("ct-nvfp4", changed(*WEIGHTS, "group_size", to=32), "weights.group_size is 32; supported: 16"),
    ("bnb-nf4", changed("bnb_4bit_quant_type", to="nf2"), "quant_type is 'nf2'; supported: nf4"),
    (
        "bnb-nf4",
        changed("bnb_4bit_quant_type", to="fp4"),
        "missing .*bitsandbytes__fp4",
    ),
    ("bnb-nf4", changed("load_in_4bit", to=False), "load_in_4bit is False; supported: true, or lo"),
    ("bnb-nf4", changed("bnb_4bit_use_double_quant", to=False), "uint8 .* must be float32"),
    ("bnb-nf4", without("weight.nested_absmax"), f"missing .*{GATE}.weight.nested_absmax"),
    ("bnb-nf4", without("weight.absmax"), "leaves some of .*mlp.gate_proj"),
    ("bnb-nf4", one_number("weight.absmax"), r"absmax has shape \[1\] .* needs 192 elements"),
    ("bnb-nf4", filled("weight.quant_map", float("nan")), "quant_map contains NaN or infinity"),
    (
        "bnb-nf4",
        filled("weight.quant_state.bitsandbytes__nf4", 65),
        "bitsandbytes__nf4 is not a JSON object",
    ),
    ("bnb-nf4", other_state, "describes .*'blocksize': 96.* needs .*'blocksize': 64"),
    ("bnb-int8", filled("SCB", float("inf")), f"{GATE}.SCB contains inf"),
    (
        "bnb-int8",
        replaced("weight_format", torch.tensor(1, dtype=torch.uint8)),
        "a layout that is not row",
    ),
    ("ct-nvfp4", without("weight_global_scale"), f"missing .*{GATE}.weight_global_scale"),
    ("gptq-4", changed("bits", to=5), CONFIG + "bits is 5; supported: 2, 3, 4, 8"),
    ("gptq-4", changed("bits", to=True), "bits is True"),
    ("gptq-4", changed("bits", to=8), r"qweight has shape \[24, 64\] .* needs \[48, 64\]"),
    ("gptq-4", changed("group_size", to=64), r"g_idx .* from 0 to 5; .* each of 3 groups 64 times"),
    ("awq", changed("group_size", to=64), r"qzeros has shape \[6, 8\] .* needs \[3, 8\]"),
    ("gptq-4", changed("group_size", to=48), "group_size is 48, which does not divide the 64"),
    ("gptq-4", changed("group_size", to=0), "group_size is 0"),
    ("gptq-4", changed("group_size", to=10**30), "group_size is 1000"),
    ("gptq-4", changed("checkpoint_format", to="marlin"), "is 'marlin'; .* was made"),
    ("gptq-4", changed("dynamic", to={"(": {}}), "dynamic is '\\('"),
    ("gptq-4", changed("dynamic", to={"+:a{" + "9" * 30 + "}": {}}), "dynamic is .* too large"),
    ("gptq-4", filled("scales", float("inf")), f"tensor {GATE}.scales contains inf"),
    ("gptq-4-order", filled("g_idx", 9), f"{GATE}.g_idx has .* to 9; .* each of 2 groups 32 times"),
    ("gptq-4-order", filled("g_idx", -1), f"{GATE}.g_idx has group indices from -1 to 1"),
    ("gptq-4-order", without("g_idx"), f"missing from the checkpoint: {GATE}.g_idx"),
    ("gptq-4-order", rolled("g_idx"), "gate_up_proj have different g_idx"),
    (
        "ct-w4a16-asym-order",
        reshaped("weight_g_idx", 2, 32),
        "g_idx has shape .2, 32., but it must have one dimension",
    ),
    ("gptq-4", without("qzeros"), f"missing from the checkpoint: {GATE}.qzeros"),
    ("gptq-4", filled("scales", 0.0), ZERO),
    ("gptq-4", filled("scales", -1.0), f"tensor {GATE}.scales contains -1.0: scales are positive"),
    (
        "gptq-4",
        filled("qzeros", 0),
        r"zero points of .* from 1 to 8, but must be 8 by .*config.sym",
    ),
    (
        "gptq-4",
        changed("checkpoint_format", to="gptq_v2"),
        "from 7 to 7, but must be 8 .* or checkpoint_f",
    ),
    ("gptq-4", changed("sym", to="yes"), CONFIG + "sym is 'yes'; supported: True, False"),
    ("gptq-4", cast("qweight", torch.float32), "qweight has the dtype float32 .* must be int32"),
    ("gptq-4", cast("scales", torch.int32), "scales has the dtype int32 .* must be float32 or"),
    ("gptq-4", cast("g_idx", torch.float32), "g_idx has the dtype float32"),
    ("fp8-static", cast("weight", torch.uint8), "dtype uint8 .* must be float8_e4m3fn"),
    ("fp8-static", cast("weight", torch.float8_e5m2), "dtype float8_e5m2 .* must be float8_e4m3fn"),
    ("fp8-block", cast("weight", torch.float32), f"tensor {GATE}.weight has the dtype float32"),
    ("fp8-static", filled("input_scale", 0.0), f"tensor {GATE}.input_scale contains 0.0"),
    (
        "fp8-block",
        changed("ignored_layers", to=["layers.1.mlp"]),
        "weight has the dtype float8_e4m3fn .* the layer is not quantized",
    ),
    ("awq", filled("scales", 0.0), ZERO),
    ("ct-w8a8", filled("weight_scale", 0.0), ZERO),
    ("ct-w8a8", cast("weight", torch.float32), "weight has the dtype float32 .* must be int8"),
    ("ct-w4a16", filled("weight_scale", 0.0), ZERO),
    ("awq", changed("version", to="gemv_fast"), "version is 'gemv_fast'; supported: gemm, gemv"),
    ("awq", changed("version", to="gemv"), r"qweight has shape .* needs \["),
    ("awq-gemv", one_number("scales"), "scales has values of .1. groups .* needs 2 for each out"),
    ("awq-gemv", filled("scales", 0.0), ZERO),
    (
        "awq-gemv",
        changed("zero_point", to=False),
        "zero points .* from 1 to 15, but must be 8 .*zero_poi",
    ),
    (
        "hqq-4",
        changed(*HQQ, "axis", to=2),
        f"{PARAMS}.axis is 2; supported: 1, 0",
    ),
    (
        "hqq-4",
        changed(*HQQ, "axis", to=0),
        r"W_q has shape \[96, 64\] .* needs \[32, 192\]",
    ),
    (
        "hqq-4",
        changed(*HQQ, "nbits", to=5),
        f"{PARAMS}.nbits is 5; supported: 1, 2,",
    ),
    (
        "hqq-4",
        changed(*HQQ, "group_size", to=None),
        f"{PARAMS}.group_size is None; supp",
    ),
    ("hqq-4", changed("quant_config", to=None), "quant_config is None; supported: an object"),
    (
        "hqq-4",
        changed("quant_config", "scale_quant_params", to={"nbits": 8}),
        "scale_quant_params is .* supported: null",
    ),
    (
        "hqq-4",
        changed(*HQQ, "nbits", to=8),
        "W_q has shape .* 2 values|1 values in each",
    ),
    ("hqq-4", without("zero"), f"missing .*{GATE}.zero"),
    ("hqq-4", filled("scale", float("nan")), "scale contains NaN or infinity"),
    ("hqq-4", one_number("scale"), r"scale has shape \[1\] .* needs 192 elements"),
    (
        "torchao-int4",
        changed(*AO, "_type", to="Int4WeightOnlyConfig"),
        "int4_packing_format is None; supported: TILE_PACKED_TO_4D",
    ),
    (
        "torchao-int4-tiles",
        changed(*AO_DATA, "int4_packing_format", to="PLAIN"),
        "int4_packing_format is 'PLAIN'; supported: TILE_PACKED_TO_4D",
    ),
    (
        "torchao-int4-tiles",
        changed(*AO_DATA, "group_size", to=48),
        "group_size is 48; supported: 32",
    ),
    (
        "torchao-int4-tiles",
        replaced("_weight_qdata", torch.zeros(2, 8, 32, 4, dtype=torch.int32)),
        r"_weight_qdata has shape \[2, 8, 32, 4\] .* needs \[24, 8, 32, 4\]",
    ),
    (
        "torchao-int4-tiles",
        filled("_weight_scale_and_zero", float("nan")),
        "scale_and_zero contains NaN or infinity",
    ),
    ("torchao-int4", changed("quant_type", to="int4_weight_only"), "'int4_weight_only'; supported"),
    (
        "torchao-int4",
        changed(*AO_DATA, "weight_dtype", to="uint4"),
        "dtype is 'uint4'; sup",
    ),
    ("torchao-int4", changed(*AO_DATA, "granularity", to=None), "granularity is None; supported"),
    ("torchao-int4", changed(*AO_DATA, "intx_packing_format", to="x"), "packing_format is 'x'"),
    ("torchao-int4", filled("_weight_scale", 0.0), ZERO),
    ("torchao-int8", without("_weight_scale"), f"missing .*{GATE}._weight_scale"),
    ("torchao-int8", changed(*AO_DATA, "group_size", to=32), "group_size is 32; supported: None"),
    ("torchao-fp8", filled("_weight_qdata", float("nan")), "gate_up_proj in the checkpoint .* NaN"),
    ("ct-sparse", filled("bitmask", 255), "bitmask of .* does not have two elements in each four"),
    ("ct-sparse", without("bitmask"), "leaves some of .*mlp.gate_proj"),
    ("ct-sparse-fp8", without("weight_scale"), f"missing .*{GATE}.weight_scale"),
    ("ct-sparse-fp8", changed("format", to="nvfp4-pack-quantized"), "num_bits is 8; supported: 4"),
    ("mlx-4", changed("bits", to=7), CONFIG + "bits is 7; supported: 2, 3, 4, 5, 6, 8"),
    ("mlx-4", changed("bits", to=8), r"weight has shape \[64, 24\] .* needs \[64, 48\]"),
    ("mlx-4", changed("group_size", to=64), "64, 6. .* needs .64, 3.: a value for each 64 of"),
    ("mlx-4", changed("group_size", to=128), "groups of 128 inputs, which do not divide the 64"),
    ("mlx-4", changed("group_size", to=0), CONFIG + "group_size is 0; supported: 16, 32"),
    ("mlx-4", changed("mode", to="nf4"), "mode is 'nf4'; supported: affine, mxfp4"),
    ("mlx-4", without("biases"), f"missing .*{GATE}.biases"),
    ("mlx-4", without("scales"), "leaves some of .*mlp.gate_proj"),
    ("mlx-4", filled("biases", float("inf")), "biases contains NaN or infinity"),
    ("mlx-mxfp4", changed("group_size", to=64), "group_size is 64; supported: 32"),
    ("awq", changed("bits", to=8), "bits is 8; supported: 4"),
    ("awq", changed("quant_method", to="exl2"), "'exl2', .* GPTQ or AWQ checkpoint"),
    (
        "awq",
        changed("quant_method", to="marlin"),
        "'marlin', .* GPTQ checkpoint from which it was made",
    ),
    ("awq", changed("quant_method", to="quark"), "global_quant_config is None; supported: an obj"),
    (
        "quark-int4",
        changed(*QUARK, "dtype", to="int3"),
        "weight.dtype is 'int3'; supported: fp8_e4",
    ),
    ("quark-int4", changed(*QUARK, "qscheme", to="per_channel"), "qscheme is 'per_channel'; supp"),
    (
        "quark-int4",
        changed("export", "pack_method", to="order"),
        "pack_method is 'order'; supported",
    ),
    ("quark-int4", changed("algo_config", to=[{"name": "rotation"}]), "name is 'rotation'; supp"),
    ("quark-int4", changed("layer_type_quant_config", to={"x": {}}), "layer_type_quant_config is"),
    ("quark-int4", without("weight_zero_point"), f"missing .*{GATE}.weight_zero_point"),
    ("quark-mxfp4", changed(*QUARK, "group_size", to=16), "group_size is 16; supported: 32"),
    ("quark-mxfp4", filled("weight_scale", 255), "weight_scale contains 255, which is NaN"),
    ("quark-int8", changed(*QUARK, "symmetric", to=False), "symmetric is False; supported: True"),
    ("quark-int8", filled("weight_scale", 0.0), ZERO),
    ("awq", changed("zero_point", to=0), "zero_point is 0; supported: True, False"),
    (
        "awq",
        changed("zero_point", to=False),
        "zero points .* from 1 to 15, but must be 8 .*zero_point in",
    ),
    (
        "awq-symmetric",
        changed("zero_point", to=True),
        r"missing from the checkpoint: .*layers\.0\.mlp\.down_proj\.qzeros",
    ),
    ("gptq-4", changed("is_marlin_format", to=True), "is_marlin_format is True; .* was made"),
    ("gptq-4", changed("quant_method", to=None), "an object with the string quant_method"),
    ("gptq-4", changed("quant_method", to="vptq"), "'vptq', .*--quantization int4"),
    ("gptq-4", changed("quant_method", to="exl3"), "'exl3', .* GPTQ or AWQ checkpoint"),
    ("gptq-4", changed("quant_method", to="inc"), "'inc', .* --quantization inc and the QUANT"),
    ("ct-w4a16", changed("sparsity_config", to={"format": "sparse-24"}), "sparsity_config is "),
    ("ct-w8a8", changed("kv_cache_scheme", to={"type": "int"}), "kv_cache_scheme.type is 'int'"),
    ("ct-w8a8", changed("kv_cache_scheme", to={"num_bits": 4}), "kv_cache_scheme.num_bits is 4"),
    ("modelopt", changed("kv_cache_quant_algo", to="INT8"), "kv_cache_quant_algo is 'INT8'"),
    ("ct-w4a16", changed(*WEIGHTS, "num_bits", to=3), "num_bits is 3; supported: 4, 8"),
    (
        "ct-w4a16",
        changed("config_groups", to=[]),
        "config_groups is ",
    ),
    ("ct-w4a16", changed("ignore", to=["re:("]), "ignore is 're:\\('"),
    ("ct-w4a16", changed("ignore", to=["re:" + "(" * 3000]), "groups are nested too deeply"),
    (
        "ct-w4a16",
        changed(*WEIGHTS[:2], "targets", to=["re:*"]),
        "config_groups.targets is .*nothing to repeat",
    ),
    ("ct-w4a16", changed("format", to="marlin-24"), "'marlin-24'; supported: pack-quantized, of"),
    ("ct-w4a16", filled("weight_shape", 7), "weight_shape of gate_proj .* needs .192, 64."),
    ("ct-w4a16", filled("weight_scale", float("nan")), "weight_scale contains nan"),
    (
        "ct-w4a16",
        one_number("weight_scale"),
        r"weight_scale has shape \[1, 1\] .* needs \[192, 2\]",
    ),
    ("ct-w8a8", reshaped("weight_scale", -1, 2), f"tensor {GATE}.weight_scale has shape .96, 2."),
    ("ct-fp8-static", changed(*WEIGHTS, "type", to="int"), "type is 'int'"),
    ("ct-w8a8", changed(*INPUTS, to="int8"), "config_groups.input_activations is 'int8'"),
    ("ct-w8a8", changed(*INPUTS, "type", to="float"), "type is 'float'; supported: int"),
    ("ct-w8a8", changed(*INPUTS, "strategy", to="x"), "strategy is 'x'; supported: token"),
    ("ct-w8a8", filled("weight_scale", 1e30), "weight_scale contains 1.* of at most 65504"),
    ("fp8-block", filled("weight_scale_inv", 1e30), "weight_scale_inv contains 1.* of at most"),
    ("modelopt", changed("ignore", to=0), "ignore is 0; supported: a list"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG)
def test_a_wrong_file_is_refused_with_its_key(checkpoint, tmp_path, name, change, message):
    folder = shutil.copytree(checkpoint(name)[0], tmp_path / name)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config["quantization_config"], tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises((ConfigError, WeightLoadError), match=message) as error:
        load(folder)
    assert "\n" not in str(error.value)
    if isinstance(error.value, WeightLoadError) and "do not match" not in str(error.value):
        assert str(error.value).startswith(f"{folder / 'model.safetensors'}: ")


@pytest.mark.parametrize("name", ["gptq-4-rows", "awq", "ct-w8a8", "fp8-block"])
def test_the_scale_of_weights_that_are_all_zero_may_be_zero(checkpoint, tmp_path, ops, name):
    """This is the scale of quantizers that divide the largest value by the range."""
    folder = shutil.copytree(checkpoint(name)[0], tmp_path / name)
    tensors = load_file(folder / "model.safetensors")
    scales = next(
        x for x in ("scales", "weight_scale", "weight_scale_inv") if f"{GATE}.{x}" in tensors
    )
    tensors[f"{GATE}.{scales}"].zero_()
    if "q" in name:
        tensors[f"{GATE}.qweight"].zero_()
        tensors[f"{GATE}.qzeros"].zero_()
        if "gptq" in name:  # the first GPTQ format stores zero points minus one
            tensors[f"{GATE}.qweight"].fill_(0x11111111)
    else:
        tensors[f"{GATE}.weight"].zero_()
    save_file(tensors, folder / "model.safetensors")
    gate_up = dict(load(folder).named_modules())["model.layers.1.mlp.gate_up_proj"]
    assert not weight_of(gate_up)[:192].any()
    assert weight_of(gate_up)[192:].any()
