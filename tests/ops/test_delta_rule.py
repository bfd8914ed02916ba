"""Test the gated delta rule against the recurrence, token by token in float64."""

import pytest
import torch
from torch.nn.functional import normalize

from vllm.ops.cpu.operators import CPUOps, load_cpu_kernels
from vllm.ops.native.delta_rule import DeltaTokens, invert_unit_lower, run_delta_rule
from vllm.ops.native.operators import NativeOps
from vllm.ops.native.state_space import TokenStates

B, G, H, K, V = 3, 2, 6, 5, 4


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape)))


def inputs_of(length: int, key_size: int = K, value_size: int = V, is_by_key: bool = False):
    q, k = (normalize(random(B, length, G, key_size, seed=n), dim=-1) for n in (1, 2))
    fadings = (key_size,) if is_by_key else ()
    logs, beta = -random(B, length, H, *fadings, seed=3).exp(), random(B, length, H).sigmoid()
    v, state = random(B, length, H, value_size, seed=5), random(B, H, value_size, key_size, seed=6)
    return q, k, v, logs, beta, state


def recurrence(q, k, v, logs, beta, state):
    q, k, v, logs, beta, state = (t.double() for t in (q, k, v, logs, beta, state))
    q, k = (t.repeat_interleave(H // G, dim=2) for t in (q, k))
    outputs = []
    for t in range(q.shape[1]):
        fading = logs[:, t].exp()
        state = state * (fading[:, :, None] if fading.dim() == 3 else fading[..., None, None])
        wrong = v[:, t] - torch.einsum("bhvk,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bh,bhv,bhk->bhvk", beta[:, t], wrong, k[:, t])
        outputs.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1), state


def assert_close(got, want, atol=2e-5):
    torch.testing.assert_close(got, want.float(), atol=atol, rtol=2e-5)


BY_KEY = pytest.mark.parametrize("is_by_key", [False, True])
"""Whether elements of keys fade by numbers of their own."""


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 100])
@BY_KEY
def test_chunks_are_the_recurrence(length, is_by_key):
    given = inputs_of(length, is_by_key=is_by_key)
    y, state = run_delta_rule(*given)
    want_y, want_state = recurrence(*given)
    assert_close(y, want_y)
    assert_close(state, want_state)


@BY_KEY
def test_a_long_prompt_is_prepared_in_several_pieces(monkeypatch, is_by_key):
    for name in ("_PIECE", "_PIECE_BY_KEY"):
        monkeypatch.setattr(f"vllm.ops.native.delta_rule.{name}", 2)
    given = inputs_of(150, is_by_key=is_by_key)
    for got, want in zip(run_delta_rule(*given), recurrence(*given), strict=True):
        assert_close(got, want)


def test_a_prompt_goes_on_where_it_was_left():
    *inputs, state = inputs_of(100)
    whole, last = run_delta_rule(*inputs, state)
    parts = []
    for part in (slice(0, 1), slice(1, 37), slice(37, 38), slice(38, 100)):
        y, state = run_delta_rule(*(x[:, part] for x in inputs), state)
        parts.append(y)
    assert_close(torch.cat(parts, 1), whole)
    assert_close(state, last)


@pytest.mark.parametrize("left", [0.0, -30.0])
@BY_KEY
def test_equal_keys_that_overwrite_each_other_do_not_cancel(left, is_by_key):
    q, k, v, logs, beta, state = inputs_of(64, is_by_key=is_by_key)
    given = q, k[:, :1].expand_as(k), v, torch.full_like(logs, left), torch.ones_like(beta), state
    y, last = run_delta_rule(*given)
    want_y, want_state = recurrence(*given)
    assert_close(y, want_y)
    assert_close(last, want_state)


@BY_KEY
def test_tokens_of_padding_leave_states_as_they_are(is_by_key):
    q, k, v, logs, beta, state = inputs_of(40, is_by_key=is_by_key)
    logs[:, 25:], beta[:, 25:] = 0.0, 0.0
    y, last = run_delta_rule(q, k, v, logs, beta, state)
    want_y, want = run_delta_rule(*(x[:, :25] for x in (q, k, v, logs, beta)), state)
    assert_close(y[:, :25], want_y)
    assert_close(last, want)


@pytest.mark.parametrize("size", [1, 2, 7, 32])
def test_an_inverse_is_one(size):
    lower = random(2, size, size).tril(-1)
    inverse = invert_unit_lower(lower).double()
    unit = torch.eye(size, dtype=torch.float64)
    want = torch.linalg.inv(unit + lower.double())
    torch.testing.assert_close(inverse, want, atol=1e-5 * float(want.abs().max()), rtol=0)


@pytest.mark.parametrize(("value_size", "key_size"), [(V, K), (16, 32), (37, 17)])
@pytest.mark.parametrize("table", [NativeOps, CPUOps])
@BY_KEY
def test_tokens_change_the_states_of_their_rows(table, value_size, key_size, is_by_key):
    rows, is_new = torch.tensor([4, 0, 2]), torch.tensor([False, True, False])
    states = random(6, H, value_size, key_size)
    *inputs, _ = inputs_of(1, key_size, value_size, is_by_key)
    want_y, want = recurrence(*inputs, states[rows] * ~is_new[:, None, None, None])
    untouched = states[[1, 3, 5]].clone()
    states[0] = torch.nan  # an earlier request left this state
    y = table().delta_tokens(
        TokenStates(states, rows, is_new), DeltaTokens(*(x[:, 0] for x in inputs))
    )
    assert_close(y, want_y[:, 0])
    assert_close(states[rows], want)
    assert torch.equal(states[[1, 3, 5]], untouched)


@pytest.mark.skipif(load_cpu_kernels() is None, reason="no kernels")
def test_a_kernel_refuses_what_does_not_fit():
    states, is_new = random(6, H, V, K), torch.zeros(B, dtype=torch.bool)
    inputs = [x[:, 0] for x in inputs_of(1)[:-1]]
    with pytest.raises(IndexError, match=r"rows\[2\] must be one of the 6 recurrent states, got 6"):
        CPUOps().delta_tokens(
            TokenStates(states, torch.tensor([0, 1, 6]), is_new), DeltaTokens(*inputs)
        )
    rows = torch.arange(B)
    with pytest.raises(ValueError, match=r"q must be .*, got torch\.float64"):
        CPUOps().delta_tokens(
            TokenStates(states, rows, is_new), DeltaTokens(inputs[0].double(), *inputs[1:])
        )
    with pytest.raises(ValueError, match="must be dense"):
        CPUOps().delta_tokens(
            TokenStates(states.transpose(2, 3), rows, is_new), DeltaTokens(*inputs)
        )
