"""The gated delta rule in torch operations, for any device.

A state S [V, K] for each head maps keys to values. A token decays the state, then moves the value
that it maps the token's key to towards the token's value, by a fraction beta of the difference:

    S' = S_(t-1) * exp(log_t)
    S_t = S' + beta_t * (v_t - S' k_t) k_t'
    y_t = S_t q_t

B sequences of L tokens each, all in float32. A sequence begins with the state of its earlier
tokens, and ends with a new one. A padding token has the logarithm 0 and beta 0, which leaves the
state unchanged.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.native.state_space import TokenStates, faded_between

_CHUNK = 32
"""Tokens of a chunk. The computation inside a chunk grows with the square of this number."""
_BLOCK = 8
"""Tokens of a block of a chunk, see `_fade_by_key`."""
_PIECE, _PIECE_BY_KEY = 32, 8
"""Chunks that are prepared at once, which bounds the memory that a prompt takes."""


def run_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, logs: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule over sequences (Yang et al. 2024, arXiv 2412.06464).

    Computed by chunks (section 3.3, and Yang et al. 2024, arXiv 2406.06484, section 3): the tokens
    of a chunk are one triangular system, and one state is passed from each chunk to the next.

    Args:
        q: [B, L, G, K]; each of the G groups is used by H / G neighbouring heads.
        k: [B, L, G, K].
        v: [B, L, H, V].
        logs: logarithm of the decay of the state, at most 0; 0 for padding. [B, L, H], or for
            each element of keys [B, L, H, K] (Kimi Team 2025, arXiv 2510.26692).
        beta: [B, L, H], 0 for padding.
        state: [B, H, V, K] before the first token.

    Returns:
        y [B, L, H, V], and the state after the last token.
    """
    length, num_groups = q.shape[1:3]
    if length == 1:
        y, state = _step(q[:, 0], k[:, 0], v[:, 0], logs[:, 0], beta[:, 0], state)
        return y[:, None], state
    chunk = min(_CHUNK, length + -length % _BLOCK)
    padding = -length % chunk
    is_by_key = logs.dim() == 4
    logs, beta = logs if is_by_key else logs[..., None], beta[..., None]
    q, k, v, logs, beta = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (q, k, v, logs, beta))
    outputs = []
    state = state.unflatten(1, (num_groups, -1))  # [B, G, R, V, K], as in all code below
    step = chunk * (_PIECE_BY_KEY if is_by_key else _PIECE)
    for start in range(0, length + padding, step):
        piece = slice(start, start + step)
        keys, queries = (_chunks(x[:, piece].unsqueeze(3), chunk) for x in (k, q))
        values, fading, betas = (
            _chunks(x[:, piece].unflatten(2, (num_groups, -1)), chunk) for x in (v, logs, beta)
        )
        fade = _fade_by_key if is_by_key else _fade
        y, state = _run_chunks(fade(queries, keys, fading), queries, keys, values, betas, state)
        outputs.append(y)
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return out[:, :length].flatten(2, 3), state.flatten(1, 2)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """Divide [B, L, G, R, D] into N chunks of Q tokens, [N, B, G, R, Q, D]."""
    return x.unflatten(1, (-1, chunk)).permute(1, 0, 3, 4, 2, 5).contiguous()


@dataclass(frozen=True)
class _Faded:
    """The effect of the decay in N chunks of Q tokens, for R heads in each of G groups.

    All are [N, B, G, R, ...]. K is 1 if all elements of keys have the same decay.
    """

    scores: Tensor
    """[..., Q, Q] queries by earlier keys and their own, faded between both; else 0."""
    overlaps: Tensor
    """[..., Q, Q] keys by keys, faded in the same way."""
    left: Tensor
    """[..., Q, K] fraction of the state before the chunk that remains at token i."""
    ends: Tensor
    """[..., Q, K] fraction of the value that token i has written that remains at the end of the
    chunk."""


def _fade(q: Tensor, k: Tensor, logs: Tensor) -> _Faded:
    """Compute the effect of a scalar decay per token.

    Args:
        q: [N, B, G, 1, Q, K].
        k: [N, B, G, 1, Q, K].
        logs: [N, B, G, R, Q, 1].
    """
    weights = faded_between(logs[..., 0])
    keys = k.transpose(-2, -1)
    left = logs.cumsum(-2).exp()
    return _Faded((q @ keys) * weights, (k @ keys) * weights, left, weights[..., -1, :, None])


