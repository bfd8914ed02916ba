"""Test every implementation of the operators against the torch reference, with one grid of
parameters.

The reference itself is checked against Hugging Face models, and its two attention operators against
each other.
"""

import math
from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.loops import loop_over
from vllm.ops import get_ops, set_ops
from vllm.ops.attention_options import AttentionOptions
from vllm.ops.cpu.operators import CPUOps
from vllm.ops.expert_options import ExpertGroups, Routing, RoutingOptions
from vllm.ops.native.operators import NativeOps

DTYPES = [torch.float32, torch.bfloat16]
NATIVE = NativeOps()
# One unit in the last place of bf16 is 2^-8 relative; sums in another order may differ by this
# much.
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-8},
}


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, **TOLERANCES[want.dtype])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def ops(vector_isa: str) -> NativeOps:
    """Use the C++ kernels, with each instruction set whose vectors differ, one after another."""
    return CPUOps()


@pytest.fixture
def matrix_ops(isa: str) -> NativeOps:
    """Use the C++ kernels, with each instruction set of this machine, one after another."""
    return CPUOps()


def packed_qkv(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as in a model: slices of one tensor, with strides in dimension 0."""
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_size, dtype=dtype)
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return q, k, v


class PagedCache:
    """Random keys and values of some requests in shuffled blocks. Slots without a token contain
    NaN, so that reading one is noticed.
    """

    def __init__(
        self,
        seq_lens: list[int],
        num_kv_heads: int,
        head_size: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        max_blocks = max(1, -(-max(seq_lens) // block_size))
        num_blocks = len(seq_lens) * max_blocks + 1
        shape = (num_blocks, block_size, num_kv_heads, head_size)
        self.keys = torch.full(shape, float("nan"), dtype=dtype)
        self.values = self.keys.clone()
        ids = torch.randperm(num_blocks - 1)[: len(seq_lens) * max_blocks] + 1
        # The block table is a slice of a wider table, so its rows are strided.
        wide = torch.zeros(len(seq_lens), max_blocks + 3, dtype=torch.int32)
        wide[:, :max_blocks] = ids.view(len(seq_lens), max_blocks)
        self.block_tables = wide[:, : max_blocks + 1]
        for row, seq_len in zip(self.block_tables, seq_lens, strict=True):
            slots = row.long()[:, None] * block_size + torch.arange(block_size)
            new = torch.randn(2, seq_len, num_kv_heads, head_size, dtype=dtype)
            self.keys.flatten(0, 1)[slots.flatten()[:seq_len]] = new[0]
            self.values.flatten(0, 1)[slots.flatten()[:seq_len]] = new[1]
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)

    def decode(
        self, ops: NativeOps, query: Tensor, window: int | None, rows: slice = slice(None)
    ) -> Tensor:
        scale = query.shape[-1] ** -0.5
        tables, seq_lens = self.block_tables[rows], self.seq_lens[rows]
        return ops.paged_attention_decode(
            query[rows], self.keys, self.values, tables, seq_lens, AttentionOptions(scale, window)
        )


# ---- norms and activation ------------------------------------------------------------------


@loop_over("dtype", DTYPES)
@loop_over("hidden", [1, 7, 64, 100, 576, 4096])
@loop_over("num_tokens", [0, 1, 33])
def test_rms_norm_agrees_with_reference(ops, num_tokens, hidden, dtype):
    x, weight = torch.randn(num_tokens, hidden, dtype=dtype) * 3, torch.randn(hidden, dtype=dtype)
    assert_close(ops.rms_norm(x, weight, 1e-6), NATIVE.rms_norm(x, weight, 1e-6))
    assert_close(ops.rms_norm(x, weight, 1e-6, 1), NATIVE.rms_norm(x, weight, 1e-6, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [20, 128])
def test_rms_norm_of_heads_in_a_packed_tensor(ops, head_size, dtype):
    query, key, _ = packed_qkv(9, 4, 2, head_size, dtype)
    weight = torch.randn(head_size, dtype=dtype)
    for heads in (query, key):
        got = ops.rms_norm(heads, weight, 1e-6)
        assert got.is_contiguous()
        assert_close(got, NATIVE.rms_norm(heads, weight, 1e-6))


@loop_over("dtype", DTYPES)
@loop_over("hidden", [7, 100, 4096])
@loop_over("num_tokens", [0, 1, 33])
def test_fused_add_rms_norm_agrees_with_reference(ops, num_tokens, hidden, dtype):
    x, residual = torch.randn(2, num_tokens, hidden, dtype=dtype)
    weight = torch.randn(hidden, dtype=dtype)
    want, want_residual = NATIVE.fused_add_rms_norm(x, residual, weight, 1e-5)
    got, got_residual = ops.fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(got_residual, want_residual)
    assert_close(got, want)
    want, _ = NATIVE.fused_add_rms_norm(x, residual, weight, 1e-5, 1)
    assert_close(ops.fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-5, 1)[0], want)


def test_a_norm_adds_one_to_its_weight_without_rounding_the_sum(ops):
    x, weight = torch.randn(3, 64).bfloat16(), (torch.randn(64) * 0.01).bfloat16()
    want = NATIVE.rms_norm(x.float(), weight.float() + 1, 1e-6).bfloat16()
    assert torch.equal(NATIVE.rms_norm(x, weight, 1e-6, 1), want)
    rounded = NATIVE.rms_norm(x, weight + 1, 1e-6)
    assert (ops.rms_norm(x, weight, 1e-6, 1) != want).sum() < (rounded != want).sum() / 10


@loop_over("dtype", DTYPES)
@loop_over("size", [1, 13, 160, 5000])
@loop_over("num_tokens", [0, 1, 33])
def test_silu_and_mul_agrees_with_reference(ops, num_tokens, size, dtype):
    x = torch.randn(num_tokens, 2 * size, dtype=dtype) * 10
    assert_close(ops.silu_and_mul(x), NATIVE.silu_and_mul(x))


@loop_over("dtype", DTYPES)
@loop_over("size", [1, 7, 64, 72, 1030])
@loop_over("has_weight", [True, False])
def test_layer_norm_agrees_with_reference(ops, has_weight, size, dtype):
    x = (torch.randn(5, size) * 3 + 2).to(dtype)
    weight, bias = (torch.randn(size).to(dtype) if has_weight else None for _ in range(2))
    assert_close(ops.layer_norm(x, weight, bias, 1e-5), NATIVE.layer_norm(x, weight, bias, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_norm_may_have_weights_of_each_head(ops, dtype):
    for heads in (*packed_qkv(9, 4, 2, 20, dtype)[:2], torch.randn(9, 4, 20, dtype=dtype)):
        weight, bias = torch.randn(heads.shape[1:], dtype=dtype), torch.randn(20, dtype=dtype)
        for given in (None, bias):
            want = NATIVE.layer_norm(heads, weight, given, 1e-5)
            assert_close(ops.layer_norm(heads, weight, given, 1e-5), want)
    for each in (ops, NATIVE):
        with pytest.raises(ValueError, match=r"\[3, 20\].* x .*\[9, 4, 20\]"):
            each.layer_norm(heads, weight[1:], None, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_of_extreme_gates(ops, dtype):
    gates = torch.tensor([-3e38, -1e4, -90.0, -0.0, 0.0, 90.0, 1e4, 3e38])
    x = torch.cat((gates, torch.ones(8)))[None].to(dtype)
    assert_close(ops.silu_and_mul(x), NATIVE.silu_and_mul(x))


@loop_over("dtype", DTYPES)
@loop_over("is_tanh", [False, True])
@loop_over("num_tokens, size", [(0, 4), (1, 1), (33, 160), (3, 5000)])
def test_gelu_and_mul_agrees_with_reference(ops, num_tokens, size, is_tanh, dtype):
    x = torch.randn(num_tokens, 2 * size, dtype=dtype) * 4
    assert_close(ops.gelu_and_mul(x, is_tanh), NATIVE.gelu_and_mul(x, is_tanh))
    wider = torch.randn(num_tokens, 2 * size + 3, dtype=dtype)[:, : 2 * size]
    assert_close(ops.gelu_and_mul(wider, is_tanh), NATIVE.gelu_and_mul(wider, is_tanh))
    for alone in (x, wider):
        assert_close(ops.gelu(alone, is_tanh), NATIVE.gelu(alone, is_tanh))
        assert_close(ops.quick_gelu(alone), NATIVE.quick_gelu(alone.float()).to(dtype))
        assert_close(ops.squared_relu(alone), NATIVE.squared_relu(alone))
        alphas = torch.tensor([0.7], dtype=dtype), torch.tensor([-1.2], dtype=dtype)
        assert_close(ops.xielu(alone, *alphas), NATIVE.xielu(alone, *alphas))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_tanh", [False, True])
def test_gelu_and_mul_of_extreme_gates(ops, is_tanh, dtype):
    gates = torch.tensor([-3e38, -1e4, -90.0, -10.0, -5.0, -0.0, 0.0, 5.0, 90.0, 1e4, 1e38])
    x = torch.cat((gates, torch.ones(11)))[None].to(dtype)
    assert_close(ops.gelu_and_mul(x, is_tanh), NATIVE.gelu_and_mul(x, is_tanh))
    assert_close(ops.gelu(x, is_tanh), NATIVE.gelu(x, is_tanh))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gate", [False, True])
def test_scale_rows_agrees_with_reference(ops, is_gate, dtype):
    for shape in ((1, 7), (33, 3, 20), (0, 8)):
        x = torch.randn(*shape[:-1], shape[-1] + 3, dtype=dtype)[..., :-3].contiguous()
        factor = torch.randn(len(x), 1, dtype=dtype) * 3
        want = NATIVE.scale_rows(x, factor, is_gate)
        assert_close(ops.scale_rows(x, factor, is_gate), want)
    packed = torch.randn(5, 9, 20, dtype=dtype)
    factor = torch.randn(5, 1, dtype=dtype)
    heads = packed[:, 2:5]
    assert_close(ops.scale_rows(heads, factor, is_gate), NATIVE.scale_rows(heads, factor, is_gate))
    for implementation in (ops, NATIVE):
        with pytest.raises(ValueError, match=r"factor.*\[4, 1\]"):
            implementation.scale_rows(heads, factor[1:], is_gate)


@loop_over("dtype", DTYPES)
@loop_over("routing", get_args(Routing))
def test_route_agrees_with_reference(ops, routing, dtype):
    for num_experts, top_k in ((4, 1), (7, 2), (60, 4), (128, 8), (300, 64), (5, 5), (90, 70)):
        logits = torch.randn(40, num_experts + 1)[:, :num_experts].to(dtype)
        # All values of a row differ: no rule says which one of equal values is chosen.
        logits = (logits.argsort(-1).float() * 4 / num_experts - 2).to(dtype)
        if len(logits[0].unique()) < num_experts:
            continue
        for scale in (1.0, 2.5):
            options = RoutingOptions(top_k=top_k, weights=routing, scale=scale, tolerance=0.3)
            want_ids, want = NATIVE.route(logits, options)
            ids, weights = ops.route(logits, options)
            assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
            assert torch.equal(ids, want_ids)
            torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-6)
    for implementation in (ops, NATIVE):
        with pytest.raises(ValueError, match="top_k is 6; it must be from 1 to 5"):
            implementation.route(torch.randn(2, 5), RoutingOptions(top_k=6, weights=routing))


def test_route_chooses_experts_that_exist_whatever_the_logits_are(ops):
    nan = float("nan")
    options = RoutingOptions(top_k=3, weights="softmax_of_chosen")
    ids, _ = ops.route(torch.tensor([[nan, 1, nan, 2], [nan] * 4]), options)
    assert ids.tolist() == [[3, 1, 0], [0, 1, 2]]


@loop_over("dtype", DTYPES)
@loop_over("num_heads, size, out, rest", [(1, 6, 1, 0), (5, 24, 65, 16)])
def test_products_of_heads_agree_with_reference(matrix_ops, num_heads, size, out, rest, dtype):
    matrices = torch.randn(num_heads, size, out).to(dtype)
    heads, reference = matrix_ops.prepare_heads(matrices), NATIVE.prepare_heads(matrices)
    assert torch.equal(heads.dense(), matrices)
    for num_tokens in (0, 1, 7, 70):
        x = torch.randn(num_tokens, num_heads, size + rest).to(dtype)
        x, beside = x.split((size, rest), dim=-1)
        want = reference.multiply(x)
        got = heads.multiply(x)
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.04)
        both = heads.multiply(x, beside)
        assert both.is_contiguous()
        assert torch.equal(both, torch.cat((got, beside), dim=-1))
        for t in range(min(num_tokens, 7)):
            assert torch.equal(heads.multiply(x[t : t + 1])[0], got[t])


@loop_over("dtype", DTYPES)
@loop_over("routing", get_args(Routing))
def test_route_from_groups_and_with_a_bias_agrees_with_reference(ops, routing, dtype):
    for num_experts, groups in ((24, (4, 2)), (24, (24, 5)), (256, (8, 4)), (20, (1, 1))):
        logits = (torch.randn(30, num_experts) * 2).to(dtype)
        bias = torch.randn(num_experts) * 0.3
        for added in (None, bias):
            if added is None and len(logits[0].unique()) < num_experts:
                continue
            options = RoutingOptions(
                top_k=5,
                weights=routing,
                scale=2.5,
                tolerance=0.3,
                groups=ExpertGroups(*groups),
            )
            for scales in (None, torch.rand(num_experts)):
                (ids, weights), (want_ids, want) = (
                    table.route(logits, options, added, scales) for table in (ops, NATIVE)
                )
                assert torch.equal(ids, want_ids)
                torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="24 experts cannot be chosen from"):
        ops.route(torch.randn(2, 24), replace(options, groups=ExpertGroups(5, 2)))
    for table in (ops, NATIVE):
        with pytest.raises(ValueError, match=r"the scales .* \[20\], got .*float32 \[19\]"):
            table.route(logits, options, None, torch.rand(19))


@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_cap_agrees_with_reference(ops, dtype):
    extremes = torch.tensor([-3e38, -90.0, -0.0, 0.0, 1e-4, 0.29, 90.0, 3e38, math.inf])
    for x in (torch.randn(5, 70) * 20, torch.randn(0, 3), extremes):
        got = ops.soft_cap(x.to(dtype), 7.5)
        assert_close(got, NATIVE.soft_cap(x.to(dtype), 7.5))
        assert float(got.abs().max() if len(got) else 0.0) <= 7.5


def test_not_a_number_is_not_hidden(ops):
    x = torch.ones(1, 64)
    x[0, 5] = float("nan")
    for dtype in DTYPES:
        for is_tanh in (False, True):
            got = ops.gelu_and_mul(x.to(dtype), is_tanh)
            assert got.isnan().nonzero().tolist() == [[0, 5]]
            assert ops.squared_relu(x.to(dtype)).isnan().nonzero().tolist() == [[0, 5]]
            alpha = torch.ones(1, dtype=dtype)
            assert ops.xielu(x.to(dtype), alpha, alpha).isnan().nonzero().tolist() == [[0, 5]]
            assert ops.gelu(x.to(dtype), is_tanh).isnan().nonzero().tolist() == [[0, 5]]
            assert ops.quick_gelu(x.to(dtype)).isnan().nonzero().tolist() == [[0, 5]]
        for got in (ops.silu_and_mul(x.to(dtype)), ops.soft_cap(x.to(dtype), 2.0)):
            assert got.isnan().nonzero().tolist() == [[0, 5]]
        assert ops.rms_norm(x.to(dtype), torch.ones(64, dtype=dtype), 1e-5).isnan().all()
        cache = PagedCache([40], 1, 16, 16, dtype)
        cache.keys[cache.block_tables[0, 0], 3] = float("nan")
        assert cache.decode(ops, torch.ones(1, 2, 16, dtype=dtype), None).isnan().all()


@pytest.mark.parametrize("bits", [0x7FC00001, -1])
def test_not_a_number_may_have_any_bits(matrix_ops, bits):
    cache, query = PagedCache([40], 1, 16, 16, torch.float32), torch.ones(1, 2, 16)
    cache.keys.view(torch.int32)[cache.block_tables[0, 0], 3] = bits
    assert cache.decode(matrix_ops, query, None).isnan().all()
    tables = cache.block_tables
    new = matrix_ops.paged_attention_prefill(
        query, cache.keys, cache.values, tables, [0, 1], [40], AttentionOptions(1.0)
    )
    assert new.isnan().all()


# ---- rotary embedding ----------------------------------------------------------------------


@loop_over("dtype", DTYPES)
@loop_over("is_neox", [True, False])
@loop_over("head_size, rot_dim", [(16, 16), (64, 32), (80, 20), (100, 100)])
@loop_over("num_tokens", [0, 1, 40])
def test_rotary_embedding_gives_the_bits_of_the_reference(
    ops, num_tokens, head_size, rot_dim, is_neox, dtype
):
    query, key, value = packed_qkv(num_tokens, 6, 2, head_size, dtype)
    value_before = value.clone()
    angles = torch.rand(300, rot_dim // 2) * 7
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randint(300, (num_tokens,))
    want = NATIVE.rotary_embedding(positions, query, key, cos_sin, is_neox)
    alone, no_key = ops.rotary_embedding(positions, query.clone(), None, cos_sin, is_neox)
    assert no_key is None or not no_key.numel()
    assert torch.equal(alone, want[0])
    got = ops.rotary_embedding(positions, query, key, cos_sin, is_neox)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert torch.equal(value, value_before), "the neighbour in the packed tensor was touched"


# ---- cache ---------------------------------------------------------------------------------


@loop_over("dtype", DTYPES)
@loop_over("block_size", [16, 128])
@loop_over("num_padding", [0, 5, 11])
def test_reshape_and_cache_writes_real_slots_only(ops, num_padding, block_size, dtype):
    _, key, value = packed_qkv(11, 4, 2, 20, dtype)
    slots = torch.randperm(3 * block_size)[:11]
    slots[torch.randperm(11)[:num_padding]] = -1
    before = torch.randn(2, 3, block_size, 2, 20, dtype=dtype)
    for implementation in (NATIVE, ops):
        key_cache, value_cache = before.clone()
        implementation.reshape_and_cache(key, value, key_cache, value_cache, slots)
        want = before.clone()
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                want[0].flatten(0, 1)[slot] = key[token]
                want[1].flatten(0, 1)[slot] = value[token]
        assert torch.equal(key_cache, want[0])
        assert torch.equal(value_cache, want[1])


# ---- attention -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "block_size"),
    [(1, 1, 16), (4, 4, 128), (6, 2, 16), (7, 1, 128), (12, 4, 16), (32, 8, 128)],
)
def test_decode_attention_agrees_with_reference(isas, num_heads, num_kv_heads, block_size, dtype):
    head_sizes = [16, 64, 80, 100, 128, 256]
    for head_size in head_sizes if num_heads == 6 else [64, 100]:
        cache = PagedCache([1, 0, 257, 600, 33, 128], num_kv_heads, head_size, block_size, dtype)
        query, _, _ = packed_qkv(6, num_heads, num_kv_heads, head_size, dtype)
        for window in (None, 1, 50, 300):
            want = cache.decode(NATIVE, query, window)
            for _ in isas:
                got = cache.decode(CPUOps(), query, window)
                assert_close(got, want)
                assert not got[1].any(), "a padding row is zero"


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_attention_has_the_same_bits_in_any_batch_on_any_threads(
    matrix_ops, dtype, restore_threads
):
    cache = PagedCache([5, 1000, 300, 64, 511], 2, 64, 16, dtype)
    query = torch.randn(5, 8, 64, dtype=dtype)
    together = cache.decode(matrix_ops, query, None)
    for num_threads, row in product((1, 2, 3), range(5)):
        torch.set_num_threads(num_threads)
        alone = cache.decode(matrix_ops, query, None, slice(row, row + 1))
        assert torch.equal(alone[0], together[row])


def test_decode_attention_survives_large_scores(matrix_ops):
    cache = PagedCache([600], 1, 64, 16, torch.float32)
    query = torch.randn(1, 4, 64) * 1e4
    assert_close(cache.decode(matrix_ops, query, None), cache.decode(NATIVE, query, None))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("query_lens", [[40, 1, 70], [1, 3, 65], [0, 3, 7]])
def test_prefill_attention_is_decode_attention_token_by_token(query_lens, window, dtype):
    seq_lens = [40, 3, 70]
    cache = PagedCache(seq_lens, 2, 16, 16, dtype)
    starts = [0, *torch.tensor(query_lens).cumsum(0).tolist()]
    query, _, _ = packed_qkv(starts[-1] + 2, 6, 2, 16, dtype)  # two rows of padding
    query[starts[-1] :] = float("nan")
    options = AttentionOptions(0.25, window)
    got = NATIVE.paged_attention_prefill(
        query, cache.keys, cache.values, cache.block_tables, starts, seq_lens, options
    )
    for b, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        for i in range(query_len):
            want = NATIVE.paged_attention_decode(
                query[starts[b] + i][None],
                cache.keys,
                cache.values,
                cache.block_tables[b : b + 1],
                torch.tensor([seq_len - query_len + i + 1], dtype=torch.int32),
                options,
            )
            assert_close(got[starts[b] + i], want[0])
    assert not got[starts[-1] :].any()


# ---- the reference against Hugging Face ----------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_norms_and_activation_are_those_of_hugging_face(dtype):
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    norm = Olmo2RMSNorm(96, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(13, 96, dtype=dtype)
    with torch.no_grad():
        ours = NATIVE.rms_norm(x, norm.weight, 1e-5)
        # In float32, because older releases round before they multiply by the weight.
        assert torch.equal(ours, norm.float()(x.float()).to(dtype))
    by_head = CohereLayerNorm((4, 24), eps=1e-5).to(dtype)
    torch.nn.init.normal_(by_head.weight)
    heads = x.unflatten(1, (4, 24))
    with torch.no_grad():
        assert_close(NATIVE.layer_norm(heads, by_head.weight, None, 1e-5), by_head(heads))
    gate_up = torch.randn(13, 96, dtype=dtype)
    gate, up = gate_up.split(48, dim=-1)
    assert torch.equal(NATIVE.silu_and_mul(gate_up), torch.nn.SiLU()(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_rotary_embedding_is_that_of_hugging_face_llama(dtype):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    query, key, _ = packed_qkv(13, 6, 2, 64, dtype)
    angles = torch.rand(300, 32) * 7
    positions = torch.randint(300, (13,))
    cos, sin = (torch.cat((f(angles), f(angles)), -1)[positions].to(dtype)[None] for f in
                (torch.cos, torch.sin))  # fmt: skip
    q, k = (x.transpose(0, 1)[None] for x in (query, key))  # [1, heads, T, D]
    want = [x[0].transpose(0, 1) for x in apply_rotary_pos_emb(q, k, cos, sin)]
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    got = NATIVE.rotary_embedding(positions, query, key, cos_sin, True)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


# ---- refused inputs and fallbacks ----------------------------------------------------------


def test_other_dtypes_run_on_the_reference(ops):
    x, weight = torch.randn(3, 8).half(), torch.randn(8).half()
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), NATIVE.rms_norm(x, weight, 1e-5))
    cache = PagedCache([20], 1, 16, 16, torch.float16)
    query = torch.randn(1, 2, 16).half()
    assert torch.equal(cache.decode(ops, query, None), cache.decode(NATIVE, query, None))


@pytest.mark.parametrize("implementation", ["native", "cpu"])
def test_shapes_that_do_not_fit_are_named(ops, implementation):
    ops = NATIVE if implementation == "native" else ops
    x = torch.randn(3, 8)
    with pytest.raises(ValueError, match=r"\[7\].*\[3, 8\]"):
        ops.rms_norm(x, torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match=r"\[2, 8\]"):
        ops.fused_add_rms_norm(x, torch.randn(2, 8), torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="7"):
        ops.silu_and_mul(torch.randn(3, 7))
    with pytest.raises(ValueError, match="7"):
        ops.gelu_and_mul(torch.randn(3, 7), True)
    with pytest.raises(ValueError, match=r"rot_dim .* head size 8, got 10"):
        q = torch.randn(3, 2, 8)
        ops.rotary_embedding(torch.arange(3), q, q.clone(), torch.zeros(9, 10), True)
    cache = PagedCache([20], 2, 16, 16, torch.float32)
    with pytest.raises(ValueError, match=r"query heads \(3\) must be a multiple of .* \(2\)"):
        cache.decode(ops, torch.randn(1, 3, 16), None)
    with pytest.raises(ValueError, match=r"float64.*float32"):
        cache.decode(ops, torch.randn(1, 2, 16).double(), None)
    with pytest.raises(ValueError, match="sliding_window is 0"):
        cache.decode(ops, torch.randn(1, 2, 16), 0)


def test_kernels_are_given_memory_of_the_cpu_alone(ops):
    x, ones, tables = torch.randn(3, 8), torch.ones(8), torch.zeros(9, 8)
    far, q, positions = x.to("meta"), x.view(3, 1, 8), torch.arange(3)
    assert ops.rms_norm(far, ones.to("meta"), 1e-5).is_meta
    assert ops.silu_and_mul(far).is_meta
    assert ops.gelu_and_mul(far, False).is_meta
    for call in (
        lambda: ops.rms_norm(x, ones.to("meta"), 1e-5),
        lambda: ops.fused_add_rms_norm(x, far, ones, 1e-5),
        lambda: ops.rotary_embedding(positions, q, q.to("meta"), tables, True),
        lambda: ops.rotary_embedding(positions.to("meta"), q, q, tables, True),
        lambda: ops.rotary_embedding(positions, q, q, tables.to("meta"), True),
    ):
        with pytest.raises(ValueError, match="on meta"):
            call()


def test_layouts_that_a_kernel_cannot_walk_are_refused(ops):
    x = torch.randn(8, 3).T
    with pytest.raises(ValueError, match=r"x is not dense: shape \[3, 8\], strides \[1, 3\]"):
        ops.rms_norm(x, torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="the second operand is not dense"):
        ops.fused_add_rms_norm(torch.randn(3, 8), x, torch.ones(8), 1e-5)
    cache = PagedCache([20], 2, 16, 16, torch.float32)
    cache.keys = cache.keys.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="key_cache is not dense"):
        cache.decode(ops, torch.randn(1, 2, 16), None)


def test_indices_out_of_range_are_refused_before_memory_is_touched(ops):
    q = torch.randn(3, 2, 8)
    before = q.clone()
    for bad in (9, -1):
        with pytest.raises(IndexError, match=rf"positions\[2\] .* below 9, .*got {bad}"):
            positions = torch.tensor([0, 8, bad])
            ops.rotary_embedding(positions, q, q.clone(), torch.zeros(9, 8), True)
    assert torch.equal(q, before)

    cache = PagedCache([20, 20], 2, 16, 16, torch.float32)
    new = torch.randn(2, 2, 16)
    num_slots = cache.keys.shape[0] * 16
    with pytest.raises(
        IndexError,
        match=rf"slot_mapping\[1\] .* the {num_slots} slots of the cache, got {num_slots}",
    ):
        slots = torch.tensor([16, num_slots])
        ops.reshape_and_cache(new, new, cache.keys, cache.values, slots)

    query = torch.randn(2, 4, 16)
    for seq_len in (-1, 49):  # a table of 3 blocks has 48 slots
        cache.seq_lens[1] = seq_len
        with pytest.raises(IndexError, match=f"request 1 has {seq_len} tokens"):
            cache.decode(ops, query, None)
    cache.seq_lens[1] = 20
    for block_id in (-1, len(cache.keys)):
        cache.block_tables[1, 1] = block_id
        with pytest.raises(IndexError, match=rf"request 1 .*{block_id}"):
            cache.decode(ops, query, None)


# ---- the table of operators ----------------------------------------------------------------


def test_layers_get_the_operators_that_were_installed():
    before = get_ops()
    try:
        mine = NativeOps()
        set_ops(mine)
        assert get_ops() is mine
    finally:
        set_ops(before)
