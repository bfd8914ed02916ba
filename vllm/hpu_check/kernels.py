"""Check the fused kernels, one by one, against torch in float32 on the host."""

from collections.abc import Callable
from functools import partial, wraps

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.hpu_check.check import LIMITS, Comparison, Outcome
from vllm.hpu_check.stopwatch import shortest_s
from vllm.ops.hpu.operators import HPUOps
from vllm.ops.native.operators import NativeOps
from vllm.platforms.habana.bridge import HabanaBridge

_NATIVE = NativeOps()
_EPS = 1e-5
_BATCH, _HEADS, _TOKENS, _HEAD_SIZE = 2, 4, 96, 64


def _of_sdpa(check: Callable[[HabanaBridge], Outcome]) -> Callable[[HabanaBridge], Outcome]:
    """Skip a check of the prompt attention kernel if the kernel is missing."""

    @wraps(check)
    def run(bridge: HabanaBridge) -> Outcome:
        reason = bridge.kernels.why_unused("FusedSDPA")
        return check(bridge) if reason is None else Outcome("skip", reason)

    return run


@_of_sdpa
def check_sdpa_causal(bridge: HabanaBridge) -> Outcome:
    """Check that every token sees itself and earlier tokens, with the exact and the fast
    exponential.
    """
    comparison = _KernelComparison(bridge)
    reference = partial(F.scaled_dot_product_attention, is_causal=True)
    for dtype, modes in ((torch.float32, ("None",)), (torch.bfloat16, ("None", "fast"))):
        inputs = _sdpa_inputs(_HEADS, dtype)
        for mode in modes:
            kernel = partial(bridge.kernels.sdpa, is_causal=True, softmax_mode=mode)
            comparison.run(f"{dtype}, softmax {mode}", kernel, reference, *inputs)
    return comparison.outcome()


@_of_sdpa
def check_sdpa_shared_heads(bridge: HabanaBridge) -> Outcome:
    """Check several query heads with one key head: grouped-query and multi-query attention."""
    comparison = _KernelComparison(bridge)
    kernel = partial(bridge.kernels.sdpa, is_causal=True)
    reference = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    for dtype in LIMITS:
        for num_kv_heads in (1, 2):
            case = f"{dtype}, {_HEADS} heads over {num_kv_heads}"
            comparison.run(case, kernel, reference, *_sdpa_inputs(num_kv_heads, dtype))
    return comparison.outcome()


@_of_sdpa
def check_sdpa_mask(bridge: HabanaBridge) -> Outcome:
    """Check a separate mask for each request, bool or added, with more keys than queries."""
    comparison = _KernelComparison(bridge)
    kernel = partial(bridge.kernels.sdpa, scale=0.2)
    reference = partial(F.scaled_dot_product_attention, scale=0.2, enable_gqa=True)
    for dtype in LIMITS:
        query, key, value = _sdpa_inputs(2, dtype)
        query = query[:, :, :32].contiguous()
        mask = torch.rand(_BATCH, 1, 32, _TOKENS) < 0.5
        mask[..., 0] = True  # each query attends to at least one key
        added = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -3e4)
        for kind, given in (("bool", mask), ("added", added)):
            inputs = query, key, value, given
            comparison.run(f"{dtype}, {kind} mask", kernel, reference, *inputs)
    return comparison.outcome()


@_of_sdpa
def check_sdpa_valid_lengths(bridge: HabanaBridge) -> Outcome:
    """Check requests that are padded on the right. Results after their lengths are not compared."""
    comparison = _KernelComparison(bridge)
    lengths = (1, 70)

    def tokens(out: Tensor) -> Tensor:
        return torch.cat([out[row, :, :length] for row, length in enumerate(lengths)], dim=1)

    def kernel(query: Tensor, key: Tensor, value: Tensor, valid: Tensor) -> Tensor:
        return tokens(bridge.kernels.sdpa(query, key, value, is_causal=True, valid_seq_len=valid))

    def reference(query: Tensor, key: Tensor, value: Tensor, valid: Tensor) -> Tensor:
        # Padding is on the right, so the causal mask hides it.
        return tokens(
            F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        )

    valid = torch.tensor(lengths, dtype=torch.int32)
    for dtype in LIMITS:
        comparison.run(str(dtype), kernel, reference, *_sdpa_inputs(2, dtype), valid)
    return comparison.outcome()


