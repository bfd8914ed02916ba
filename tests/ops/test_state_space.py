"""Test scans and convolutions against the recurrence, token by token in float64."""

import pytest
import torch
from torch.nn.functional import silu, softplus

from vllm.ops.cpu.operators import CPUOps, load_cpu_kernels
from vllm.ops.native.operators import NativeOps
from vllm.ops.native.state_space import (
    ScannedTokens,
    TokenStates,
    convolve,
    scan_channels,
    scan_heads,
    scan_padded_channels,
    time_steps,
)

B, H, P, G, N, D, K = 3, 6, 5, 2, 4, 7, 4


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape)))


def inputs_of(length: int):
    dt = softplus(random(B, length, H))
    decay = -random(H, seed=1).exp()
    b, c = random(B, length, G, N, seed=2), random(B, length, G, N, seed=3)
    return random(B, length, H, P), dt, decay, b, c, random(B, H, P, N, seed=4)


def recurrence(x, dt, decay, b, c, state):
    x, dt, decay, b, c, state = (t.double() for t in (x, dt, decay, b, c, state))
    b, c = (t.repeat_interleave(H // G, dim=2) for t in (b, c))
    outputs = []
    for t in range(x.shape[1]):
        fading = (dt[:, t] * decay).exp()[..., None, None]
        state = fading * state + torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], b[:, t])
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, c[:, t]))
    return torch.stack(outputs, 1), state


def assert_close(got, want):
    torch.testing.assert_close(got, want.float(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 100])
def test_a_scan_by_chunks_is_the_recurrence(length):
    given = inputs_of(length)
    y, state = scan_heads(*given)
    want_y, want_state = recurrence(*given)
    assert_close(y, want_y)
    assert_close(state, want_state)


