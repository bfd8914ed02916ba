"""Test that weights saved per rank equal the weights that each rank loads from the checkpoint."""

import shutil
from itertools import product
from typing import Any

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
    weights_of,
)
from tests.quantized_checkpoints import write
from tests.reach import replace_ops
from tools.save_sharded_state import save
from vllm.distributed import Stage, TPGroup
from vllm.errors import WeightLoadError
from vllm.model_executor.loader import load_model
from vllm.ops.native.operators import NativeOps

INPUT_IDS = prompt_of(12)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
def test_one_rank_gives_the_logits_of_transformers(tiny_model, tmp_path, family):
    folder = tiny_model(family)
    save(str(folder), tmp_path / "out", 1, "float32")
    model = load(tmp_path / "out", load_format="sharded_state")
    want = reference_logits(folder, INPUT_IDS)
    found = logits_of(model, INPUT_IDS)
    assert torch.equal(found, logits_of(load(folder), INPUT_IDS))
    torch.testing.assert_close(found, want, atol=1e-4, rtol=0)


def test_each_of_two_ranks_gets_its_own_part(tiny_model, tmp_path):
    folder = tiny_model("llama")
    files = save(str(folder), tmp_path / "out", 2, "float32")
    assert [file.name for file in files] == [
        "model-rank-0-part-0.safetensors",
        "model-rank-1-part-0.safetensors",
    ]
    for rank in (0, 1):
        tp = TPGroup(rank, 2)
        got = load(tmp_path / "out", tp, load_format="sharded_state").state_dict()
        want = load(folder, tp).state_dict()
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
    with pytest.raises(WeightLoadError, match=r"has weights for 2 ranks .* is 1"):
        load(tmp_path / "out", load_format="sharded_state")
    with pytest.raises(WeightLoadError, match="use --load-format sharded_state"):
        load(tmp_path / "out")
    with pytest.raises(WeightLoadError, match="sharded_state expects model-rank-"):
        load(folder, load_format="sharded_state")
    files[1].write_bytes(files[1].read_bytes()[:-100])
    with pytest.raises(WeightLoadError, match="damaged"):
        load(tmp_path / "out", TPGroup(1, 2), load_format="sharded_state")


@pytest.mark.parametrize("name", ["gptq-4-order", "awq-symmetric", "ct-w4a16", "fp8-static"])
def test_quantized_parts_stay_as_they_are_stored(tmp_path, name, monkeypatch):
    replace_ops(monkeypatch, NativeOps())
    folder, _ = write(name, tmp_path, stores_head=True)
    files = save(str(folder), tmp_path / "out", 2, "float32")
    tp = TPGroup(1, 2)
    got = weights_of(load(tmp_path / "out", tp, load_format="sharded_state"))
    want = weights_of(load(folder, tp))
    assert all(torch.equal(got[path], want[path]) for path in want)
    tensors = load_file(files[1])
    next(t for key, t in tensors.items() if "scale" in key).fill_(float("nan"))
    save_file(tensors, files[1])
    with pytest.raises(WeightLoadError, match=r"scales? contains nan: scales are positive"):
        load(tmp_path / "out", tp, load_format="sharded_state")


def load_part(folder, tp: TPGroup, stage: Stage, **values: Any) -> nn.Module:
    config = make_config(folder, **values)
    return load_model(config, tp, torch.device("cpu"), stage=stage)


@pytest.mark.parametrize("family", ["llama", "granite_code"])  # granite_code has tied embeddings
def test_each_stage_gets_its_own_layers(tiny_model, tmp_path, family):
    folder, out = tiny_model(family), tmp_path / "out"
    files = save(str(folder), out, 2, "float32", 2)
    assert [file.name for file in files] == [
        f"model-rank-{rank}-part-0.safetensors" for rank in range(4)
    ]
    num_layers = read_arch(folder).num_layers
    for index, rank in product((0, 1), (0, 1)):
        part = TPGroup(rank, 2), Stage.of(index, 2, num_layers)
        got = load_part(out, *part, load_format="sharded_state").state_dict()
        want = load_part(folder, *part).state_dict()
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
    with pytest.raises(WeightLoadError, match=r"tensor-parallel-size is 1 and --pipeline.* is 2"):
        load_part(out, TPGroup(), Stage.of(0, 2, num_layers), load_format="sharded_state")
    message = r"tensor_parallel_size=2, .* this rank needs the part tensor_parallel_size=4, .* Save"
    with pytest.raises(WeightLoadError, match=message):
        load(out, TPGroup(1, 4), load_format="sharded_state")
    uneven = Stage.of(1, 2, 4, (3, 1))
    with pytest.raises(WeightLoadError, match=r"first_layer=., .* needs .* first_layer=3, last_l"):
        load_part(out, TPGroup(0, 2), uneven, load_format="sharded_state")


def test_scales_of_a_cache_are_kept(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "in")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([0.5, 0.25])
    save_file(tensors, folder / "model.safetensors")
    save(str(folder), tmp_path / "out", 1, "float32")
    attn = load(tmp_path / "out", load_format="sharded_state").model.layers[0].self_attn.attn
    assert (attn.key_scales.tolist(), attn.value_scales.tolist()) == ([0.5, 0.25], [1.0, 1.0])
    save(str(folder), tmp_path / "split", 2, "float32")
    parts = [load(tmp_path / "split", TPGroup(r, 2), load_format="sharded_state") for r in (0, 1)]
    found = [part.model.layers[0].self_attn.attn.key_scales.tolist() for part in parts]
    assert found == [[0.5], [0.25]]
