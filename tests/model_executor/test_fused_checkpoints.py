"""Test quantized checkpoints with one layer for several of ours, such as for query, key and value.

The parts of the stored tensors must give the parts of the dequantized weight.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.test_remote_code_families import CHATGLM, FAMILIES, chatglm
from tests.model_executor.helpers import load, weights_of
from tests.quantized_checkpoints import FORMATS as CHECKPOINTS
from tests.quantized_checkpoints import write
from tests.reach import replace_ops
from tests.tiny_models import make_tiny_model
from vllm.distributed import TPGroup
from vllm.errors import ConfigError, WeightLoadError
from vllm.ops.native.operators import NativeOps

WIDE = {"intermediate_size": 192}
MIXER = ("x_proj", "dt_proj")
_DELTA_NET = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
TABLE = {
    # Family -> (values of its config, layers that stay dense).
    "phi3": (WIDE, ()),
    "glm": (WIDE, ()),
    "glm4": (WIDE, ()),
    "gpt2": ({}, ()),
    "gpt_bigcode": ({}, ()),
    "gpt_bigcode_multi_head": ({}, ()),
    "gpt_neox": (WIDE, ()),
    "falcon_7b": ({}, ()),
    "falcon_40b": ({}, ()),
    "falcon_rw": ({}, ()),
    "bloom": ({}, ()),
    "mpt": ({}, ()),
    "mamba": ({}, MIXER),
    "mamba2": ({}, ()),
    "bamba": (WIDE, ()),
    "falcon_h1": (WIDE, ()),
    "jamba": (WIDE | {"num_hidden_layers": 3}, MIXER),
    "lfm2": (WIDE | {"block_auto_adjust_ff_dim": False, "num_hidden_layers": 3}, ()),
    "nemotron_h": (
        WIDE | {"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 96},
        (),
    ),
    "granite_hybrid_dense": ({"shared_intermediate_size": 96, "num_hidden_layers": 4}, ()),
    "qwen3_next": (WIDE | _DELTA_NET, ()),
    "qwen3_5": (WIDE | _DELTA_NET, ("in_proj_b", "in_proj_a")),
    "deepseek_v3": (
        WIDE
        | {"q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 24, "moe_intermediate_size": 64},
        (),
    ),
    "glm4_moe": (WIDE | {"moe_intermediate_size": 64}, ()),
    "minimax_m2": ({"intermediate_size": 64}, ()),
    "ernie4_5_moe": (WIDE | {"moe_intermediate_size": 64}, ()),
    "hunyuan_moe": ({"intermediate_size": 64}, ("gate.wg",)),
    "InternLM2ForCausalLM": (WIDE, ()),
    "BaichuanForCausalLM": (WIDE, ()),
    "ChatGLMModel": (WIDE, ()),
}
FORMATS = (
    *("fp8-static", "fp8-block", "ct-fp8-dynamic", "gptq-4", "gptq-4-order", "gptq-8", "awq"),
    *("ct-w4a16-asym-order", "ct-w8a16-channel", "ct-w8a8-static", "ct-fp8-block"),
)
BY_ROWS = ("nvfp4", "mxfp8", "bnb-nf4", "bnb-int8", "awq-gemv", "mlx-4", "hqq-3", "torchao-int4")
BY_ROWS += ("torchao-int4-tiles", "hqq-4-axis-0")
"""Formats whose tensors all have a row for each output feature."""
FEW: dict[str, tuple[str, ...]] = {
    "phi3": FORMATS + BY_ROWS,
    "falcon_40b": ("fp8-static", "fp8-block", "gptq-4-order", "gptq-8", "awq"),
    "deepseek_v3": ("fp8-block", "awq"),
    "glm4_moe": ("ct-fp8-dynamic",),
    "minimax_m2": ("fp8-block",),
    "ernie4_5_moe": (),
    "hunyuan_moe": (),
    **dict.fromkeys(("falcon_h1", "jamba", "lfm2"), ()),
    "nemotron_h": ("fp8-static",),
}
"""Formats that are not left to the exhaustive run; of other families one of each layout."""
SOME = ("fp8-block", "gptq-4-order", "awq", "ct-w4a16-asym-order")


def dense_checkpoint(family, folder):
    values, _ = TABLE[family]
    if family in FAMILIES:
        base, config, store = FAMILIES[family]
        make_tiny_model("llama", folder, **({"num_hidden_layers": 2} | base | values))
        known = json.loads((folder / "config.json").read_text()) | config | values
        known["architectures"] = [family]
    elif family == "ChatGLMModel":
        make_tiny_model("glm", folder, **values)
        known, store = CHATGLM | {"ffn_hidden_size": values["intermediate_size"]}, chatglm
    else:
        return make_tiny_model(family, folder, **({"num_hidden_layers": 2} | values))
    (folder / "config.json").write_text(json.dumps(known))
    save_file(store(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family) / "made"
            made[family] = dense_checkpoint(family, folder)
        return made[family]

    return get


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(
            *(family, name),
            marks=[] if name in FEW.get(family, SOME) else pytest.mark.exhaustive,
        )
        for family in TABLE
        for name in FORMATS + BY_ROWS
        # Dense weights of GPT-2 are transposed, so they have no such format.
        if not (family == "gpt2" and name in BY_ROWS)
    ],
)
def test_parts_of_a_fused_layer_are_those_of_its_dequantized_weight(
    dense, tmp_path, monkeypatch, family, name
):
    replace_ops(monkeypatch, NativeOps())
    quantized, twin = write(name, tmp_path, dense(family), TABLE[family][1])
    model = load(quantized)
    got, want = weights_of(model), weights_of(load(twin))
    stored = [
        p for p, m in model.named_modules() if hasattr(m, "method") and not hasattr(m, "weight")
    ]
    assert len(stored) >= 2 * 2
    for path, weight in want.items():
        CHECKPOINTS[name].check(got[path], weight, path)


def test_modelopt_names_mixers_as_the_checkpoint_does(dense, tmp_path, monkeypatch):
    replace_ops(monkeypatch, NativeOps())
    left = ("backbone.layers.0.mixer.in_proj", "backbone.layers.2.mixer")
    quantized, twin = write("modelopt", tmp_path, dense("nemotron_h"), left)
    got, want = (weights_of(load(folder)) for folder in (quantized, twin))
    for path, weight in want.items():
        assert torch.equal(got[path], weight), path
    model = load(quantized)
    for path, is_dense in (("0.self_attn.in_proj", True), ("0.self_attn.out_proj", False)):
        assert hasattr(model.get_submodule(f"model.layers.{path}"), "weight") == is_dense


@pytest.mark.parametrize("family", ["phi3", "falcon_40b"])
@pytest.mark.parametrize("name", ["fp8-static", "gptq-4", "awq", "ct-w8a16-channel"])
def test_a_rank_has_its_part_of_a_fused_layer(dense, tmp_path, monkeypatch, family, name):
    replace_ops(monkeypatch, NativeOps())
    folders = write(name, tmp_path, dense(family))
    got, want = (weights_of(load(folder, TPGroup(1, 2))) for folder in folders)
    for path, weight in want.items():
        assert torch.equal(got[path], weight), path


@pytest.mark.parametrize("family", ["phi3", "gpt_neox"])
def test_parts_of_narrow_layers_may_share_a_word(tmp_path, monkeypatch, family):
    """AWQ stores eight outputs in a word, but a head has four."""
    replace_ops(monkeypatch, NativeOps())
    folders = write("awq", tmp_path, small_heads(family, tmp_path, 32))
    got, want = (weights_of(load(folder)) for folder in folders)
    for path, weight in want.items():
        CHECKPOINTS["awq"].check(got[path], weight, path)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("phi3", r"4 bits: 4 features of .*qkv_proj do not fill whole"),
        ("gpt_neox", r"qweight stores 8 output features in a word: the 4 .*in each 12 do not"),
    ],
)
def test_parts_of_wide_layers_that_share_a_word_are_refused(tmp_path, family, message):
    quantized, _ = write("awq", tmp_path, small_heads(family, tmp_path, 1024))
    with pytest.raises((ConfigError, WeightLoadError), match=message):
        load(quantized)


def small_heads(family, tmp_path, hidden_size):
    sizes = {"hidden_size": hidden_size, "num_attention_heads": hidden_size // 4} | WIDE
    if family == "phi3":
        sizes["num_key_value_heads"] = 1
    return make_tiny_model(family, tmp_path / "made", num_hidden_layers=1, **sizes)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("gptq-4", "qweight"), ("awq", "scales"), ("fp8-block", "weight_scale_inv")],
)
def test_a_fused_tensor_of_another_size_is_refused(dense, tmp_path, name, tensor):
    folder, _ = write(name, tmp_path, dense("phi3"))
    key = f"model.layers.1.mlp.gate_up_proj.{tensor}"
    tensors = load_file(folder / "model.safetensors")
    dim = 0 if "fp8" in name else 1
    tensors[key] = torch.cat([tensors[key]] * 2, dim)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightLoadError, match=rf"tensor {key} has shape \[.*needs .*3"):
        load(folder)