def test_a_scan_goes_on_where_it_was_left():
    x, dt, decay, b, c, state = inputs_of(100)
    whole, last = scan_heads(x, dt, decay, b, c, state)
    parts = []
    for part in (slice(0, 1), slice(1, 37), slice(37, 38), slice(38, 100)):
        y, state = scan_heads(x[:, part], dt[:, part], decay, b[:, part], c[:, part], state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(state, last, atol=2e-5, rtol=2e-5)


def test_large_time_steps_neither_overflow_nor_cancel():
    x, dt, decay, b, c, state = inputs_of(64)
    given = x, dt * 100, decay, b, c, state
    y, last = scan_heads(*given)
    want_y, want_state = recurrence(*given)
    torch.testing.assert_close(y, want_y.float(), atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(last, want_state.float(), atol=1e-3, rtol=1e-5)


def test_padding_leaves_states_as_they_are():
    lengths = torch.tensor([5, 1, 9])
    raw, bias = random(B, 9, H), random(H, seed=7)
    dt = time_steps(raw, bias, lengths, (0.1, 1.0))
    x, _, decay, b, c, state = inputs_of(9)
    y, last = scan_heads(x, dt, decay, b, c, state)
    mixed, window, weight = random(B, 9, D), random(B, K - 1, D), random(D, K)
    out, new_window = convolve(mixed, window, weight, None, lengths)
    for row, length in enumerate(lengths.tolist()):
        one = slice(row, row + 1)
        alone = [t[one, :length] for t in (x, b, c)]
        steps = time_steps(raw[one, :length], bias, None, (0.1, 1.0))
        assert steps.min() >= 0.1 and steps.max() <= 1
        want_y, want = scan_heads(alone[0], steps, decay, alone[1], alone[2], state[one])
        torch.testing.assert_close(y[one, :length], want_y, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(last[one], want, atol=1e-5, rtol=1e-5)
        want_out, want_window = convolve(mixed[one, :length], window[one], weight, None, None)
        torch.testing.assert_close(out[one, :length], want_out)
        assert torch.equal(new_window[one], want_window)


@pytest.mark.parametrize("state_size", [N, 16, 37])
@pytest.mark.parametrize("table", [NativeOps, CPUOps])
def test_tokens_change_the_states_of_their_rows(table, state_size):
    rows, is_new = torch.tensor([4, 0, 2]), torch.tensor([False, True, False])
    states = random(6, H, P, state_size)
    x, decay, steps = random(B, H, P), -random(H, seed=1).exp(), softplus(random(B, H))
    b, c = random(B, G, state_size, seed=2), random(B, G, state_size, seed=3)
    before = states[rows] * ~is_new[:, None, None, None]
    want_y, want = recurrence(
        *(t[:, None] for t in (x, steps)), decay, b[:, None], c[:, None], before
    )
    untouched = states[[1, 3, 5]].clone()
    states[0] = torch.nan  # an earlier request left this state
    y = table().scan_tokens(TokenStates(states, rows, is_new), ScannedTokens(x, steps, decay, b, c))
    assert_close(y, want_y[:, 0])
    assert_close(states[rows], want)
    assert torch.equal(states[[1, 3, 5]], untouched)


@pytest.mark.skipif(load_cpu_kernels() is None, reason="no kernels")
def test_a_kernel_refuses_what_does_not_fit():
    states, rows, is_new = random(6, H, P, N), torch.tensor([5, 6]), torch.tensor([False, True])
    x, steps, decay = random(2, H, P), random(2, H), random(H)
    b, c = random(2, G, N), random(2, G, N)
    at = TokenStates(states, rows, is_new)
    with pytest.raises(IndexError, match=r"rows\[1\] must be one of the 6 recurrent states, got 6"):
        CPUOps().scan_tokens(at, ScannedTokens(x, steps, decay, b, c))
    with pytest.raises(ValueError, match=r"x must be .*, got torch\.float64"):
        CPUOps().scan_tokens(at, ScannedTokens(x.double(), steps, decay, b, c))
    with pytest.raises(ValueError, match=r"c must be .*, got torch\.float32 \[1, 2, 4\]"):
        CPUOps().scan_tokens(at, ScannedTokens(x, steps, decay, b, c[:1]))


@pytest.mark.parametrize("length", [1, 2, 20])
def test_a_convolution_is_that_of_torch(length):
    x, window, weight, bias = random(B, length, D), random(B, K - 1, D), random(D, K), random(D)
    padded = torch.cat((window, x), 1).transpose(1, 2)
    want = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=D).transpose(1, 2)
    got, new_window = convolve(x, window, weight, bias, None)
    assert_close(got, silu(want))
    assert torch.equal(new_window, padded.transpose(1, 2)[:, -(K - 1) :])


def test_a_scan_of_channels_is_the_recurrence():
    x, dt = random(B, 11, D), softplus(random(B, 11, D, seed=1))
    decay, state = -random(D, N).exp(), random(B, D, N, seed=2)
    b, c = random(B, 11, N, seed=3), random(B, 11, N, seed=4)
    y, last = scan_channels(x, dt, decay, b, c, state)
    want = state.double()
    for t in range(11):
        fading = (dt[:, t, :, None].double() * decay.double()).exp()
        want = fading * want + (dt * x)[:, t, :, None].double() * b[:, t, None, :].double()
        assert_close(y[:, t], (want * c[:, t, None, :].double()).sum(-1))
    assert_close(last, want)


@pytest.mark.parametrize(("length", "scale"), [(1, 1.0), (33, 1.0), (70, 100.0)])
def test_a_scan_by_doubling_is_the_scan_token_by_token(length, scale):
    dt = softplus(random(B, length, D)) * scale
    dt[0, length // 2 :] = 0.0
    b, c = random(B, length, N, seed=2), random(B, length, N, seed=3)
    given = random(B, length, D, seed=1), dt, -random(D, N).exp(), b, c, random(B, D, N, seed=4)
    for got, want in zip(scan_padded_channels(*given), scan_channels(*given), strict=True):
        torch.testing.assert_close(got, want, atol=2e-5 * scale, rtol=2e-5)


def test_time_steps_are_exact_to_the_last_digits():
    raw = torch.cat((torch.linspace(-100, 100, 4001), torch.linspace(-1e-3, 1e-3, 101)))
    got = time_steps(raw.view(1, 1, -1), torch.zeros(()), None)
    torch.testing.assert_close(got.flatten(), softplus(raw.double()).float(), atol=0, rtol=5e-7)
