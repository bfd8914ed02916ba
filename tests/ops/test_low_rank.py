"""Test the low-rank matmuls of adapters: the kernels of every instruction set against torch."""

from functools import cache

import pytest
import torch
from torch import Tensor

from tests.loops import loop_over
from vllm.ops.cpu.operators import CPUOps
from vllm.ops.lora_weights import AdaptedLayer, AdaptedRows, LoRAHeads, LoRAWeights
from vllm.ops.native.operators import NativeOps

NATIVE = NativeOps()
LAYERS = [
    AdaptedLayer(0, 0, 70, ((0, 64), (64, 5), (69, 130))),
    AdaptedLayer(1, 3, 16, ((0, 33),)),
]
RANKS = (1, 8, 13, 64, 256)


@cache
def adapters(dtype: torch.dtype, *, seed: int = 0) -> list[list[LoRAWeights | None]]:
    """Return an adapter of each rank; some leave a projection unchanged, or share A between
    several."""
    rng = torch.Generator().manual_seed(seed)
    found = []
    for number, rank in enumerate(RANKS):
        parts: list[LoRAWeights | None] = []
        for layer in LAYERS:
            a = torch.randn(rank, layer.in_features, generator=rng).to(dtype)
            for index, (_, size) in enumerate(layer.parts):
                if index == number % 4:
                    parts.append(None)
                    continue
                b = torch.randn(size, rank, generator=rng) / rank
                parts.append(LoRAWeights(a, b.to(dtype)))
        found.append(parts)
    return found


def apply(ops: NativeOps, layer: AdaptedLayer, y: Tensor, x: Tensor, of_rows, dtype, weights):
    prepared = [ops.prepare_adapter(LAYERS, parts, dtype) for parts in adapters(weights)]
    rows = AdaptedRows([*prepared, None], torch.tensor(of_rows, dtype=torch.int32))
    result = y.clone()
    assert ops.add_low_rank(result, x, layer, rows) is result
    return result


@loop_over("num_threads", [1, 3])
@loop_over("weights", [torch.float32, torch.bfloat16, torch.float16])
@loop_over("dtype", [torch.float32, torch.bfloat16])
def test_kernels_give_what_torch_gives(isa, dtype, weights, num_threads, monkeypatch):
    torch.set_num_threads(num_threads)
    torch.manual_seed(1)
    rtol, atol = (1e-5, 1e-4) if dtype == torch.float32 else (2**-7, 2**-5)
    for layer in LAYERS:
        for num_rows in (1, 5, 150):
            wide = torch.randn(num_rows, layer.in_features + 3).to(dtype)
            x, y = wide[:, 2:-1], torch.randn(num_rows, layer.out_features).to(dtype)
            of_rows = torch.randint(-1, len(RANKS), (num_rows,)).tolist()
            got = apply(CPUOps(), layer, y, x, of_rows, dtype, weights)
            want = apply(NATIVE, layer, y, x, of_rows, dtype, weights)
            torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
            has_none = [number for number, adapter in enumerate(of_rows) if adapter < 0]
            assert torch.equal(got[has_none], y[has_none])
            # The bits of a row's result do not depend on the other rows.
            for row in {0, num_rows // 2, num_rows - 1}:
                one = slice(row, row + 1)
                alone = apply(CPUOps(), layer, y[one], x[one], of_rows[one], dtype, weights)
                assert torch.equal(alone, got[one])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_have_inputs_and_outputs_of_their_own(isa, dtype):
    """Elements after the output of a head remain unchanged. All heads may share one A or one B."""
    torch.manual_seed(2)
    heads = [AdaptedLayer(number, number, 40, ((0, 70),)) for number in range(3)]
    shared = torch.randn(70, 5, dtype=dtype)
    parts = [LoRAWeights(torch.randn(40, 5, dtype=dtype).T, shared) for _ in heads]
    x, y = torch.randn(9, 3, 44, dtype=dtype)[..., 3:-1], torch.randn(9, 3, 72, dtype=dtype)
    of_rows = torch.tensor([0, -1, 0, 0, -1, 0, 0, 0, -1], dtype=torch.int32)
    found = []
    for ops in (NATIVE, CPUOps()):
        rows = AdaptedRows([ops.prepare_adapter(heads, parts, dtype)], of_rows)
        found.append(ops.add_low_rank(y.clone(), x, LoRAHeads(heads), rows))
    rtol, atol = (1e-5, 1e-4) if dtype == torch.float32 else (2**-7, 2**-4)
    torch.testing.assert_close(*found, rtol=rtol, atol=atol)
    assert torch.equal(found[1][of_rows < 0], y[of_rows < 0])
    assert torch.equal(found[1][..., 70:], y[..., 70:]) and not torch.equal(found[1], y)


@pytest.mark.parametrize("ops", [NATIVE, CPUOps()], ids=["native", "cpu"])
def test_what_does_not_fit_is_refused(ops):
    layer, dtype = LAYERS[1], torch.float32
    x, y = torch.zeros(2, 16), torch.zeros(2, 33)
    for missing in (len(RANKS), len(RANKS) + 1):
        with pytest.raises(IndexError, match="LoRA slot"):
            apply(ops, layer, y, x, [0, missing], dtype, dtype)
    with pytest.raises(ValueError, match="do not fit the layer"):
        apply(ops, layer, y, x[:, :15], [0, 1], dtype, dtype)
    message = "do not fit the layer" if ops is NATIVE else r"must be int32 \[2\].* got .*\[3\]"
    with pytest.raises(ValueError, match=message):
        apply(ops, layer, y, x, [0, 1, 2], dtype, dtype)
