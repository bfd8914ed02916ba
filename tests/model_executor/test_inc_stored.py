"""Test `QUANT_CONFIG` with FP8 checkpoints: they are measured and rounded like the equal dense
checkpoints.
"""

import json
from pathlib import Path

import pytest

from tests.model_executor.helpers import logits_of, prompt_of
from tests.model_executor.inc_models import measure, quantize
from tests.quantized_checkpoints import write
from vllm.model_executor.layers.stored.stored_linear import StoredLinear
from vllm.model_executor.quantization.formats.fp8 import Fp8Linear
from vllm.ops import get_ops, set_ops
from vllm.ops.cpu.operators import CPUOps, load_cpu_kernels


@pytest.fixture(autouse=True)
def kernels():
    if load_cpu_kernels() is None:
        pytest.skip("the kernels are not built")
    before = get_ops()
    set_ops(CPUOps())
    yield
    set_ops(before)


@pytest.fixture(scope="module", params=["deepseek_v3", "llama"])
def folders(request, tiny_model, tmp_path_factory) -> tuple[Path, Path]:
    """Return an FP8 checkpoint with blocks of 128 x 128, including its head, and a dense checkpoint
    with the same weights.
    """
    folder = tmp_path_factory.mktemp("stored")
    return write("fp8-block", folder, tiny_model(request.param), stores_head=True)


def files_of(model: Path, folder: Path) -> tuple[Path, dict]:
    folder.mkdir()
    return folder, measure(model, folder)


def test_measurements_and_tokens_are_those_of_the_dense_twin(folders, tmp_path):
    ids = prompt_of(20)
    stored, dense = (files_of(model, tmp_path / model.name) for model in folders)
    assert stored[1]["Nodes"].keys() == dense[1]["Nodes"].keys()
    for name, node in dense[1]["Nodes"].items():
        found = stored[1]["Nodes"][name]
        if "params" in node:
            weights = (each["params"]["weight"][0] for each in (found, node))
            assert next(weights) == pytest.approx(next(weights)), name
        if node["inputs"]:
            assert found["inputs"][0][0] == pytest.approx(node["inputs"][0][0], rel=1e-3), name
    of_stored, of_dense = (
        quantize(model, files, scale_method="maxabs_pow2")
        for model, (files, _) in zip(folders, (stored, dense), strict=True)
    )
    got, want = logits_of(of_stored, ids), logits_of(of_dense, ids)
    assert (got - want).abs().max() < 0.02 * want.abs().max()


def test_blocked_layers_stay_as_they_are_stored(folders, tmp_path):
    files, _ = files_of(folders[0], tmp_path / "files")
    model = quantize(folders[0], files, blocked_names=(r"o_proj", r"moe_op"))
    methods = {
        name: type(layer.method)
        for name, layer in model.named_modules()
        if isinstance(getattr(layer, "method", None), StoredLinear)
    }
    assert methods["model.layers.1.self_attn.o_proj"] is Fp8Linear
    assert methods["model.layers.0.mlp.gate_up_proj"] is not Fp8Linear
    scales = json.loads((files / "inc_output_hooks_maxabs_MAXABS_HW_0_1.json").read_text())
    assert not any("o_proj" in name or "moe_op" in name for name in scales["Nodes"])
