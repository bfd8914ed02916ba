"""Test FP8 with the files of Intel Neural Compressor: scales, files, and refused values."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.model_executor.helpers import load
from tests.model_executor.inc_models import measure, quantize, without, write
from vllm.config import IncConfig
from vllm.config.quantization.inc import SCALE_METHODS, read_inc_config
from vllm.distributed import TPGroup
from vllm.entrypoints.calibration.dataset import read_texts, split_samples
from vllm.entrypoints.calibration.folder import CalibrationFolder, link_attention
from vllm.errors import ConfigError
from vllm.model_executor.quantization.inc.files import (
    Node,
    find_file,
    merged,
    missing_file,
    read_file,
    write_file,
)
from vllm.model_executor.quantization.inc.inc import Inc
from vllm.model_executor.quantization.inc.scales import input_scale, round_weight, weight_scales
from vllm.ops import get_ops, set_ops
from vllm.ops.cpu.operators import CPUOps
from vllm.ops.native.operators import NativeOps
from vllm.ops.stored_weight import Fp8Weight

# Measurements of neural-compressor-pt 3.10 in two small layers, with torch 2.13.
LIBRARY_MEASUREMENTS = {
    "GlobalRank": None,
    "LocalRank": None,
    "Mode": "DynamicRange",
    "Nodes": {
        "fc1": {
            "inputs": [[[3.40625]]],
            "outputs": [[[2.078125]]],
            "params": {"weight": [[0.353515625]]},
        },
        "fc2": {
            "inputs": [[[1.75]]],
            "outputs": [[[0.6796875]]],
            "params": {"weight": [[0.2412109375]]},
        },
    },
}
# Method -> scales that the library computed from these measurements: of the inputs and of the
# weight.
LIBRARY_SCALES = {
    "maxabs_pow2": {"fc1": (0.03125, 0.001953125), "fc2": (0.015625, 0.001953125)},
    "maxabs_arbitrary": {
        "fc1": (0.0303955078125, 0.00157928466796875),
        "fc2": (0.015625, 0.00107574462890625),
    },
}
LIBRARY_PCS = {
    "Mode": "Scale",
    "Nodes": {
        "fc2": {
            "inputs": [0.015625],
            "outputs": [[3.0517578125e-05, 0.0]],
            "params": {"weight": {"0": [0.001953125, 0.0009765625], "1": [1.0, 1.0]}},
        }
    },
}


@pytest.mark.parametrize("method", LIBRARY_SCALES)
def test_scales_are_those_of_the_library(method, tmp_path):
    path = write(tmp_path / "m_hooks_maxabs.json", LIBRARY_MEASUREMENTS)
    measured = read_file(path, "DynamicRange")
    for name, (of_inputs, of_weight) in LIBRARY_SCALES[method].items():
        node = measured.find(name)
        rule = SCALE_METHODS[method]
        # The library divides in bfloat16, so the results differ.
        got = input_scale(node.inputs[0][0], rule, 448.0, 0.25)
        assert got == pytest.approx(of_inputs, rel=2**-8)
        weight = torch.tensor([[node.weight[0], -0.01]])
        got = weight_scales(weight, rule, 448.0, 0.5)
        assert got.tolist() == pytest.approx([of_weight], rel=2**-8)


def test_scales_per_output_are_read_as_the_library_writes_them(tmp_path):
    node = read_file(write(tmp_path / "s.json", LIBRARY_PCS), "Scale").find("model.fc2")
    assert node.weight == [0.001953125, 0.0009765625]
    assert node.inputs == [[0.015625]]


@pytest.mark.parametrize(
    ("method", "limit", "largest", "scale"),
    [
        ("maxabs_hw", 240.0, 3.0, 2.0**-4),  # 0.05 is rounded up to 2^-4
        ("maxabs_hw", 240.0, 4.0, 1.0),  # 0.0667 is above 2^-4
        ("maxabs_hw", 240.0, 0.001, 2.0**-8),
        ("maxabs_hw", 240.0, 1e5, 2.0**4),  # 2^4 is the largest scale
        ("maxabs_hw", 448.0, 4.0, 2.0**-4),
        ("maxabs_hw", 448.0, 1e5, 2.0**7),
        ("maxabs_pow2", 240.0, 4.0, 2.0**-3),
        ("maxabs_arbitrary", 240.0, 3.0, 0.05),
        ("unit_scale", 240.0, 3.0, 1.0),
    ],
)
def test_a_card_has_scales_of_its_own(method, limit, largest, scale):
    assert input_scale(largest, SCALE_METHODS[method], limit, 0.25) == pytest.approx(scale)


@pytest.mark.parametrize("limit", [240.0, 448.0])
@pytest.mark.parametrize("method", sorted(SCALE_METHODS))
def test_rounded_weights_are_in_range_and_near(method, limit):
    torch.manual_seed(0)
    weight = torch.randn(24, 64) * torch.logspace(-2, 0, 24)[:, None]
    weight[3] = 0
    rounded = round_weight(weight, SCALE_METHODS[method], limit, 0.5)
    assert rounded.numbers.float().abs().max() <= limit
    largest = weight.abs().max() if len(rounded.scales.unique()) == 1 else None
    assert torch.equal(rounded.dequantize()[3], weight[3])
    if method == "unit_scale":
        return
    error = (rounded.dequantize() - weight).abs().amax(dim=1)
    # e4m3 has steps of 1/8 of a number. With one scale for all, small numbers have steps of a fixed
    # size.
    bound = weight.abs().amax(dim=1) if largest is None else largest.expand(24)
    assert (error <= bound / 15).all()


def test_a_search_finds_no_worse_scale():
    torch.manual_seed(1)
    weight = torch.randn(16, 96)
    for plain, searched in (
        ("maxabs_hw", "maxabs_hw_opt_weight"),
        ("maxabs_pow2", "maxabs_pow2_opt_weight"),
        ("act_maxabs_hw_weights_pcs_maxabs_pow2", "act_maxabs_hw_weights_pcs_opt_pow2"),
    ):
        for limit in (240.0, 448.0):
            errors = [
                (round_weight(weight, SCALE_METHODS[m], limit, 0.5).dequantize() - weight)
                .square()
                .sum()
                for m in (plain, searched)
            ]
            assert errors[1] <= errors[0]


@pytest.mark.parametrize("table", [NativeOps, CPUOps])
@pytest.mark.parametrize(("limit", "scale"), [(240.0, 2.0**-4), (448.0, 0.0123)])
def test_inputs_are_rounded_with_the_scale(table, limit, scale):
    torch.manual_seed(2)
    weight = torch.randn(32, 128) * 0.1
    rounded = round_weight(weight, SCALE_METHODS["maxabs_pow2"], limit, 0.5)
    stored = Fp8Weight(
        numbers=rounded.numbers,
        scales=rounded.scales,
        block_inputs=128,
        input_scale=scale,
        largest=limit,
        rounds_inputs=True,
    )
    x = torch.randn(5, 128) * 4  # some values are above 448 * 0.0123
    numbers = (x / scale).clamp(-limit, limit).to(torch.float8_e4m3fn).float()
    want = F.linear(numbers, rounded.numbers.float()) * (scale * rounded.scales[0])
    before = get_ops()
    set_ops(table())
    try:
        got = get_ops().prepare_weight(stored, torch.float32).linear(x)
    finally:
        set_ops(before)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# ---- the configuration file ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must be a JSON object, got a list"),
        ({"mode": "LOAD"}, "mode is 'LOAD'; supported: MEASURE, QUANTIZE"),
        ({"observer": "save"}, "observer is 'save'; supported: maxabs"),
        ({"fp8_config": "E5M2"}, "fp8_config is 'E5M2'; supported: E4M3"),
        ({"scale_method": "maxabs_hv"}, "scale_method is 'maxabs_hv'; supported: unit_scale, "),
        ({"scale_metod": "maxabs_hw"}, "scale_metod is .*; did you mean 'scale_method'"),
        ({"input_backoff": 0.5}, 'write it as "scale_params": {"input_backoff": ...}'),
        ({"my_note": "x"}, "my_note is 'x'; remove the key. Known keys: allowlist, "),
        ({"scale_method": "maxabs_pcs_pow2"}, "with dynamic_quantization=false it must be one of"),
        ({"dynamic_quantization": "yes"}, "dynamic_quantization is 'yes'; it must be true or fal"),
        ({"blocklist": ["lm_head"]}, "blocklist is .*; it must be {"),
        ({"blocklist": {"names": ["("]}}, "the name '\\(' is not a regular expression"),
        ({"scale_params": {"input_backoff": 0}}, "input_backoff must be above 0 and at most 1"),
        (
            {"scale_params": {"input_backof": 0.5}},
            "its keys can only be input_backoff and weight_backoff",
        ),
        ({"device_for_scales": "GAUDI1"}, "device_for_scales is 'GAUDI1'; supported: GAUDI2, GAU"),
        ({"calibration_sample_interval": -1}, "calibration_sample_interval is -1; it must be an"),
        (
            {"row_parallel_linear_allreduce_quantization": True},
            "is True; remove the key: sums over cards are not quantized",
        ),
        ({"dump_stats_path": 3}, "dump_stats_path is 3; it must be the beginning of a path"),
    ],
)
def test_a_wrong_configuration_is_one_line_with_its_key(content, message, tmp_path):
    path = write(tmp_path / "quant.json", content)
    with pytest.raises(ConfigError, match=message) as error:
        read_inc_config(str(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_configuration_that_is_not_there_is_named():
    with pytest.raises(
        ConfigError, match=r"QUANT_CONFIG nowhere.json cannot be read: No such file"
    ):
        read_inc_config("nowhere.json")


def test_the_settings_of_the_library_are_read(tmp_path):
    content = {
        "method": "HOOKS",
        "mode": "quantize",
        "observer": "maxabs",
        "scale_method": "MAXABS_HW_OPT_WEIGHT",
        "scale_format": "scalar",
        "allowlist": {"types": [], "names": []},
        "blocklist": {"types": ["RowParallelLinear"], "names": [r"mlp\.gate\b"]},
        "dump_stats_path": "./hqt_output/measure",
        "use_qdq": "True",
        "scale_params": {"input_backoff": 0.5},
    }
    config = read_inc_config(str(write(tmp_path / "quant.json", content)))
    assert (config.mode, config.scale_method) == ("QUANTIZE", "maxabs_hw_opt_weight")
    assert (config.input_backoff, config.weight_backoff) == (0.5, 0.5)
    for name, kind, is_covered in (
        ("model.layers.0.mlp.gate_up_proj", "MergedColumnParallelLinear", True),
        ("model.layers.0.mlp.gate", "ReplicatedLinear", False),
        ("model.layers.0.self_attn.o_proj", "RowParallelLinear", False),
    ):
        assert config.covers(name, kind) == is_covered
    only = IncConfig(path="x", mode="QUANTIZE", allowed_names=("self_attn",))
    assert only.covers("model.layers.0.self_attn.o_proj", "RowParallelLinear")
    assert not only.covers("model.layers.0.mlp.down_proj", "RowParallelLinear")


def test_files_of_optimum_for_habana_are_read(tmp_path):
    content = {
        "method": "HOOKS",
        "mode": "QUANTIZE",
        "whitelist": {"types": [], "names": []},
        "blocklist": {"types": [], "names": ["matmul_qk"]},
        "dump_stats_path": "./hqt_output/measure",
        "dump_stats_xlsx_path": "./hqt_output/measure/fp8stats.xlsx",
        "calibration_sample_interval": "50",
        "row_parallel_linear_allreduce_quantization": "False",
    }
    config = read_inc_config(str(write(tmp_path / "quant.json", content)))
    assert (config.allowed_names, config.blocked_names) == ((), ("matmul_qk",))
    older = {key: value for key, value in content.items() if key != "blocklist"}
    older |= {"blacklist": content["blocklist"]}
    assert read_inc_config(str(write(tmp_path / "quant.json", older))) == config
    both = content | {"allowlist": {"names": ["mlp"]}}
    with pytest.raises(ConfigError, match=r"whitelist is .*; it is the old name of allowlist"):
        read_inc_config(str(write(tmp_path / "quant.json", both)))


# ---- a model and its files ----------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tiny_model, tmp_path_factory):
    """Return the folder of a measured tiny Llama, and the nodes that were written."""
    folder = tiny_model("llama")
    return folder, measure(folder, tmp_path_factory.mktemp("measured"))


def test_measurements_are_those_of_inputs_and_weights(measured):
    folder, content = measured
    tensors = load_file(folder / "model.safetensors")
    nodes = content["Nodes"]
    qkv = [tensors[f"model.layers.0.self_attn.{x}_proj.weight"].abs().max() for x in "qkv"]
    weight = nodes["model.layers.0.self_attn.qkv_proj"]["params"]["weight"]
    assert weight == [[pytest.approx(float(max(qkv)))]]
    assert all(node["inputs"][0][0][0] > 0 for node in nodes.values())
    assert "model.layers.0.self_attn.attn.impl.v_cache" in nodes
    head = float(tensors["lm_head.weight"].abs().max())
    assert nodes["lm_head"]["params"]["weight"] == [[pytest.approx(head)]]


# With only the weights in FP8, the results of this random model have a cosine of 0.99 to the
# unquantized results.


def test_a_second_load_takes_the_scales_that_the_first_has_written(measured, tmp_path):
    folder, content = measured
    write(tmp_path / "inc_output_hooks_maxabs_0_1.json", content)
    first = quantize(folder, tmp_path)
    path = find_file(str(tmp_path / "inc_output"), 0, 1, "maxabs_hw")
    assert path is not None
    (tmp_path / "inc_output_hooks_maxabs_0_1.json").unlink()
    second = quantize(folder, tmp_path)
    tokens = torch.arange(3, 20)
    outs = [model(tokens, torch.arange(len(tokens))) for model in (first, second)]
    assert torch.equal(*outs)
    dense = load(folder)(tokens, torch.arange(len(tokens)))
    assert not torch.equal(outs[0], dense)
    assert F.cosine_similarity(outs[0].flatten(), dense.flatten(), dim=0) > 0.96


@pytest.mark.parametrize(
    "settings",
    [
        {"scale_method": "act_maxabs_pow2_weights_pcs_opt_pow2"},
        {"scale_method": "maxabs_hw", "device_for_scales": "GAUDI2"},
        {"scale_method": "maxabs_pcs_pow2"},
    ],
)
def test_other_methods_give_near_results(measured, tmp_path, settings):
    folder, content = measured
    write(tmp_path / "inc_output_hooks_maxabs_0_1.json", content)
    tokens = torch.arange(3, 20)
    got = quantize(folder, tmp_path, **settings)(tokens, torch.arange(len(tokens)))
    dense = load(folder)(tokens, torch.arange(len(tokens)))
    assert F.cosine_similarity(got.flatten(), dense.flatten(), dim=0) > 0.96


def test_blocked_modules_stay_as_they_are(measured, tmp_path):
    folder, content = measured
    write(tmp_path / "inc_output_hooks_maxabs_0_1.json", content)
    tokens = torch.arange(3, 20)
    got = quantize(folder, tmp_path, blocked_names=("_proj", "_cache"))
    dense = load(folder)
    assert torch.equal(*(m(tokens, torch.arange(len(tokens))) for m in (got, dense)))


def at(content, *keys):
    for key in keys:
        content = content[key]
    return content


O_PROJ = "model.layers.1.self_attn.o_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: None,
            "inc_output_hooks_maxabs_0_1.json does not exist. dump_stats_path of that file",
        ),
        (lambda c: "{", "the measurement file .* is not valid JSON"),
        (lambda c: {**c, "Nodes": {}}, "Nodes must be an object with the modules of the model"),
        (lambda c: {**c, "Mode": "Scale"}, "Mode must be 'DynamicRange', got 'Scale'"),
        (
            lambda c: without(c, O_PROJ),
            f"Nodes.{O_PROJ} is missing: the file is for a different mod",
        ),
        (
            lambda c: without(c, "model.layers.0.self_attn.attn.impl.k_cache"),
            "Nodes.model.layers.0.self_attn.attn.impl.k_cache is missing",
        ),
        (
            lambda c: at(c, "Nodes", O_PROJ).update(inputs=[[[float("nan")]]]) or c,
            f"Nodes.{O_PROJ}.inputs\\[0\\] is nan: a measurement must be at least 0, and finite",
        ),
        (
            lambda c: at(c, "Nodes", O_PROJ).update(inputs=[[[-1.0]]]) or c,
            f"Nodes.{O_PROJ}.inputs\\[0\\] is -1.0",
        ),
        (
            lambda c: at(c, "Nodes", O_PROJ).update(inputs=[[[10**400]]]) or c,
            f"Nodes.{O_PROJ}.inputs\\[0\\] is inf",
        ),
        (
            lambda c: at(c, "Nodes", O_PROJ).update(inputs=[[[1e-300]]]) or c,
            f"Nodes.{O_PROJ}.inputs\\[0\\] is 1e-300: a float32 scale can represent",
        ),
        (
            lambda c: at(c, "Nodes", O_PROJ).update(inputs=[[["1"]]]) or c,
            f"Nodes.{O_PROJ}.inputs\\[0\\] contains '1', which is not a number",
        ),
        (
            lambda c: at(c, "Nodes", O_PROJ).update(inputs=[]) or c,
            f"Nodes.{O_PROJ}.inputs is empty",
        ),
        (
            lambda c: at(c, "Nodes", O_PROJ).update(inputs=[[[0.0]]]) or c,
            f"Nodes.{O_PROJ}.inputs is 0: the module had no input while it was measured",
        ),
        (
            lambda c: at(c, "Nodes", O_PROJ).update(params={"weight": [[9.0]]}) or c,
            f"Nodes.{O_PROJ}.params.weight is 9, but the largest weight .*: the file is for a diff",
        ),
    ],
)
def test_wrong_measurements_are_one_line_with_file_and_key(measured, tmp_path, change, message):
    folder, content = measured
    content = change(json.loads(json.dumps(content)))
    path = tmp_path / "inc_output_hooks_maxabs_0_1.json"
    if content is not None:
        write(path, content)
    with pytest.raises(ConfigError, match=message) as error:
        quantize(folder, tmp_path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("inputs", "weight", "message"),
    [
        ([0.0], 0.5, f"Nodes.{O_PROJ}.inputs\\[0\\] is 0.0: a scale must be above 0"),
        ([0.5], float("inf"), f"Nodes.{O_PROJ}.params.weight is inf"),
        ([0.5], 1e-6, "params.weight is 1e-06, but the largest weight .* fp8 cannot represent"),
        ([0.5], 1e6, "params.weight is 1e\\+06, but the largest weight .* fp8 cannot represent"),
        ([1e38], 0.5, f"Nodes.{O_PROJ}.inputs\\[0\\] is 1e\\+38: a float32 scale can represent"),
        ([0.5], [0.5, 0.5], f"Nodes.{O_PROJ}.params.weight has 2 values, but the layer needs 1"),
    ],
)
def test_wrong_scales_are_one_line_with_file_and_key(measured, tmp_path, inputs, weight, message):
    folder, content = measured
    path = tmp_path / "inc_output_hooks_maxabs_MAXABS_HW_0_1.json"
    scales = {
        name: {"inputs": [0.5], **({"params": {"weight": 0.5}} if "params" in node else {})}
        for name, node in content["Nodes"].items()
    }
    scales[O_PROJ] = {"inputs": inputs, "params": {"weight": weight}}
    write(path, {"Mode": "Scale", "Nodes": scales})
    with pytest.raises(ConfigError, match=message) as error:
        quantize(folder, tmp_path)
    assert str(path) in str(error.value)


def test_files_of_more_ranks_are_not_taken_for_one(measured, tmp_path):
    folder, content = measured
    for rank in range(4):
        write(tmp_path / f"inc_output_hooks_maxabs_{rank}_4.json", content)
    with pytest.raises(ConfigError, match="There are files for 4 ranks: run with"):
        quantize(folder, tmp_path)


@pytest.mark.parametrize(
    ("files", "rank", "world_size", "advice"),
    [
        (
            ["old/stats_hooks_maxabs_0_4.json"],
            0,
            2,
            "--step unify --unify-ranks 2 --tensor-par.* 4",
        ),
        (["old/stats_hooks_maxabs_0_1.json"], 1, 2, "--step expand --expand-ranks 2 --ten.* 1`"),
        (["old/stats_hooks_maxabs_0_3.json"], 0, 2, "with --tensor-parallel-size 3$"),
        (
            ["old/stats_hooks_maxabs_0_2.json"],
            1,
            2,
            "other ranks of these 2: copy the files of all",
        ),
        (["new/g2/stats_hooks_maxabs_0_1.json"], 0, 1, "There is .*: set .* to .*new/g2/stats$"),
        (["new/stats_hooks_maxabs_0_1.json"], 0, 1, "There is .*: set .* to .*new/stats$"),
        ([], 0, 1, "if the files were moved, as into a container"),
    ],
)
def test_missing_measurements_say_what_is_there_instead(tmp_path, files, rank, world_size, advice):
    """`new` has the file of QUANT_CONFIG, whose dump_stats_path is the folder `old`."""
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    config = tmp_path / "new" / "quant.json"
    error = missing_file(str(config), str(tmp_path / "old" / "stats"), rank, world_size)
    assert f"stats_hooks_maxabs_{rank}_{world_size}.json does not exist. " in str(error)
    assert re.search(advice, str(error))


def test_scales_of_a_wider_range_than_the_device_has_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(NativeOps, "fp8_max", 240.0)
    config = IncConfig(path="quant.json", mode="QUANTIZE", device_for_scales="GAUDI3")
    with pytest.raises(ConfigError, match="end at 448, but on this device they end at 240"):
        Inc(config).start(TPGroup())


# ---- steps of a calibration that need no model --------------------------------------------


def test_ranks_are_unified_by_their_largest_values_in_neighbours(tmp_path):
    folder = CalibrationFolder(str(tmp_path), "some/Model-8B/", "g2")
    assert folder.path.name == "model-8b"
    for rank, value in enumerate((1.5, 2.0, 3.0, 0.5)):
        path = Path(f"{folder.prefix}_hooks_maxabs_{rank}_4.json")
        write_file(path, {"model.x": Node([[value]], [], [value])}, "DynamicRange")
    folder.unify(4, 2)
    nodes = [folder.read_measurements(rank, 2).nodes["model.x"] for rank in (0, 1)]
    assert nodes == [Node([[2.0]], [], [2.0]), Node([[3.0]], [], [3.0])]
    for target in (3, 4, 0):
        with pytest.raises(ConfigError, match=f"--unify-ranks {target} must divide"):
            folder.unify(4, target)
    with pytest.raises(ConfigError, match=r"0_8.json does not exist. There are files for 2 and 4"):
        folder.unify(8, 2)


def test_measurements_of_two_models_are_not_merged(tmp_path):
    path = tmp_path / "m.json"
    write_file(path, {"a": Node([[1.0]])}, "DynamicRange")
    with pytest.raises(ConfigError, match=r"Nodes.b is missing from one of the two measurements"):
        merged({"b": Node([[1.0]])}, read_file(path, "DynamicRange"))
    assert merged({"model.a": Node([[0.5]])}, read_file(path, "DynamicRange")) == {
        "model.a": Node([[1.0]])
    }


def test_products_of_attention_follow_from_the_caches():
    block = "model.layers.0.self_attn"
    nodes = {
        f"{block}.attn.impl.matmul_qk": Node([[5.0], [9.0]]),
        f"{block}.attn.impl.matmul_av": Node([[1.0], [9.0]]),
        f"{block}.attn.impl.k_cache": Node([[3.0]]),
        f"{block}.attn.impl.v_cache": Node([[4.0]]),
        f"{block}.attn.impl.fused_scaled_dot_product_attention": Node([[1.0]], [[7.0]]),
        f"{block}.o_proj": Node([[2.0]]),
    }
    assert link_attention(nodes)
    assert nodes[f"{block}.attn.impl.matmul_qk"].inputs == [[5.0], [3.0]]
    assert nodes[f"{block}.attn.impl.matmul_av"].inputs == [[1.0], [4.0]]
    name = f"{block}.attn.impl.fused_scaled_dot_product_attention"
    assert nodes[name].outputs == [[2.0]]
    assert not link_attention({f"{block}.o_proj": Node([[2.0]])})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pkl", "x", "pickle files are not read"),
        ("a.txt", " \n", "the file contains no text"),
        ("a.jsonl", '{"text": 3}\n', "line 1 must be a string, or an object with one of text, "),
        ("a.jsonl", '"fine"\n{\n', "line 2 is not valid JSON"),
        ("a.json", '{"text": "x"}', "it must be a list of strings"),
    ],
)
def test_a_wrong_dataset_is_one_line(name, content, message, tmp_path):
    path = write(tmp_path / name, content)
    with pytest.raises(ConfigError, match=message):
        read_texts(str(path))


def test_samples_are_short_and_some_are_held_out(tmp_path):
    lines = '"first text"\n{"question": "second"}\n'
    assert read_texts(str(write(tmp_path / "a.jsonl", lines))) == ["first text", "second"]
    texts = ["x" * 25, "y" * 40]
    measured, held_out = split_samples(texts, lambda text: list(text.encode()), 10, 4)
    assert (len(measured), len(held_out)) == (4, 1)
    assert max(map(len, measured + held_out)) <= 10
    only = split_samples(["x" * 5], lambda text: list(text.encode()), 10, 4)
    assert only == ([[120] * 5], [[120] * 5])
    with pytest.raises(ConfigError, match="at least one text of two or more tokens"):
        split_samples(["x"], lambda text: list(text.encode()), 10, 4)
