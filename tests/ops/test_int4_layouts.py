"""Test int4 weights in the layouts of GPTQ and AWQ against the descriptions of these formats, on
every processor.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.loops import loop_over
from vllm.ops.cpu.operators import load_cpu_kernels
from vllm.ops.cpu.weights.int4_layouts import make_groups
from vllm.ops.cpu.weights.linear import PackedWeight
from vllm.ops.cpu.weights.stored import pack_stored
from vllm.ops.cpu.weights.weight_format import WeightFormat
from vllm.ops.stored_weight import GroupedWeight

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]

pytestmark = pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def words_of(numbers: Tensor, order: list[int]) -> Tensor:
    """Pack 4-bit values: [..., 8 * W] -> [..., W] int32. Value order[i] of eight is in the bits
    from 4 i on.
    """
    eights = numbers.long().unflatten(-1, (-1, 8))[..., order]
    words = (eights << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).int()


@dataclass
class Checkpoint:
    """A quantized weight as integers, and in the layouts of checkpoints."""

    q: Tensor
    """[in_features, out_features], 0 to 15."""
    zeros: Tensor
    """[G, out_features], 0 to 15."""
    scales: Tensor
    """[G, out_features]"""
    groups: Tensor
    """[in_features]: the group of each input."""

    @classmethod
    def random(cls, num_out: int, num_in: int, group_size: int) -> "Checkpoint":
        shape = num_in // group_size, num_out
        scales = (torch.rand(shape) + 0.1) * torch.tensor([1e-6, 0.01, 30.0])[
            torch.arange(num_out) % 3
        ]
        return cls(
            torch.randint(16, (num_in, num_out)),
            torch.randint(16, shape),
            scales.half(),
            torch.arange(num_in) // group_size,
        )

    def dense(self) -> Tensor:
        """Return the weight, [out_features, in_features] float64."""
        steps = self.q - self.zeros[self.groups]
        return (steps * self.scales.double()[self.groups]).T

    def gptq(self, g_idx: Tensor | None = None) -> PackedWeight:
        words = words_of(self.q.T, list(range(8))).T.contiguous()
        return self._packed(words=words, groups=g_idx)

    def awq(self) -> PackedWeight:
        return self._packed(words=words_of(self.q, AWQ_ORDER), is_awq=True)

    def _packed(self, **stored: Any) -> PackedWeight:
        zeros = self.zeros.to(torch.int16)
        weight = GroupedWeight(bits=4, scales=self.scales.float(), zeros=zeros, **stored)
        packed = pack_stored(weight)
        assert packed is not None
        is_int4 = packed.weight_format is WeightFormat.INT4
        assert is_int4 or self.scales.isnan().any(), "the kernels of int4 are under test"
        return packed


def rows_of(packed: PackedWeight) -> Tensor:
    return packed.rows(torch.arange(packed.out_features), FLOAT32)


SHAPES = [
    *((64, 64, 32), (200, 192, 64), (72, 512, 128), (8, 200, 200), (128, 768, 384)),
    *((72, 688, 16), (136, 520, 8)),
]


@loop_over("num_out, num_in, group_size", SHAPES)
def test_weights_are_those_of_the_checkpoint(isa, num_out, num_in, group_size):
    checkpoint = Checkpoint.random(num_out, num_in, group_size)
    for packed in (checkpoint.gptq(), checkpoint.awq()):
        torch.testing.assert_close(rows_of(packed).double(), checkpoint.dense(), rtol=1e-6, atol=0)


@loop_over("dtype", [FLOAT32, BFLOAT16])
@loop_over("num_out, num_in, group_size", SHAPES)
def test_products_agree_with_the_weights_in_float64(isa, num_out, num_in, group_size, dtype):
    """The tolerance is the error of rounding the inputs of a block to 127 steps on each side."""
    checkpoint = Checkpoint.random(num_out, num_in, group_size)
    bias = torch.randn(num_out).to(dtype)
    for packed in (checkpoint.gptq(), checkpoint.awq()):
        for num_rows in (1, 2, 6, 7, 64):
            x = torch.randn(num_rows, num_in).to(dtype)
            got = packed.linear(x, bias).double()
            want = F.linear(x.double(), checkpoint.dense(), bias.double())
            allowed = 0.05 * checkpoint.dense().norm(dim=1) + 2**-8 * want.abs()
            assert ((got - want).abs() <= allowed).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_reaches_the_result(isa, bad):
    checkpoint = Checkpoint.random(72, 64, 32)
    checkpoint.scales[1, 3] = bad
    for packed in (checkpoint.gptq(), checkpoint.awq()):
        is_finite = packed.linear(torch.ones(2, 64)).isfinite()
        assert is_finite.all(0).tolist() == [output != 3 for output in range(72)]


def test_a_zero_point_of_16_is_kept():
    checkpoint = Checkpoint.random(64, 64, 32)
    checkpoint.zeros[:] = 16  # 16 is a zero point that the first GPTQ format can store
    torch.testing.assert_close(
        rows_of(checkpoint.gptq()).double(), checkpoint.dense(), rtol=1e-6, atol=0
    )


def test_zero_points_are_stored_only_when_they_differ():
    checkpoint = Checkpoint.random(64, 256, 128)
    assert checkpoint.awq().num_bytes == 64 * 256 // 2 + 2 * 64 * 3 + 64 * 4
    checkpoint.zeros[:] = 8
    for packed in (checkpoint.awq(), checkpoint.gptq()):
        assert packed.num_bytes == 64 * 256 // 2 + 2 * 64 * 2 + 64 * 4
        torch.testing.assert_close(rows_of(packed).double(), checkpoint.dense(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_inputs_of_a_group_may_come_from_everywhere(isa, dtype):
    checkpoint = Checkpoint.random(72, 256, 64)
    checkpoint.groups = checkpoint.groups[torch.randperm(256)]
    packed = checkpoint.gptq(checkpoint.groups.int())
    torch.testing.assert_close(rows_of(packed).double(), checkpoint.dense(), rtol=1e-6, atol=0)
    order = checkpoint.groups.argsort(stable=True)
    sorted_twin = Checkpoint(
        checkpoint.q[order], checkpoint.zeros, checkpoint.scales, checkpoint.groups[order]
    ).gptq(checkpoint.groups[order])
    assert sorted_twin.order is None
    x = torch.randn(7, 256).to(dtype)
    assert torch.equal(packed.linear(x), sorted_twin.linear(x[:, order].contiguous()))


def test_tensors_that_the_kernels_cannot_read_are_refused():
    q, z, s = torch.zeros(8, 16).int(), torch.zeros(2, 16).byte(), torch.ones(2, 16)
    for message, words, scales, zeros in [
        (r"qweight must be .*, got torch.int64 \[8, 16\]", q.long(), s, z),
        (r"strides \[1, 8\]", torch.zeros(16, 8).int().T, s, z),
        (r"must fit 16 outputs, got \[2, 8\] and \[2, 16\]", q, s[:, :8], z),
        (r"must fit 16 outputs, got \[2, 16\] and \[1, 16\]", q, s, z[:1]),
        ("64 inputs cannot be divided into 3", q, torch.ones(3, 16), torch.zeros(3, 16)),
        ("multiple of 8 .* got groups of 4", q, torch.ones(16, 16), torch.zeros(16, 16)),
        (r"two matrices .*, got \[128\] and", q.flatten(), s, z),
        (r"two matrices .*, got \[0, 16\] and", q[:0], s, z),
        (r"two matrices .* and \[2, 16\] on meta", q, s.to("meta"), z),
    ]:
        with pytest.raises(ValueError, match=message):
            make_groups(torch.Size((16, 64)), words, scales, zeros, None)