def _fade_by_key(q: Tensor, k: Tensor, logs: Tensor) -> _Faded:
    """Compute the effect of a decay with one value for each element of keys.

    The score of a query and an earlier key is a sum of elements that decay differently. Between
    blocks of tokens it is a matmul: keys before a block are decayed up to its start, queries in it
    from there on. Within a block there is no such point between two tokens, so each pair is summed
    separately. Logarithms between two tokens are added: differences of longer sums would lose
    digits.

    Args:
        q: [N, B, G, 1, Q, K].
        k: [N, B, G, 1, Q, K].
        logs: [N, B, G, R, Q, K].
    """
    size = k.shape[-2]
    indices = torch.arange(size, device=k.device)
    starts, inner = indices[::_BLOCK], indices[:_BLOCK]
    steps = logs.unflatten(-2, (-1, _BLOCK))  # [..., blocks, _BLOCK, K]
    is_before = indices < starts[:, None]  # [blocks, Q]
    up_to_start = (indices > indices[:, None]) & is_before[:, None]  # [blocks, Q, Q]
    earlier = (up_to_start.to(logs.dtype) @ logs.unsqueeze(-3)).exp()
    earlier = (earlier * is_before[..., None] * k.unsqueeze(-3)).transpose(-2, -1)
    is_between = (inner > inner[:, None]) & (inner <= inner[:, None, None])  # [i, j, token]
    pairs = (is_between.flatten(0, 1).to(logs.dtype) @ steps).unflatten(-2, (_BLOCK, _BLOCK)).exp()
    keys = k.unflatten(-2, (-1, _BLOCK))
    pairs = pairs * (inner <= inner[:, None])[..., None] * keys.unsqueeze(-3)
    from_start = steps.cumsum(-2).exp()
    is_own = (starts[:, None] == starts)[:, None, :, None]
    results = []
    for x in (q, k):
        x = x.unflatten(-2, (-1, _BLOCK))
        own = (pairs @ x.unsqueeze(-1)).squeeze(-1)
        own = (own.unsqueeze(-2) * is_own).flatten(-2)
        results.append(((x * from_start) @ earlier + own).flatten(-3, -2))
    ends = ((indices > indices[:, None]).to(logs.dtype) @ logs).exp()
    return _Faded(results[0], results[1], logs.cumsum(-2).exp(), ends)


def _run_chunks(
    faded: _Faded, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the delta rule over N whole chunks of Q tokens.

    Args:
        faded: effect of the decay in these chunks.
        q: [N, B, G, 1, Q, K].
        k: [N, B, G, 1, Q, K].
        v: [N, B, G, R, Q, V].
        beta: [N, B, G, R, Q, 1].
        state: [B, G, R, V, K].

    Returns:
        [B, N * Q, G, R, V], and the new state.
    """
    size = k.shape[-2]
    # Token i corrects what earlier tokens j have written: solve (1 + lower) @ corrections = beta *
    # values.
    solved = invert_unit_lower((faded.overlaps * beta).tril(-1))
    corrections = solved @ (v * beta)
    reads = torch.cat((solved @ (k * (beta * faded.left)), q * faded.left), dim=-2)
    writes = k * faded.ends
    left = faded.left[..., -1:, :]
    # Only what the state passes on is computed chunk by chunk: a device that records operators
    # then records few for each chunk.
    before, written = [], []
    parts = zip(*(part.unbind(0) for part in (reads, corrections, writes, left)), strict=True)
    for read, correction, write, remains in parts:
        known, kept = (read @ state.transpose(-2, -1)).split(size, dim=-2)
        new = correction - known
        before.append(kept)
        written.append(new)
        state = remains * state + new.transpose(-2, -1) @ write
    y = torch.stack(before) + faded.scores @ torch.stack(written)  # [N, B, G, R, Q, V]
    return y.permute(1, 0, 4, 2, 3, 5).flatten(1, 2), state


def invert_unit_lower(lower: Tensor) -> Tensor:
    """Return the inverse of 1 + lower, for strictly lower triangular matrices.

    Inverses of blocks on the diagonal give the inverses of blocks of twice the size. Each step is a
    substitution by blocks, so there is no cancellation.

    Args:
        lower: [..., Q, Q], 0 on the diagonal and above.
    """
    size = lower.shape[-1]
    indices = torch.arange(size, device=lower.device)
    inverse = (indices[:, None] == indices).to(lower.dtype)
    block = 1
    while block < size:
        number = indices // block
        is_neighbour = (number[:, None] % 2 == 1) & (number[None, :] == number[:, None] - 1)
        neighbours = lower.masked_fill(~is_neighbour, 0.0)
        inverse = inverse - (neighbours if block == 1 else inverse @ neighbours @ inverse)
        block *= 2
    return inverse.expand_as(lower)


def _step(
    q: Tensor, k: Tensor, v: Tensor, logs: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run `run_delta_rule` for one token: tensors lack the dimension L."""
    num_groups = q.shape[1]
    grouped = state.unflatten(1, (num_groups, -1))  # [B, G, R, V, K]
    fading = logs.exp()[:, :, None] if logs.dim() == 3 else logs.exp()[..., None, None]
    v, fading, beta = (x.unflatten(1, (num_groups, -1)) for x in (v, fading, beta[..., None]))
    grouped = grouped * fading
    known = (grouped.flatten(2, 3) @ k[..., None]).view_as(v)
    new = (v - known) * beta
    grouped = grouped + new[..., None] * k[:, :, None, None, :]
    y = (grouped.flatten(2, 3) @ q[..., None]).view_as(v)
    return y.flatten(1, 2), grouped.flatten(1, 2)


class DeltaTokens(NamedTuple):
    """One token of each of B sequences, for the delta rule; all float32."""

    q: Tensor
    """[B, G, K]"""
    k: Tensor
    """[B, G, K]"""
    v: Tensor
    """[B, H, V]"""
    logs: Tensor
    """[B, H] logarithm of the decay of the state, at most 0; or [B, H, K], one for each element of
    keys."""
    beta: Tensor
    """[B, H]"""


class NativeDeltaRule:
    """The delta-rule operators of `NativeOps`, made of the functions above."""

    def delta_tokens(self, at: TokenStates, tokens: DeltaTokens) -> Tensor:
        """Apply the gated delta rule to one token of each of B sequences; see `delta_rule`.

        Args:
            at: the states [rows, H, V, K].
            tokens: the tokens.

        Returns:
            [B, H, V]

        Raises:
            IndexError: an index of a state is out of range.
        """
        y, after = _step(*tokens, at.before())
        at.states.index_copy_(0, at.rows, after)
        return y
