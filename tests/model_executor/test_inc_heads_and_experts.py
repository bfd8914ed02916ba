"""Test FP8 with the files of Intel Neural Compressor for output heads and experts."""

import pytest
import torch

from tests.model_executor.helpers import load
from tests.model_executor.inc_models import measure, quantize, without, write
from vllm.config.quantization.inc import SCALE_METHODS
from vllm.model_executor.layers.stored.stored_experts import RoundedExperts
from vllm.model_executor.layers.stored.stored_linear import StoredHead
from vllm.model_executor.quantization.inc.files import find_file, read_file
from vllm.model_executor.quantization.inc.scales import round_weight
from vllm.ops import get_ops, set_ops
from vllm.ops.cpu.operators import CPUOps, load_cpu_kernels
from vllm.ops.native.operators import NativeOps

HEAD = "lm_head"


@pytest.fixture(scope="module")
def measured_mixture(tiny_model, tmp_path_factory):
    folder = tiny_model("mixtral")
    return folder, measure(folder, tmp_path_factory.mktemp("mixture"))


@pytest.fixture
def mixture(measured_mixture):
    """Return folder and content of the files for a tiny Mixtral, which is loaded with the CPU
    kernels.
    """
    if load_cpu_kernels() is None:
        pytest.skip("the kernels are not built")
    before = get_ops()
    set_ops(CPUOps())
    yield measured_mixture
    set_ops(before)


@pytest.mark.parametrize(
    ("settings", "is_head_fp8", "are_experts_fp8"),
    [
        ({}, True, True),
        ({"scale_method": "act_maxabs_pow2_weights_pcs_opt_pow2"}, True, True),
        ({"blocked_types": ("FusedMoE",), "blocked_names": (HEAD,)}, False, False),
        ({"blocked_types": ("ParallelLMHead",)}, False, True),
        ({"blocked_names": (r"moe_op\b",)}, True, False),
        ({"allowed_names": (HEAD,)}, True, False),
        ({"allowed_types": ("VllmMixtureOfExpertsOp",)}, False, True),
        ({"scale_method": "maxabs_pcs_pow2"}, True, True),
    ],
)
def test_heads_and_experts_take_part_as_the_lists_say(
    mixture, tmp_path, settings, is_head_fp8, are_experts_fp8
):
    """Their outputs must equal the outputs of the dequantized weights."""
    folder, content = mixture
    write(tmp_path / "inc_output_hooks_maxabs_0_1.json", content)
    model, dense = quantize(folder, tmp_path, **settings), load(folder)
    head = model.get_submodule(HEAD)
    assert (type(head.method) is StoredHead) == is_head_fp8
    name = "model.layers.1.mlp.experts"
    experts, others = model.get_submodule(name), dense.get_submodule(name)
    assert (type(experts.method) is RoundedExperts) == are_experts_fp8
    if not are_experts_fp8:
        return
    method = SCALE_METHODS[settings.get("scale_method", "maxabs_hw")]
    weights = [
        torch.stack([round_weight(w, method, 448.0, 0.5).dequantize() for w in both])
        for both in (others.gate_up, others.down)
    ]
    assert not torch.equal(weights[1], others.down)
    x = torch.randn(7, others.hidden_size)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(7)])
    shares = torch.rand(7, 2)
    torch.testing.assert_close(
        experts.method.packed.forward(x, ids, shares),
        NativeOps().moe(x, ids, shares, *weights),
        rtol=1e-4,
        atol=1e-5,
    )
    scales = find_file(str(tmp_path / "inc_output"), 0, 1, "maxabs_hw")
    if not settings:
        node = read_file(scales, "Scale").find(f"{name}.moe_op.w2_list.3")
        assert node.weight == round_weight(others.down[3], method, 448.0, 0.5).scales[0].tolist()


def test_heads_and_experts_without_measurements_stay_as_they_are(mixture, tmp_path):
    folder, content = mixture
    for name in [name for name in content["Nodes"] if "moe_op" in name or name == HEAD]:
        content = without(content, name)
    write(tmp_path / "inc_output_hooks_maxabs_0_1.json", content)
    model = quantize(folder, tmp_path)
    assert type(model.get_submodule(HEAD).method) is not StoredHead
    experts = model.get_submodule("model.layers.1.mlp.experts")
    assert type(experts.method) is not RoundedExperts
