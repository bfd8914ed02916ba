"""Try kernels whose behaviour is not fully documented, and use them only if the card computes the
expected result.

A trial runs a kernel once, on random values, when a model first needs it, and compares the result
with plain torch in float32 on the host. It runs in the mode of the engine: recorded, or compiled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vllm.platforms.habana.bridge import COMPILE_BACKEND
from vllm.platforms.habana.kernels import FusedKernels

LIMIT = 2e-2
"""Largest error in bfloat16, as a fraction of the largest value. A kernel that leaves a key out, or
reads one too many, is ten times as far off."""

FP8 = torch.float8_e4m3fn
FP8_LIMIT = 5e-2
"""Largest error where the softmax is rounded to fp8, by up to a sixteenth of each weight. A scale
that is applied twice, or the wrong way round, is far beyond it."""

BLOCK = 128
SLICE = 1024
"""Default length of the vendor's slices (PT_HPU_SDPA_BC_FACTOR). A kernel with a window may need
lengths that are multiples of a block or of a slice."""


@dataclass(frozen=True)
class Runner:
    """Runs functions on the card."""

    device: torch.device
    is_lazy: bool

    def __call__(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run a function of tensors on the card, and return the result in float32 on the host."""
        on_card = [x.to(self.device) for x in inputs]
        if not self.is_lazy:
            function = torch.compile(function, backend=COMPILE_BACKEND, dynamic=False)
        with torch.inference_mode():
            return function(*on_card).cpu().float()


Trial = Callable[[FusedKernels, Runner], str | None]
"""(kernels, runner) -> what is wrong; None: the kernel can be used."""


def _reproducible(trial: Trial) -> Trial:
    """Return the trial with fixed random numbers, which does not change the random generator of the
    process.
    """

    def run(kernels: FusedKernels, runner: Runner) -> str | None:
        state = torch.get_rng_state()
        torch.manual_seed(0)
        try:
            return _refusal(partial(trial, kernels, runner))
        finally:
            torch.set_rng_state(state)

    return run


def _refusal(run: Callable[[], str | None]) -> str | None:
    """Run a trial, and return why the kernel cannot be used, or None. An exception of any type is
    also a reason.
    """
    try:
        return run()
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        return f"the card refuses it ({type(error).__name__}: {lines[0]})"


def _difference(got: Tensor, want: Tensor, limit: float = LIMIT) -> str | None:
    """Describe how a result differs from the expected one; None if it does not."""
    if got.shape != want.shape:
        return f"it returns a tensor of shape {list(got.shape)}, not {list(want.shape)}"
    error = float((got - want).abs().max() / want.abs().max())
    if error <= limit:
        return None
    return f"its values differ from the values of torch (error {error:.2g}, limit {limit:.0e})"


def _try_sinks(kernels: FusedKernels, runner: Runner) -> str | None:
    """Try sinks (one additional key per head, whose value is zero): causal, and with a mask."""
    query, key, value = _queries_and_keys(BLOCK)
    sinks = (torch.randn(4) + 1).bfloat16()
    mask = torch.rand(1, 1, BLOCK, BLOCK) < 0.5
    mask[..., 0] = True
    causal = torch.ones(BLOCK, BLOCK, dtype=torch.bool).tril()

    def run(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, *masks: Tensor) -> Tensor:
        return kernels.sdpa(query, key, value, *masks, is_causal=not masks, sinks=sinks)

    for masks, seen in (((), causal), ((mask,), mask)):
        got = runner(run, query, key, value, sinks, *masks)
        if (wrong := _difference(got, _attention(query, key, value, seen, sinks))) is not None:
            return wrong
    return None


def _try_window(kernels: FusedKernels, runner: Runner) -> str | None:
    """Find out how a window is passed to the kernel, and for which lengths it works.

    The vendor's code shows that a window has a left and a right side; that some builds require the
    vendor's slices, which PT_HPU_SDPA_QKV_SLICE_MODE_FWD switches on, and a multiple of their size;
    and that key heads that several query heads share were not supported with it. If the card has
    sinks, they are tried together with the window.
    """
    wrong: str | None = None
    sinks = (torch.randn(4) + 1).bfloat16() if kernels.has("FusedSDPA sink") else None
    lengths_by_multiple = {BLOCK: (3 * BLOCK, SLICE + BLOCK), SLICE: (SLICE, 2 * SLICE)}
    for multiple, lengths in lengths_by_multiple.items():
        for left in (1, 0):
            kernels.window_left, kernels.window_multiple = left, multiple
            cases: list[tuple[int, Tensor | None]] = [(length, None) for length in lengths]
            if sinks is not None:
                cases.append((lengths[0], sinks))
            found = [_refusal(partial(_try_length, kernels, runner, *case)) for case in cases]
            if not any(found):
                return None
            wrong = wrong or next(text for text in found if text)
    return wrong