def check_rms_norm(bridge: HabanaBridge) -> Outcome:
    """Check norms of tokens, of heads, and of a sum."""
    ops, comparison = HPUOps(bridge), _KernelComparison(bridge)

    def norm(ops: NativeOps, x: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(x, weight, _EPS)

    def sum_and_norm(ops: NativeOps, x: Tensor, weight: Tensor) -> Tensor:
        return torch.cat(ops.fused_add_rms_norm(x, x + 1, weight, _EPS))

    for dtype in LIMITS:
        for function, shape in ((norm, (33, 256)), (norm, (5, 4, 64)), (sum_and_norm, (33, 256))):
            inputs = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
            case = f"{dtype}, {function.__name__} of {list(shape)}"
            comparison.run(case, partial(function, ops), partial(function, _NATIVE), *inputs)
    return comparison.outcome()


def check_rotary_neox(bridge: HabanaBridge) -> Outcome:
    """Check rotary positions that pair the halves of a head."""
    return _check_rotary(bridge, is_neox=True)


def check_rotary_gptj(bridge: HabanaBridge) -> Outcome:
    """Check rotary positions that pair neighbouring elements."""
    return _check_rotary(bridge, is_neox=False)


def _check_rotary(bridge: HabanaBridge, *, is_neox: bool) -> Outcome:
    ops, comparison = HPUOps(bridge), _KernelComparison(bridge)

    def rotate(
        ops: NativeOps, positions: Tensor, query: Tensor, key: Tensor, table: Tensor
    ) -> Tensor:
        return torch.cat(ops.rotary_embedding(positions, query, key, table, is_neox), dim=1)

    positions = torch.randint(128, (40,), dtype=torch.int32)
    for dtype in LIMITS:
        for rot_dim in (_HEAD_SIZE, _HEAD_SIZE // 2):
            query, key = (torch.randn(40, heads, _HEAD_SIZE).to(dtype) for heads in (4, 2))
            angles = torch.rand(128, rot_dim // 2) * 7
            inputs = positions, query, key, torch.cat((angles.cos(), angles.sin()), dim=-1)
            case = f"{dtype}, {rot_dim} of {_HEAD_SIZE} rotated"
            comparison.run(case, partial(rotate, ops), partial(rotate, _NATIVE), *inputs)
    return comparison.outcome()


def check_silu_and_mul(bridge: HabanaBridge) -> Outcome:
    """Check the activation of a gated MLP."""
    ops, comparison = HPUOps(bridge), _KernelComparison(bridge)
    for dtype in LIMITS:
        x = torch.randn(33, 512).to(dtype) * 4
        comparison.run(str(dtype), ops.silu_and_mul, _NATIVE.silu_and_mul, x)
    return comparison.outcome()


class _KernelComparison(Comparison):
    """Compares a function of the card with a function of the host, on the same inputs."""

    def __init__(self, bridge: HabanaBridge) -> None:
        super().__init__()
        self._bridge = bridge

    def run(
        self,
        case: str,
        kernel: Callable[..., Tensor],
        reference: Callable[..., Tensor],
        *inputs: Tensor,
    ) -> None:
        """Compare the kernel with the reference in float32, and measure the kernel's time."""
        on_card = [x.to(self._bridge.device) for x in inputs]
        got = kernel(*on_card)
        want = reference(*[x.float() if x.is_floating_point() else x for x in inputs])
        self.add(case, got, want)
        self.add_time(case, shortest_s(self._bridge, lambda: kernel(*on_card)))


def _sdpa_inputs(num_kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(_BATCH, _HEADS, _TOKENS, _HEAD_SIZE).to(dtype)
    key, value = torch.randn(2, _BATCH, num_kv_heads, _TOKENS, _HEAD_SIZE).to(dtype)
    return query, key, value
