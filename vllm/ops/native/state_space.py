"""State-space layers in torch operations, for any device: convolution, and scans over a sequence.

B sequences of L tokens each. A sequence begins with the state after its earlier tokens, and ends
with a new one. Everything except the results of convolutions is float32. A padding token has the
time step 0, which leaves the state unchanged.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 32
"""Tokens of a chunk. The computation inside a chunk grows with the square of this number."""
_PIECE = 32
"""Chunks that are prepared at once, which bounds the memory that a prompt takes."""


class TokenStates(NamedTuple):
    """The recurrent states of B sequences, of which one token each runs."""

    states: Tensor
    """[rows, H, ...] float32; the states of the sequences are updated in place."""
    rows: Tensor
    """[B] int64, index of the state of each sequence, none twice."""
    is_new: Tensor
    """[B] bool, sequences that begin with the state 0, whatever `states` contains."""

    def before(self) -> Tensor:
        """Return the states before the token. Raises IndexError if an index is out of range."""
        return self.states.index_select(0, self.rows).masked_fill(
            self.is_new.view(-1, 1, 1, 1), 0.0
        )


class ScannedTokens(NamedTuple):
    """One token of each of B sequences, for the Mamba-2 scan; all float32."""

    x: Tensor
    """[B, H, P]"""
    steps: Tensor
    """[B, H] time steps."""
    decay: Tensor
    """[H] negative."""
    b: Tensor
    """[B, G, N]"""
    c: Tensor
    """[B, G, N]"""


def convolve(
    x: Tensor,
    window: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    has_silu: bool = True,
) -> tuple[Tensor, Tensor]:
    """Apply a causal convolution with K weights for each channel, then silu.

    Args:
        x: [B, L, D].
        window: [B, K - 1, D] the inputs before x.
        weight: [D, K].
        bias: [D], or None.
        lengths: [B] int32 or int64, tokens of each sequence, followed by padding; None: all L.
        has_silu: False leaves silu out.

    Returns:
        [B, L, D] float32, and the new window.
    """
    size, length = window.shape[1], x.shape[1]
    padded = torch.cat((window.to(x.dtype), x), dim=1)
    rows = padded.float()
    parts = [rows[:, k : k + length] * weight[:, k].float() for k in range(size + 1)]
    out = torch.stack(parts).sum(0) if length == 1 else sum(parts[1:], parts[0])
    if bias is not None:
        out = out + bias.float()
    if lengths is None:
        window = padded[:, length:]
    else:
        indices = lengths[:, None] + torch.arange(size, dtype=lengths.dtype, device=x.device)
        window = padded.gather(1, indices.long()[:, :, None].expand(-1, -1, padded.shape[2]))
    return F.silu(out) if has_silu else out, window


def time_steps(
    dt: Tensor, bias: Tensor, lengths: Tensor | None, limits: tuple[float, float] | None = None
) -> Tensor:
    """Compute softplus(dt + bias) [B, L, D], within the limits; 0 for padding tokens."""
    steps = _softplus(dt.float() + bias.float())
    if limits is not None:
        steps = steps.clamp(*limits)
    if lengths is None:
        return steps
    is_real = torch.arange(dt.shape[1], dtype=lengths.dtype, device=dt.device) < lengths[:, None]
    return steps * is_real[:, :, None]


def _softplus(x: Tensor) -> Tensor:
    """Compute max(x, 0) + log(1 + exp(-|x|)), with operators that accelerators have.

    The logarithm of the rounded sum is corrected by the rounding error of the exponential.
    """
    small = (-x.abs()).exp()
    above = small + 1.0
    found = above - 1.0
    is_lost = found == 0
    corrected = above.log() * (small / found.masked_fill(is_lost, 1.0))
    return x.clamp(min=0.0) + torch.where(is_lost, small, corrected)


def scan_heads(
    x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the Mamba-2 scan over sequences, with a state S [P, N] for each of H heads.

    S_t = exp(dt_t * decay) * S_(t-1) + dt_t * x_t b_t' and y_t = S_t c_t. Computed by chunks (Dao
    and Gu 2024, arXiv 2405.21060, section 6): matmuls inside a chunk, and one state passed from
    each chunk to the next.

    Args:
        x: [B, L, H, P].
        dt: [B, L, H] time steps, 0 for padding.
        decay: [H] negative.
        b: [B, L, G, N]; each of the G groups is used by H / G consecutive heads.
        c: [B, L, G, N].
        state: [B, H, P, N] before the first token.

    Returns:
        y [B, L, H, P], and the state after the last token.
    """
    if x.shape[1] == 1:
        return _step_heads(x, dt, decay, b, c, state)
    length = x.shape[1]
    chunk = min(_CHUNK, length)
    if padding := -length % chunk:
        x, b, c = (F.pad(part, (0, 0, 0, 0, 0, padding)) for part in (x, b, c))
        dt = F.pad(dt, (0, 0, 0, padding))
    outputs = []
    for start in range(0, length + padding, chunk * _PIECE):
        piece = slice(start, start + chunk * _PIECE)
        x_part, b_part, c_part = (  # [C, B, H or G, Q, ...]
            part[:, piece].unflatten(1, (-1, chunk)).permute(1, 0, 3, 2, 4) for part in (x, b, c)
        )
        steps = dt[:, piece].unflatten(1, (-1, chunk)).permute(1, 0, 3, 2)
        y, state = _scan_chunks(x_part, steps, decay, b_part, c_part, state)
        outputs.append(y)
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return out[:, :length], state


