"""Test `vllm quantize`: rounding, the written formats, and loading the written models."""

import json
import re
import shutil

import pytest
import torch

from tests.model_executor.helpers import load, logits_of, prompt_of
from tests.tiny_models import make_tiny_model
from vllm.assets import BUNDLED_MODEL
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.quantize.formats import awq_tensors, gptq_tensors
from vllm.entrypoints.quantize.rounding import (
    Grid,
    input_scales,
    round_by_gptq,
    round_to_nearest,
)
from vllm.ops.stored_weight import GroupedWeight, unpack_awq, unpack_bits


def correlated_inputs(rows=512, size=64):
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(size, size, generator=generator)
    large = torch.ones(size)
    large[::9] = 12.0
    return torch.randn(rows, size, generator=generator) @ mixing * large


WEIGHT = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("by_activation", [False, True])
@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("group_size", [16, 32, -1])
def test_gptq_changes_outputs_less_than_rounding(group_size, is_symmetric, by_activation):
    grid, x = Grid(bits=3, group_size=group_size, is_symmetric=is_symmetric), correlated_inputs()
    made = round_by_gptq(WEIGHT, x.T @ x, grid, by_activation=by_activation)
    nearest = round_to_nearest(WEIGHT, grid)
    errors = [((x @ (r.dequantize() - WEIGHT).T) ** 2).mean() for r in (made, nearest)]
    assert errors[0] < 0.9 * errors[1]
    sizes = made.groups.bincount()
    assert (sizes == grid.size_of(64)).all()


def test_inputs_that_are_always_zero_are_no_problem():
    x = correlated_inputs()
    x[:, 5] = 0
    grid = Grid(bits=4, group_size=32, is_symmetric=True)
    made = round_by_gptq(WEIGHT, x.T @ x, grid, by_activation=True).dequantize()
    assert made.isfinite().all()
    assert ((x @ (made - WEIGHT).T) ** 2).mean() < 0.02 * ((x @ WEIGHT.T) ** 2).mean()


def test_scales_of_awq_change_outputs_less_than_rounding():
    grid, x = Grid(bits=4, group_size=32, is_symmetric=False), correlated_inputs()
    scales = input_scales([WEIGHT], x, grid)
    scaled = round_to_nearest(WEIGHT * scales, grid).dequantize() / scales
    nearest = round_to_nearest(WEIGHT, grid).dequantize()
    errors = [((x @ (w - WEIGHT).T) ** 2).mean() for w in (scaled, nearest)]
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_tensors_of_gptq_mean_the_rounded_weight(bits):
    grid, x = Grid(bits=bits, group_size=32, is_symmetric=False), correlated_inputs()
    made = round_by_gptq(WEIGHT, x.T @ x, grid, by_activation=True)
    tensors = gptq_tensors(made, bits)
    read = GroupedWeight(
        words=tensors["qweight"],
        bits=bits,
        scales=tensors["scales"].float(),
        zeros=unpack_bits(tensors["qzeros"], bits).to(torch.int16) + 1,
        groups=tensors["g_idx"],
    )
    assert torch.equal(read.dequantize(), made.dequantize())


def test_tensors_of_awq_mean_the_rounded_weight():
    made = round_to_nearest(WEIGHT, Grid(bits=4, group_size=16, is_symmetric=False))
    tensors = awq_tensors(made)
    read = GroupedWeight(
        words=tensors["qweight"],
        is_awq=True,
        bits=4,
        scales=tensors["scales"].float(),
        zeros=unpack_awq(tensors["qzeros"]).to(torch.int16),
    )
    assert torch.equal(read.dequantize(), made.dequantize())


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = make_tiny_model(
        "llama", tmp_path_factory.mktemp("dense"), intermediate_size=192, num_hidden_layers=2
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, folder)
    (folder / "texts.txt").write_text((BUNDLED_MODEL / "README.md").read_text())
    return folder


CALIBRATION = ("--num-samples", "4", "--sample-tokens", "64", "--group-size", "32")


def quantize(dense, out, method, *flags):
    data = ("--dataset", str(dense / "texts.txt"))
    words = ["quantize", "--method", method, "--model", str(dense), "--out", str(out)]
    return main([*words, *data, *CALIBRATION, *flags])


@pytest.mark.parametrize(
    ("method", "flags", "quant_method", "most"),
    [
        ("gptq", ("--desc-act", "--bits", "8"), "gptq", 0.06),
        ("awq", (), "awq", 0.5),
        ("fp8", (), "compressed-tensors", 0.2),
        ("int8", (), "compressed-tensors", 0.1),
    ],
)
def test_what_is_written_is_loaded(dense, tmp_path, method, flags, quant_method, most):
    out = tmp_path / "out"
    assert quantize(dense, out, method, *flags) == 0
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == quant_method
    assert (out / "tokenizer.json").is_file()
    got, want = (logits_of(load(folder), prompt_of(40)) for folder in (out, dense))
    assert not torch.equal(got, want)
    assert (got - want).norm() < most * want.norm()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_heads_are_listed_as_dense(tmp_path, family):
    """This includes tied heads, which are separate layers for other programs."""
    folder = make_tiny_model(family, tmp_path / "made")
    words = ["--model", str(folder), "--out", str(tmp_path / "out")]
    assert main(["quantize", "--method", "fp8", *words]) == 0
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["ignore"] == ["embed_out" if family == "gpt_neox" else "lm_head"]


def test_layers_that_groups_do_not_divide_stay_dense(dense, tmp_path):
    out = tmp_path / "out"
    assert quantize(dense, out, "gptq", "--group-size", "64") == 0
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert "dynamic" not in settings
    assert quantize(dense, tmp_path / "other", "gptq", "--group-size", "48") == 0
    settings = json.loads((tmp_path / "other" / "config.json").read_text())["quantization_config"]
    attention = [f"self_attn.{name}_proj" for name in "koqv"]
    dense = sorted([*attention, "mlp.gate_proj", "mlp.up_proj"])
    assert sorted(settings["dynamic"]) == [
        rf"-:^model\.layers\.{layer}\.{re.escape(name)}($|\.)"
        for layer in range(2)
        for name in dense
    ]
    assert logits_of(load(tmp_path / "other"), prompt_of(5)).isfinite().all()


@pytest.mark.parametrize(
    ("method", "flags", "message"),
    [
        ("awq", ("--bits", "8"), "--bits 8: AWQ supports 4 bits only"),
        ("gptq", ("--group-size", "0"), "--group-size 0 must be -1"),
        ("gptq", ("--group-size", "7"), "--group-size 7 does not divide the input features of any"),
        ("gptq", ("--sample-tokens", "100000"), "at least 100000 tokens"),
        ("gptq", ("--dataset", "/no/such/file"), "--dataset /no/such/file"),
        ("fp8", ("--model", "/no/such/model"), "model folder '/no/such/model' does not exist"),
        ("fp8", ("--out", str(BUNDLED_MODEL)), f"--out {BUNDLED_MODEL} exists and is not empty"),
    ],
)
def test_wrong_arguments_are_named(dense, tmp_path, capfd, method, flags, message):
    assert quantize(dense, tmp_path / "out", method, *flags) == 2
    (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("error:")]
    assert message in line
