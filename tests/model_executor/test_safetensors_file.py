"""Test reading tensors of a safetensors file into existing memory."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.model_executor.helpers import make_config
from tests.reach import forbid_read_buffers
from vllm.distributed import TPGroup
from vllm.errors import WeightLoadError
from vllm.model_executor.layers.cpu_methods import CPULinear
from vllm.model_executor.layers.linear import ParallelLinear
from vllm.model_executor.loader import load_model, safetensors_file
from vllm.model_executor.loader.safetensors_file import read_safetensors
from vllm.model_executor.quantization import Quantization
from vllm.ops.cpu.library import load_cpu_kernels

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
PARTS = [(), (slice(2, 9),), (slice(None), slice(1, 3)), (slice(1, 8), slice(2, 5))]


@pytest.fixture(autouse=True, params=[1, 64, 8 << 20])
def part_bytes(request, monkeypatch):
    """Set the bytes of one read: less than a row, a few rows, or everything."""
    monkeypatch.setattr(safetensors_file, "PART_BYTES", request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_as_it_is(tmp_path, dtype):
    stored = (torch.arange(60).view(12, 5) % 7 - 3).to(dtype)
    save_file({"a": torch.ones(3), "b": stored}, tmp_path / "x.safetensors")
    for name, source in read_safetensors(tmp_path / "x.safetensors"):
        if name == "b":
            for part in PARTS:
                assert torch.equal(source.read(part), stored[part])


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_part_fills_a_part_of_a_tensor_of_any_dtype(tmp_path, part, dtype):
    stored = torch.arange(60.0).view(12, 5).bfloat16()
    save_file({"a": stored}, tmp_path / "x.safetensors")
    want = stored[part].to(dtype)
    target = torch.full((want.shape[0] + 2, want.shape[1] + 2), -1, dtype=dtype)
    for _, source in read_safetensors(tmp_path / "x.safetensors"):
        source.fill(target[1:-1, 1:-1], part)
    assert torch.equal(target[1:-1, 1:-1], want)
    assert (target == -1).sum() == target.numel() - want.numel()


@pytest.mark.parametrize("part", [(), (slice(3, 9),), (slice(0, 12), slice(0, 5))], ids=str)
def test_whole_rows_need_no_memory_beside_their_own(tmp_path, monkeypatch, part):
    stored = torch.arange(60.0).view(12, 5)
    save_file({"a": stored}, tmp_path / "x.safetensors")
    forbid_read_buffers(monkeypatch)
    for _, source in read_safetensors(tmp_path / "x.safetensors"):
        assert torch.equal(source.read(part), stored[part])


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0), (7,), (2, 3, 4)])
def test_any_number_of_dimensions(tmp_path, shape):
    stored = torch.randn(shape)
    save_file({"a": stored}, tmp_path / "x.safetensors")
    for _, source in read_safetensors(tmp_path / "x.safetensors"):
        assert torch.equal(source.read(()), stored)
        target = torch.empty(shape, dtype=torch.float64)
        source.fill(target)
        assert torch.equal(target, stored.double())


def test_tensors_come_in_the_order_of_the_file(tmp_path):
    save_file({name: torch.ones(2) for name in "cab"}, tmp_path / "x.safetensors")
    header = (tmp_path / "x.safetensors").read_bytes()[8:].partition(b"}}")[0] + b"}}"
    offsets = {n: e["data_offsets"][0] for n, e in json.loads(header).items()}
    names = [name for name, _ in read_safetensors(tmp_path / "x.safetensors")]
    assert names == sorted(offsets, key=offsets.__getitem__)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(100)}, path)
    with pytest.raises(WeightLoadError, match="ends before its last tensor"):
        for _, source in read_safetensors(path):
            path.write_bytes(path.read_bytes()[:-8])
            source.read(())


@pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")
def test_layers_are_packed_before_the_last_one_has_memory(tiny_model):
    dense: list[set[ParallelLinear]] = []
    seen: set[ParallelLinear] = set()

    class Recording(CPULinear):
        def finish(self, layer: ParallelLinear) -> None:
            seen.add(layer)
            dense.append({other for other in seen if hasattr(other, "weight")})
            assert not layer.weight.is_meta
            super().finish(layer)

    class RecordingFormat(Quantization):
        def linear_method(self, name: str, layer: ParallelLinear) -> CPULinear:
            return Recording("int8")

    config = make_config(tiny_model("llama"))
    model = load_model(config, TPGroup(), torch.device("cpu"), RecordingFormat())
    assert seen == {m for m in model.modules() if isinstance(m, ParallelLinear)}
    assert all(len(layers) == 1 for layers in dense)
