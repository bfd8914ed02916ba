"""The gated delta rule in torch operations, for any device.

A state S [V, K] for each head maps keys to values. A token fades it, then moves what it gives for
the token's key towards the token's value, by a part beta of the difference:

    S' = S_(t-1) * exp(log_t)
    S_t = S' + beta_t * (v_t - S' k_t) k_t'
    y_t = S_t q_t

B sequences of L tokens each, everything float32. A sequence comes with the state that its earlier
tokens have left, and leaves a new one. A token of padding has the logarithm 0 and beta 0, which
leaves a state as it is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.interface import Ops
from vllm.ops.native.state_space import faded_between

_CHUNK = 32
"""Tokens of a chunk: what is computed inside of one grows with its square."""
_PIECE = 32
"""Chunks that are prepared at once, which bounds the memory that a prompt takes."""


def run_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, logs: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule (Yang et al. 2024, arXiv 2412.06464).

    Computed by chunks (section 3.3, and Yang et al. 2024, arXiv 2406.06484, section 3): the tokens
    of a chunk are one triangular system, and one state goes from each chunk to the next.

    Args:
        q, k: [B, L, G, K]; each of the G groups serves H / G heads in turn.
        v: [B, L, H, V].
        logs: [B, L, H] logarithm of what is left of the state, at most 0; 0 for padding.
        beta: [B, L, H], 0 for padding.
        state: [B, H, V, K] before the first token.

    Returns:
        y [B, L, H, V], and the state after the last token.
    """
    length, num_groups = q.shape[1:3]
    if length == 1:
        y, state = _step(*(x[:, 0] for x in (q, k, v, logs, beta)), state)
        return y[:, None], state
    chunk = min(_CHUNK, length)
    padding = -length % chunk
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (q, k, v))
    logs, beta = (F.pad(x, (0, 0, 0, padding)) for x in (logs, beta))
    outputs = []
    state = state.unflatten(1, (num_groups, -1))  # [B, G, R, V, K], as all below
    for start in range(0, length + padding, _PIECE * chunk):
        piece = slice(start, start + _PIECE * chunk)
        keys, queries = (_chunks(x[:, piece].unsqueeze(3), chunk) for x in (k, q))
        values, logs_of, betas = (
            _chunks(x[:, piece].unflatten(2, (num_groups, -1)), chunk)
            for x in (v, logs[..., None], beta[..., None])
        )
        y, state = _run_chunks(queries, keys, values, logs_of[..., 0], betas, state)
        outputs.append(y)
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return out[:, :length].flatten(2, 3), state.flatten(1, 2)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, L, G, R, D] -> [N, B, G, R, Q, D] for N chunks of Q tokens."""
    return x.unflatten(1, (-1, chunk)).permute(1, 0, 3, 4, 2, 5).contiguous()


def _run_chunks(
    q: Tensor, k: Tensor, v: Tensor, logs: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run N whole chunks of Q tokens, for R heads in each of G groups.

    Args:
        q, k: [N, B, G, 1, Q, K].
        v: [N, B, G, R, Q, V].
        logs: [N, B, G, R, Q].
        beta: [N, B, G, R, Q, 1].
        state: [B, G, R, V, K].

    Returns:
        [B, N * Q, G, R, V], and the new state.
    """
    size = k.shape[-2]
    weights = faded_between(logs)
    faded = logs.cumsum(-1).exp()[..., None]
    transposed = k.transpose(-2, -1)
    # Token i corrects what token j before it has written: (1 + lower) corrections = beta * values.
    lower = ((k @ transposed) * weights * beta).tril(-1)
    solved = invert_unit_lower(lower)
    corrections = solved @ (v * beta)
    reads = torch.cat((solved @ (k * (beta * faded)), q * faded), dim=-2)
    within = (q @ transposed) * weights
    writes = k * weights[..., -1, :, None]
    left = faded[..., -1:, :]
    outputs = []
    for n in range(len(k)):
        known, before = (reads[n] @ state.transpose(-2, -1)).split(size, dim=-2)
        new = corrections[n] - known
        outputs.append(before + within[n] @ new)
        state = left[n] * state + new.transpose(-2, -1) @ writes[n]
    y = torch.stack(outputs, dim=1)  # [B, N, G, R, Q, V]
    return y.permute(0, 1, 4, 2, 3, 5).flatten(1, 2), state


def invert_unit_lower(lower: Tensor) -> Tensor:
    """Return the inverse of 1 + lower.

    From the inverses of blocks on the diagonal those of blocks of twice the size are made, by
    products of matrices alone. Each is a substitution by blocks, so that nothing cancels.

    Args:
        lower: [..., Q, Q], 0 on the diagonal and above.
    """
    size = lower.shape[-1]
    places = torch.arange(size, device=lower.device)
    inverse = torch.eye(size, dtype=lower.dtype, device=lower.device)
    block = 1
    while block < size:
        number = places // block
        is_beside = (number[:, None] % 2 == 1) & (number[None, :] == number[:, None] - 1)
        beside = lower.masked_fill(~is_beside, 0.0)
        inverse = inverse - (beside if block == 1 else inverse @ beside @ inverse)
        block *= 2
    return inverse.expand_as(lower)


def _step(
    q: Tensor, k: Tensor, v: Tensor, logs: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`run_delta_rule` of one token: without the dimension L."""
    num_groups = q.shape[1]
    grouped = state.unflatten(1, (num_groups, -1))  # [B, G, R, V, K]
    v, fading, beta = (
        x.unflatten(1, (num_groups, -1)) for x in (v, logs.exp()[..., None, None], beta[..., None])
    )
    grouped = grouped * fading
    known = (grouped.flatten(2, 3) @ k[..., None]).view_as(v)
    new = (v - known) * beta
    grouped = grouped + new[..., None] * k[:, :, None, None, :]
    y = (grouped.flatten(2, 3) @ q[..., None]).view_as(v)
    return y.flatten(1, 2), grouped.flatten(1, 2)


class NativeDeltaRule(Ops):
    """The operators of an operator table that are made of the functions above."""

    def delta_tokens(
        self,
        states: Tensor,
        rows: Tensor,
        is_new: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        logs: Tensor,
        beta: Tensor,
    ) -> Tensor:
        before = states.index_select(0, rows).masked_fill(is_new.view(-1, 1, 1, 1), 0.0)
        y, after = _step(q, k, v, logs, beta, before)
        states.index_copy_(0, rows, after)
        return y
