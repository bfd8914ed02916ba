"""Test matmuls of stored weights with 1 to 512 tokens on every processor.

Results equal the formula, and the bits of a token do not depend on the other tokens.
"""

import pytest
import torch

from tests.loops import loop_over
from tests.quantized_checkpoints import FORMATS
from vllm.ops.cpu.library import load_cpu_kernels
from vllm.ops.cpu.weights.stored import pack_stored
from vllm.ops.stored_weight import (
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    StoredWeight,
    unpack_awq,
    unpack_bits,
)

pytestmark = pytest.mark.skipif(load_cpu_kernels() is None, reason="the kernels are not built")

NUM_OUT, NUM_IN = 160, 256
MAX_ROWS = 512
SOME_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 127, 128, 200, 256, 511, 512)


def stored(name: str) -> tuple[StoredWeight, torch.Tensor]:
    """Return a weight in the format of a checkpoint, and its dense weight."""
    torch.manual_seed(0)
    weight = torch.randn(NUM_OUT, NUM_IN) * 0.08
    tensors, dense = FORMATS[name].quantize(weight)
    if "qweight" in tensors:
        is_awq = name == "awq"
        bits = 4 if is_awq else FORMATS[name].settings["bits"]
        zeros = unpack_awq(tensors["qzeros"]) if is_awq else unpack_bits(tensors["qzeros"], bits)
        is_first = FORMATS[name].settings.get("checkpoint_format") == "gptq"
        groups = tensors.get("g_idx") if name.endswith("order") else None
        grouped = GroupedWeight(
            words=tensors["qweight"].contiguous(),
            is_awq=is_awq,
            bits=bits,
            scales=tensors["scales"].float(),
            zeros=zeros.to(torch.int16) + is_first,
            groups=groups,
        )
        return grouped, dense
    scales = next(tensors[key] for key in ("weight_scale", "weight_scale_inv") if key in tensors)
    if tensors["weight"].dtype == torch.int8:
        return Int8Weight(numbers=tensors["weight"], scales=scales.flatten()), dense
    block = 128 if "inv" in "".join(tensors) else NUM_IN
    scales = (
        scales.repeat_interleave(128, 0)[:NUM_OUT] if block == 128 else scales.expand(NUM_OUT, 1)
    )
    return Fp8Weight(numbers=tensors["weight"], scales=scales, block_inputs=block), dense


KINDS = {
    # Largest error of a product, relative to its size. int8 and int4 round their inputs.
    "fp8-static": 2**-7,
    "fp8-block": 2**-7,
    "ct-w8a8": 0.02,
    "gptq-2": 0.03,
    "gptq-3": 0.03,
    "gptq-4": 0.03,
    "gptq-4-order": 0.03,
    "gptq-4-rows": 0.03,
    "gptq-8": 2**-7,
    "gptq-8-order": 2**-7,
    "awq": 0.03,
}


@loop_over("name", KINDS)
def test_a_row_has_the_same_bits_among_any_others(isa, name):
    check(name, torch.bfloat16, SOME_ROWS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", KINDS)
def test_any_number_of_rows(isa, name, dtype):
    check(name, dtype, range(1, MAX_ROWS + 1))


def check(name, dtype, counts):
    weight, dense = stored(name)
    assert torch.equal(weight.dequantize(), dense)
    packed = pack_stored(weight)
    x = torch.randn(MAX_ROWS, NUM_IN).to(dtype)
    want = x.double() @ dense.double().T
    got = packed.linear(x, None)
    size = x.double().norm(dim=1)[:, None] * dense.double().norm(dim=1)
    assert ((got.double() - want).abs() <= KINDS[name] * (want.abs() + size)).all()
    for count in counts:
        assert torch.equal(packed.linear(x[:count].contiguous(), None), got[:count]), count