def _scan_chunks(
    x: Tensor, steps: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the Mamba-2 scan over C whole chunks of Q tokens.

    All chunks are computed together, except the state that one passes to the next: a device that
    records operators then records few for each chunk.

    Args:
        x: [C, B, H, Q, P].
        steps: [C, B, H, Q] time steps.
        decay: [H] negative.
        b: [C, B, G, Q, N].
        c: [C, B, G, Q, N].
        state: [B, H, P, N] before the first chunk.

    Returns:
        y [B, C * Q, H, P], and the state after the last chunk.
    """
    per_group = x.shape[2] // b.shape[2]
    inputs = x * steps[..., None]
    logs = steps * decay[:, None]
    faded = logs.cumsum(-1).exp()[..., None]
    weights = faded_between(logs)
    scores = (c @ b.transpose(-2, -1)).repeat_interleave(per_group, 2) * weights
    keys = b.repeat_interleave(per_group, 2) * weights[..., -1, :, None]
    queries = c.repeat_interleave(per_group, 2) * faded
    values, left = inputs.transpose(-2, -1), faded[..., -1:, :]
    parts = zip(*(part.unbind(0) for part in (queries, keys, values, left)), strict=True)
    before = []
    for query, key, value, remains in parts:
        before.append(query @ state.transpose(-2, -1))
        state = remains * state + value @ key
    y = scores @ inputs + torch.stack(before)
    return y.permute(1, 0, 3, 2, 4).flatten(1, 2), state


def faded_between(logs: Tensor) -> Tensor:
    """Return the total decay from token j to token i, [..., Q, Q]; 0 if j is after i.

    Args:
        logs: [..., Q] logarithm of the decay at each token.
    """
    size = logs.shape[-1]
    indices = torch.arange(size, device=logs.device)
    is_later = indices[:, None] > indices
    # Add up the tokens in between. Differences of cumulative sums would lose precision.
    steps = logs[..., :, None].expand(*logs.shape, size).masked_fill(~is_later, 0.0)
    return steps.cumsum(-2).masked_fill(indices[:, None] < indices, float("-inf")).exp()


def _step_heads(
    x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run `scan_heads` for one token: tensors lack the dimension L."""
    num_groups = b.shape[2]
    steps = dt[:, 0]
    inputs = x[:, 0] * steps[..., None]
    grouped = state.unflatten(1, (num_groups, -1))  # [B, G, H / G, P, N]
    fading = (steps * decay).exp().unflatten(1, (num_groups, -1))[..., None, None]
    entering = inputs.unflatten(1, (num_groups, -1))[..., None] * b[:, 0, :, None, None, :]
    grouped = entering + grouped * fading
    y = (grouped.flatten(2, 3) @ c[:, 0, :, :, None]).squeeze(-1)
    return y.reshape(x.shape), grouped.flatten(1, 2)


def scan_channels(
    x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the Mamba scan over sequences (Gu and Dao 2023, arXiv 2312.00752, algorithm 2).

    Each of D channels has N elements with different decays, so it runs token by token.

    Args:
        x: [B, L, D].
        dt: [B, L, D] time steps, 0 for padding.
        decay: [D, N] negative.
        b: [B, L, N].
        c: [B, L, N].
        state: [B, D, N] before the first token.

    Returns:
        y [B, L, D], and the state after the last token.
    """
    inputs = x * dt
    outputs = []
    for index in range(x.shape[1]):
        fading = (dt[:, index, :, None] * decay).exp()
        entering = inputs[:, index, :, None] * b[:, index, None, :]
        state = torch.addcmul(entering, state, fading)
        outputs.append((state @ c[:, index, :, None]).squeeze(-1))
    return torch.stack(outputs, dim=1), state


def scan_padded_channels(
    x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run `scan_channels` in few operations, for a device where each operation is expensive.

    In a chunk, the states of all tokens are combined with the states 1, 2, 4, ... tokens before
    them (Hillis and Steele 1986).
    """
    inputs = x * dt
    outputs = []
    for start in range(0, x.shape[1], _CHUNK):
        part = slice(start, start + _CHUNK)
        fading = (dt[:, part, :, None] * decay).exp()  # [B, Q, D, N]
        states = inputs[:, part, :, None] * b[:, part, None, :]
        first = states[:, :1] + fading[:, :1] * state[:, None]
        states = first if x.shape[1] == 1 else torch.cat((first, states[:, 1:]), dim=1)
        distance = 1
        while distance < states.shape[1]:
            earlier = (0, 0, 0, 0, distance, 0)
            states = states + fading * F.pad(states[:, :-distance], earlier)
            fading = fading * F.pad(fading[:, :-distance], earlier)
            distance *= 2
        outputs.append((states @ c[:, part, :, None]).squeeze(-1))
        state = states[:, -1]
    return torch.cat(outputs, dim=1), state


class NativeScans:
    """The state-space operators of `NativeOps`, made of the functions above."""

    def scan_tokens(self, at: TokenStates, tokens: ScannedTokens) -> Tensor:
        """Run the Mamba-2 scan over one token of each of B sequences; see `state_space.scan_heads`.

        Args:
            at: the states [rows, H, P, N].
            tokens: the tokens.

        Returns:
            [B, H, P]

        Raises:
            IndexError: an index of a state is out of range.
        """
        x, steps, decay, b, c = tokens
        y, after = scan_heads(
            x[:, None], steps[:, None], decay, b[:, None], c[:, None], at.before()
        )
        at.states.index_copy_(0, at.rows, after)
        return y[:, 0]