def _try_length(
    kernels: FusedKernels, runner: Runner, num_tokens: int, sinks: Tensor | None
) -> str | None:
    window = BLOCK - 29
    query, key, value = _queries_and_keys(num_tokens)

    def run(query: Tensor, key: Tensor, value: Tensor, *some: Tensor) -> Tensor:
        return kernels.sdpa(
            *(query, key, value), is_causal=True, window=window, sinks=some[0] if some else None
        )

    age = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
    want = _attention(query, key, value, (age >= 0) & (age < window), sinks)
    got = runner(run, query, key, value, *(() if sinks is None else (sinks,)))
    return _difference(got, want)


def _queries_and_keys(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Create inputs of four heads, two of keys. Scores are large, so that each token attends to few
    keys and each of them matters.
    """
    query = torch.randn(1, 4, num_tokens, 64).bfloat16() * 2
    key, value = torch.randn(2, 1, 2, num_tokens, 64).bfloat16()
    return query, key, value


def _attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, sinks: Tensor | None = None
) -> Tensor:
    group = query.shape[1] // key.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (key, value))
    scores = query.float() @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        extra = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, extra), dim=-1)
    out: Tensor = scores.softmax(-1)[..., : key.shape[2]] @ values
    return out


def _try_fp8(kernels: FusedKernels, runner: Runner) -> str | None:
    """Check that scales mean what is documented: each is a different power of two, and the inputs
    are FP8 already. Causal with padding, and with a mask.
    """
    lengths = torch.tensor([BLOCK - 27], dtype=torch.int32)
    inputs = [x.to(FP8) for x in _queries_and_keys(BLOCK)]
    factors = torch.tensor([[0.5], [2.0], [0.25], [64.0], [1 / 64]])
    query, key, value = (x.float() * y for x, y in zip(inputs, factors, strict=False))
    mask = torch.rand(1, 1, BLOCK, BLOCK) < 0.5
    mask[..., 0] = True
    causal = torch.ones(BLOCK, BLOCK, dtype=torch.bool).tril()

    def run(query: Tensor, key: Tensor, value: Tensor, factors: Tensor, seen: Tensor) -> Tensor:
        by = factors.unbind(0)
        has_mask = seen.dtype == torch.bool
        return kernels.fp8_sdpa(
            *((by[0], by[1], by[2]), (by[3], by[4]), query, key, value),
            seen if has_mask else None,
            is_causal=not has_mask,
            softmax_mode="fast",
            valid_seq_len=None if has_mask else seen,
        )

    for given, seen, num_tokens in ((lengths, causal, int(lengths)), (mask, mask, BLOCK)):
        got = runner(run, *inputs, factors, given)[:, :, :num_tokens]
        want = _attention(query, key, value, seen)[:, :, :num_tokens]
        if (wrong := _difference(got, want, FP8_LIMIT)) is not None:
            return wrong
    return None


def _try_block_softmax(kernels: FusedKernels, runner: Runner) -> str | None:
    """Try weights, maxima and sums of blocks, one of which is padding."""
    scores, bias, groups = _blocks()
    num_values = scores.shape[1] * scores.shape[2]

    def run(scores: Tensor, bias: Tensor, groups: Tensor) -> Tensor:
        weights, maxima, sums = kernels.block_softmax(scores, bias, groups)
        found = [x.flatten(1)[:, :num_values, None] for x in (maxima, sums)]
        return torch.cat((weights.flatten(1, 3), *found), dim=-1)

    biased = scores + bias
    maxima = biased.amax(-1, keepdim=True)
    weights = (biased - maxima).exp()
    want = torch.cat((weights, maxima, weights.sum(-1, keepdim=True)), dim=-1).flatten(1, 3)
    is_used = groups >= 0
    everything = runner(run, scores, bias, groups)
    if everything[~is_used, :, :BLOCK].any():
        return "it returns attention weights for a padding block"
    got, want = everything[is_used], want[is_used]
    parts = (slice(0, BLOCK), slice(BLOCK, BLOCK + 1), slice(BLOCK + 1, None))
    differences = (_difference(got[..., part], want[..., part]) for part in parts)
    return next((text for text in differences if text), None)


def _try_adjustment(kernels: FusedKernels, runner: Runner) -> str | None:
    """Try the factors of the blocks of some requests. The sums of a block without visible keys are
    tiny.
    """
    num_blocks, num_kv_heads, group, num_rows = 9, 2, 3, 4
    shape = [num_blocks, num_kv_heads, group, 1, 1]
    maxima, sums = torch.randn(shape) * 4, torch.rand(shape) * 100 + 1
    rows = torch.randint(num_rows, (num_blocks,)).int()
    maxima[0], sums[0], rows[0] = torch.finfo(torch.float32).min, torch.finfo().tiny, rows[1]

    def run(maxima: Tensor, sums: Tensor, rows: Tensor) -> Tensor:
        return kernels.block_softmax_adjustment(maxima, sums, rows, num_rows, shape)

    is_same = rows[:, None] == rows
    pairs = is_same.view(num_blocks, num_blocks, 1, 1)
    flat_maxima, flat_sums = (x.flatten(3).squeeze(-1) for x in (maxima, sums))
    highest = flat_maxima[None].expand(num_blocks, *flat_maxima.shape)
    highest = highest.masked_fill(~pairs, float("-inf")).amax(1)
    parts = (flat_maxima - highest).exp() * flat_sums
    totals = (parts[None] * pairs).sum(1)
    want = ((flat_maxima - highest).exp() / totals).view(shape)
    return _difference(runner(run, maxima, sums, rows).view(shape), want)


def _try_biased_experts(kernels: FusedKernels, runner: Runner) -> str | None:
    """Try four of six experts, with weights in both layouts and some inputs beyond the limit."""
    alpha, limit, first, hidden, size = 1.702, 7.0, 1, 64, 128
    x = (torch.randn(12, hidden) * 2).bfloat16()
    ids = torch.rand(12, 6).topk(2).indices
    weights = torch.rand(12, 2).bfloat16()
    gate_up = torch.randn(4, 2 * size, hidden).mul(hidden**-0.5 * 2).bfloat16()
    down = torch.randn(4, hidden, size).mul(size**-0.5).bfloat16()
    biases = (torch.randn(4, 2 * size).bfloat16(), torch.randn(4, hidden).bfloat16())

    def run(x: Tensor, ids: Tensor, weights: Tensor, *of_experts: Tensor) -> Tensor:
        gates_ups, downs, *biases = (given.unbind(0) for given in of_experts)
        return kernels.bias_moe(
            *(x, ids, weights, gates_ups, downs, biases[0], biases[1]),
            *(alpha, limit, first, gates_ups[0].shape[0] == hidden),
        )

    inner = torch.einsum("th,eoh->teo", x.float(), gate_up.float()) + biases[0].float()
    gate, up = inner[..., ::2].clamp(max=limit), inner[..., 1::2].clamp(-limit, limit)
    middle = gate * torch.sigmoid(alpha * gate) * (up + 1)
    each = torch.einsum("tes,ehs->teh", middle, down.float()) + biases[1].float()
    shares = torch.zeros(12, 6).scatter(1, ids, weights.float())[:, first : first + 4]
    want = (shares[..., None] * each).sum(1)
    for pair in ((gate_up, down), (gate_up.mT.contiguous(), down.mT.contiguous())):
        got = runner(run, x, ids, weights, *pair, *biases)
        if (wrong := _difference(got, want)) is not None:
            return wrong
    return None


def _blocks() -> tuple[Tensor, Tensor, Tensor]:
    scores = torch.randn(5, 2, 3, 1, BLOCK) * 3
    bias = torch.zeros(5, 1, 1, 1, BLOCK)
    for block, usage in enumerate((128, 1, 77, 128, 1)):
        bias[block, ..., usage:] = torch.finfo(torch.float32).min / 2
    return scores, bias, torch.tensor([0, 2, 1, 0, -1], dtype=torch.int32)


TRIALS: dict[str, Trial] = {
    "FusedSDPA window_size": _reproducible(_try_window),
    "FusedSDPA sink": _reproducible(_try_sinks),
    "fp8_fused_sdpa": _reproducible(_try_fp8),
    "block_softmax": _reproducible(_try_block_softmax),
    "block_softmax_adjustment": _reproducible(_try_adjustment),
    "mixture_of_experts with biases": _reproducible(_try_biased_experts),
}
"""Name of a part -> trial."""


def find_fault(runner: Runner, kernels: FusedKernels, name: str) -> str | None:
    """Run the trial of a part. Returns why the part cannot be used; None if it can, or if it has no
    trial.
    """
    trial = TRIALS.get(name)
    return None if trial is None else trial(kernels, runner)
