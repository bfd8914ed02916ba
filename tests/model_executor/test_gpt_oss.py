"""Test GPT-OSS checkpoints as they are published, with experts in MXFP4."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.gpt_oss_checkpoint import mxfp4_by_definition, write_gpt_oss
from tests.model_executor.helpers import load, logits_of, prompt_of
from vllm.distributed import TPGroup
from vllm.errors import WeightLoadError
from vllm.model_executor.layers.experts import Experts
from vllm.ops import get_ops, set_ops
from vllm.ops.cpu.library import load_cpu_kernels
from vllm.ops.cpu.operators import CPUOps
from vllm.ops.native.operators import NativeOps
from vllm.ops.stored_weight import Mxfp4Weight

pytest.importorskip("transformers.models.gpt_oss")


def test_blocks_are_dequantized_by_the_definition_of_the_format():
    torch.manual_seed(0)
    blocks = torch.randint(256, (3, 2, 16), dtype=torch.uint8)
    blocks[0, 0] = torch.arange(16) * 17
    scales = torch.tensor([[127, 0], [120, 130], [1, 254]], dtype=torch.uint8)
    weight = Mxfp4Weight(blocks=blocks, scales=scales)
    assert torch.equal(weight.dequantize(), mxfp4_by_definition(blocks, scales))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return the folders of a dense checkpoint, and of the same model with experts in MXFP4."""
    return write_gpt_oss(tmp_path_factory.mktemp("gpt_oss"))


@pytest.fixture
def use_ops():
    """Return a function that installs operators; the earlier ones are restored after the test."""
    before = get_ops()
    yield set_ops
    set_ops(before)


def test_mxfp4_gives_the_logits_of_its_numbers(checkpoints, use_ops):
    use_ops(NativeOps())
    dense, packed = (load(folder) for folder in checkpoints)
    tokens = prompt_of(40)
    assert torch.equal(logits_of(packed, tokens), logits_of(dense, tokens))


def test_dense_experts_may_have_the_settings_of_the_original(checkpoints, tmp_path):
    """A fine-tuned model may have a copy of the original config.json, which says MXFP4."""
    dense, packed = checkpoints
    shutil.copy(packed / "config.json", tmp_path)
    shutil.copy(dense / "model.safetensors", tmp_path)
    found, want = (logits_of(load(folder), prompt_of(9)) for folder in (tmp_path, dense))
    assert torch.equal(found, want)


@pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")
def test_experts_stay_in_four_bits(checkpoints, use_ops):
    dense, packed = checkpoints
    use_ops(NativeOps())
    want = logits_of(load(dense), prompt_of(40))
    use_ops(CPUOps())
    model = load(packed)
    experts = [layer for layer in model.modules() if isinstance(layer, Experts)]
    assert experts
    for layer in experts:
        size = 3 * layer.intermediate_size * layer.hidden_size * layer.method.packed.num_experts
        # small matrices of [64, 192] need padding, so allow 5.5 bits per weight
        assert layer.method.packed.num_bytes < size * 5.5 / 8
    error = logits_of(model, prompt_of(40)) - want
    assert error.norm() / want.norm() < 0.02  # inputs are rounded to int8


@pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")
def test_groups_that_straddle_ranks_stay_in_four_bits(checkpoints, use_ops):
    """With 192 features on 4 ranks, a rank has 48 inputs of `down_proj`, which are one and a half
    groups.
    """
    use_ops(NativeOps())
    dense, packed = (
        next(m for m in load(folder, TPGroup(3, 4)).modules() if isinstance(m, Experts))
        for folder in checkpoints
    )
    assert torch.equal(packed.gate_up, dense.gate_up)
    assert torch.equal(packed.down, dense.down)
    use_ops(CPUOps())
    kept = next(m for m in load(checkpoints[1], TPGroup(3, 4)).modules() if isinstance(m, Experts))
    x, ids = torch.randn(5, kept.hidden_size), torch.tensor([[0, 1, 4]] * 5)
    want = dense.method.apply(dense, x, ids, torch.ones(5, 3))
    error = kept.method.packed.forward(x, ids, torch.ones(5, 3)) - want
    assert error.norm() / want.norm() < 0.02  # inputs are rounded to int8


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_part_of_the_experts(checkpoints, use_ops, rank):
    use_ops(NativeOps())
    dense, packed = (
        next(m for m in load(folder, TPGroup(rank, 2)).modules() if isinstance(m, Experts))
        for folder in checkpoints
    )
    assert torch.equal(packed.gate_up, dense.gate_up)
    assert torch.equal(packed.down, dense.down)


def test_blocks_without_scales_are_refused(checkpoints, tmp_path):
    _, packed = checkpoints
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    (tmp_path / "config.json").write_text((packed / "config.json").read_text())
    for scales, message in (
        (None, r"experts\.down_proj_scales is missing from the checkpoint, which has model"),
        (tensors[name][:, :5], r"uint8 \[6, 64, 6, 16\] and scales torch\.uint8 \[6, 5, 6\]"),
        (tensors[name].float(), r"scales torch\.float32"),
        (
            tensors[name].index_fill(0, torch.tensor(2), 255),
            r"down_proj_scales contains 255, .* NaN",
        ),
    ):
        changed = tensors | {name: scales} if scales is not None else dict(tensors)
        if scales is None:
            del changed[name]
        save_file({k: v.contiguous() for k, v in changed.items()}, tmp_path / "model.safetensors")
        with pytest.raises(WeightLoadError, match=message):
            load(tmp_path)
