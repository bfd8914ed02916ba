"""Test converting the measurements of some ranks to measurements of fewer or of more ranks."""

import json
import re
from pathlib import Path

import pytest

from tests.model_executor.helpers import load, read_arch
from tests.model_executor.inc_models import load_inc, measure, quantize
from vllm.config import IncConfig
from vllm.config.families import FAMILIES
from vllm.distributed import Stage, TPGroup
from vllm.entrypoints.calibration.folder import CalibrationFolder
from vllm.entrypoints.calibration.ranks import expand, unify
from vllm.errors import ConfigError
from vllm.model_executor.quantization.inc import measure as inc_measure
from vllm.model_executor.quantization.inc.files import Measurements, Node, read_file, write_file

OP = "model.layers.1.mlp.experts.moe_op"
PATH = Path("some_file.json")


def rank_of_experts(rank: int, num_experts: int) -> Measurements:
    """Return the measurements of a rank in which expert e of all has the weights e and e + 0.5, and
    the input e + 0.25.
    """
    numbers = [float(rank * num_experts + i) for i in range(num_experts)]
    nodes = {"model.x": Node([[1.0 + rank]], [], [2.0 - rank])}
    nodes[OP] = Node([[7.0 - rank], *([n + 0.25] for n in numbers)])
    for i, number in enumerate(numbers):
        nodes[f"{OP}.w13_list.{i}"] = Node(weight=[number])
        nodes[f"{OP}.w2_list.{i}"] = Node(weight=[number + 0.5])
    return Measurements(PATH, nodes)


def test_ranks_with_other_experts_are_unified_one_after_the_other():
    """Each of two ranks has 16 experts, so expert 11 of the second rank is expert 27."""
    nodes = unify([rank_of_experts(rank, 16) for rank in (0, 1)], shares_experts=True)
    assert len(nodes) == 2 + 2 * 32
    assert nodes["model.x"] == Node([[2.0]], [], [2.0])
    assert nodes[f"{OP}.w13_list.27"].weight == [27.0]
    assert nodes[f"{OP}.w2_list.27"].weight == [27.5]
    assert nodes[OP].inputs == [[7.0], *([n + 0.25] for n in range(32))]
    four = unify([rank_of_experts(rank, 2) for rank in range(4)], shares_experts=True)
    assert four[OP].inputs == [[7.0], *([n + 0.25] for n in range(8))]
    assert four["model.x"] == Node([[4.0]], [], [2.0])


def test_expanding_shares_the_experts_out():
    (first, second) = expand(rank_of_experts(0, 4), 2)
    assert first["model.x"] == second["model.x"] == Node([[1.0]], [], [2.0])
    assert second[f"{OP}.w2_list.1"].weight == [3.5]
    assert second[OP].inputs == [[7.0], [2.25], [3.25]]
    assert f"{OP}.w13_list.2" not in second
    again = unify([Measurements(PATH, part) for part in (first, second)], shares_experts=True)
    assert again == rank_of_experts(0, 4).nodes
    with pytest.raises(
        ConfigError, match=r"has 4 experts, which cannot be divided evenly among 3 ranks"
    ):
        expand(rank_of_experts(0, 4), 3)


def test_a_rank_that_was_expanded_may_have_smaller_weights(tiny_model, tmp_path):
    """A slice of a layer has only a part of its weights. Larger weights belong to another model."""
    folder = CalibrationFolder(str(tmp_path), "some/model", "g3")
    place = Path(folder.prefix).parent
    place.mkdir(parents=True)
    model = tiny_model("llama")
    measure(model, place)
    folder.expand(1, 2)
    path = place / "inc_output_hooks_maxabs_0_2.json"
    target = place / "inc_output_hooks_maxabs_0_1.json"
    measured = read_file(path, "DynamicRange")
    assert measured.is_part
    assert measured.nodes == read_file(target, "DynamicRange").nodes
    for node in measured.nodes.values():
        if node.weight:
            node.weight = [2 * node.weight[0]]
    write_file(target, measured.nodes, "DynamicRange", is_part=True)
    assert quantize(model, place)
    for node in measured.nodes.values():
        if node.weight:
            node.weight = [node.weight[0] / 4]
    write_file(target, measured.nodes, "DynamicRange", is_part=True)
    with pytest.raises(ConfigError, match="the file is for a different model"):
        quantize(model, place, recalculates=True)
    with pytest.raises(ConfigError, match=r"--expand-ranks 3 must be a multiple of 2"):
        folder.expand(2, 3)


def test_stages_have_files_of_their_own_or_use_those_of_the_whole_model(tiny_model, tmp_path):
    model, files = tiny_model("llama"), f"{tmp_path}/inc_output_hooks_maxabs"
    nodes = measure(model, tmp_path)["Nodes"]
    num_layers = read_arch(model).num_layers
    stages = [Stage.of(index, 2, num_layers) for index in range(2)]
    # Each stage uses its part of what was measured on the whole model.
    for index, stage in enumerate(stages):
        quantize(model, tmp_path, stage)
        scales = json.loads(Path(f"{files}_MAXABS_HW_{index}_2.json").read_text())["Nodes"]
        own = {
            name for name in nodes if layer_of(name) in range(stage.first_layer, stage.end_layer)
        }
        assert scales.keys() >= own
        assert not any(name in scales for name in nodes.keys() - own if layer_of(name) >= 0)
        Path(f"{files}_MAXABS_HW_{index}_2.json").unlink()
    whole = Measurements(PATH, read_file(Path(f"{files}_0_1.json"), "DynamicRange").nodes)
    Path(f"{files}_0_1.json").unlink()
    with pytest.raises(ConfigError, match=r"maxabs_1_2.json does not exist. .*measure the model"):
        quantize(model, tmp_path, stages[1])
    own = {name: node for name, node in whole.nodes.items() if layer_of(name) >= num_layers // 2}
    write_file(Path(f"{files}_1_2.json"), own, "DynamicRange")
    assert quantize(model, tmp_path, stages[1])


def layer_of(name: str) -> int:
    """Return the index of the layer of a module; -1: it is in no layer."""
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else -1


def test_the_file_of_a_stage_has_its_rank_among_all(tiny_model, tmp_path):
    config = IncConfig(path="m.json", mode="MEASURE", dump_stats_path=str(tmp_path / "inc_output"))
    model = load_inc(tiny_model("llama"), config)
    stage = Stage.of(1, 2, read_arch(tiny_model("llama")).num_layers)
    path = inc_measure.save(model, config, TPGroup(1, 2), stage, adds=False)
    assert Path(path).name == "inc_output_hooks_maxabs_3_4.json"
    content = json.loads(Path(path).read_text())
    assert (content["GlobalRank"], content["LocalRank"]) == (3, 3)


@pytest.mark.parametrize(
    ("family", "blocked"),
    [
        ("mixtral", ["model.layers.0.self_attn.qkv_proj", "lm_head"]),
        ("deepseek_v3", ["lm_head", "model.layers.1.mlp.gate"]),
    ],
)
def test_families_have_lists_of_their_own(tiny_model, family, blocked):
    model = load(tiny_model(family))
    names = [name for name, _ in model.named_modules()]
    found = [n for n in names if any(re.search(p, n) for p in FAMILIES[family].fp8_scales.blocked)]
    assert set(blocked) <= set(found)
    assert not any("experts" in name for name in found)
