"""Test FP8 on the simulated cards, whose FP8 values have different ranges."""

import pytest
import torch

from gaudi_sim.bridge import SimBridge

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {"gaudi2": 240.0, "gaudi3": 448.0}


@pytest.fixture(params=LARGEST)
def largest(request) -> float:
    SimBridge(request.param)
    return LARGEST[request.param]


def quantize(x: torch.Tensor, scale=None, dtype=E4M3, **kwargs) -> torch.Tensor:
    return torch.ops.hpu.cast_to_fp8_v2(x.to("hpu"), scale, False, dtype=dtype, **kwargs)[0]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_cast_saturates_at_the_largest_number_of_the_card(largest):
    x = torch.tensor([1.0, -300.0, 1e6])
    expected = [1.0, -min(300.0, largest), largest]
    # rounded to three bits of mantissa, or limited to -240
    expected[1] = -288.0 if largest > 300 else -240.0
    assert quantize(x).float().tolist() == expected
    assert x.to("hpu").to(E4M3).float().tolist() == expected
    target = torch.zeros(3, dtype=E4M3, device="hpu")
    assert target.copy_(x.to("hpu")).float().tolist() == expected
    assert quantize(x, dtype=E5M2).float().tolist() == [1.0, -320.0, 57344.0]


@pytest.mark.parametrize("scale", [0.5, torch.tensor(0.5), torch.tensor([[0.5], [0.25]])])
def test_casting_multiplies_by_the_scale_there_and_back(largest, scale):
    x = torch.tensor([[16.0, -3.0], [8.0, 120.0]])
    on_card = scale.to("hpu") if isinstance(scale, torch.Tensor) and scale.dim() else scale
    quantized = quantize(x, on_card)
    assert quantized.float().tolist() == (x * scale).tolist()
    inverse = 1 / on_card
    back = torch.ops.hpu.cast_from_fp8(quantized, inverse, torch.bfloat16)
    assert back.dtype == torch.bfloat16 and back.tolist() == x.tolist()


def test_a_cast_reports_the_largest_size_before_the_scale(largest):
    x = torch.tensor([-3.0, 2.0]).to("hpu")
    amax = torch.ops.hpu.cast_to_fp8_v2(x, 0.5, False, True, E4M3)[1]
    assert amax.item() == 3 and amax.dtype == torch.float32
    assert torch.ops.hpu.cast_to_fp8_v2(x, 0.5, False, False, E4M3)[1].numel() == 0


def test_numbers_of_files_from_elsewhere_may_be_none_on_gaudi_2(largest):
    file = torch.tensor([240.0, 256.0, -256.0, 448.0]).to(E4M3).to("hpu")
    read = torch.ops.hpu.cast_from_fp8(file, None, torch.float32).cpu()
    if largest == 448:
        assert read.tolist() == [240, 256, -256, 448]
    else:
        inf, nan = float("inf"), float("nan")
        torch.testing.assert_close(read, torch.tensor([240, inf, -inf, nan]), equal_nan=True)


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_a_product_has_scales_of_rows_and_channels_and_a_bias(largest, trans_a, trans_b):
    a, b, bias = quantize(randn(5, 8)), quantize(randn(8, 3)), randn(3)
    row, channel = torch.rand(5, 1) + 0.5, torch.rand(3) + 0.5
    expected = (a.float().cpu() @ b.float().cpu()) * row * channel + bias
    out = torch.ops.hpu.fp8_gemm_v2(
        A=a.t() if trans_a else a,
        trans_A=trans_a,
        B=b.t() if trans_b else b,
        trans_B=trans_b,
        D=None,
        out_dtype=torch.float32,
        A_scale_inv=row.to("hpu"),
        B_scale_inv=channel.to("hpu"),
        bias=bias.to("hpu"),
        accumulate=False,
    )
    torch.testing.assert_close(out.cpu(), expected)


def test_a_product_with_plain_numbers_is_added_to_what_is_there(largest):
    a, b, d = quantize(randn(4, 6)), quantize(randn(6, 2)), randn(4, 2)
    expected = a.float().cpu() @ b.float().cpu() * 0.5 * 2.0 + d
    args = (a, False, b, False, d.to("hpu"), torch.float32, 0.5, 2.0, None, True)
    torch.testing.assert_close(torch.ops.hpu.fp8_gemm_v2(*args).cpu(), expected)
    with pytest.raises(RuntimeError, match="accumulate=True needs the tensor D"):
        torch.ops.hpu.fp8_gemm_v2(*args[:4], None, *args[5:])


def test_a_product_in_fp8_takes_half_the_time_of_bf16_on_gaudi_2(lazy):
    def seconds_of(product) -> float:
        lazy.synchronize()
        before = lazy.card.clock.compute_s
        product()
        lazy.synchronize()
        return lazy.card.clock.compute_s - before

    x = lazy.zeros((1024, 1024), torch.bfloat16)
    y = x.to(E4M3)
    bf16_s = seconds_of(lambda: x @ x)
    fp8_s = seconds_of(
        lambda: torch.ops.hpu.fp8_gemm_v2(y, False, y, False, None, torch.bfloat16, 1.0, 1.0)
    )
    assert fp8_s == pytest.approx(bf16_s * 432 / 865)


@pytest.mark.parametrize(
    "refused", [{"stochastic_rounding": True}, {"dtype": None}, {"dtype": torch.int8}]
)
def test_casts_that_are_not_simulated_are_refused(largest, refused):
    options = {"stochastic_rounding": False, "dtype": E4M3} | refused
    with pytest.raises(RuntimeError, match="cast_to_fp8_v2"):
        torch.ops.hpu.cast_to_fp8_v2(randn(2).to("hpu"), 1.0, **options)


def test_a_cache_in_fp8_is_written_and_read_by_rows(largest):
    cache = torch.zeros(6, 2, dtype=E4M3, device="hpu")
    rows = quantize(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    index = torch.tensor([4, 1]).to("hpu")
    cache.index_copy_(0, index, rows)
    cache.masked_fill_(torch.tensor([[False, True]]).to("hpu"), 1000.0)
    assert cache.index_select(0, index).float().tolist() == [[1, largest], [3, largest]]
    filled = cache.masked_fill(torch.ones(6, 2, dtype=torch.bool).to("hpu"), -1.0)
    assert filled.float().eq(-1).all() and not cache.float().eq(-1).any()


def test_arithmetic_in_fp8_is_left_to_the_host(eager):
    x = quantize(randn(3))
    x.view(3, 1).clone().to(torch.float32)
    assert eager.counters().cpu_fallbacks == {}
    assert (x * x).dtype == E4M3
    assert eager.counters().cpu_fallbacks == {"aten::mul.Tensor": 1}
