"""Check integers and bools on the card: sums, token masks, drafts, and copies of them."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vllm.bucketing.bucket import decode
from vllm.hpu_check.check import MAX_STEP_S, Outcome, ran_on_host, slow_call
from vllm.hpu_check.stopwatch import shortest_s
from vllm.messages import IntArray
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.sample.restrictions.masks import TokenMasks, bit_values, num_words, pack_allowed
from vllm.sample.sampler import SamplerOutput
from vllm.worker.batch.input_batch import InputBatch
from vllm.worker.hpu.launches.device_tokens import DeviceTokens
from vllm.worker.hpu.launches.input import HPUInputBuilder, unpack_decode
from vllm.worker.hpu.launches.planner import PaddedLaunch, PaddedShape

_COPY_WORDS = 2**18
"""1 MiB: as much as the bridge copies in a thread of its own, where it can."""
_VOCAB_SIZE, _PADDED_SIZE = 4000, 4096
_NUM_ROWS, _BLOCK_SIZE, _MAX_DRAFTS, _MAX_LEN = 4, 8, 3, 64


def check_reductions(bridge: HabanaBridge) -> Outcome:
    """Check maximum and sum of int32, and the count of true bools, in the form that the engine
    uses.
    """
    values = torch.randint(-1000, 1000, (33, 7)).int()
    forms: dict[str, Callable[[Tensor], Tensor]] = {
        "torch.amax of int32": lambda x: torch.amax(x, 1),
        "torch.sum of int32": lambda x: torch.sum(x, 1, dtype=torch.int32),
        "torch.sum of bool": lambda x: torch.sum(x > 0, -1, keepdim=True, dtype=torch.int32),
    }
    before = bridge.counters().cpu_fallbacks
    for name, form in forms.items():
        got = form(values.to(bridge.device)).cpu()
        if got.dtype != torch.int32 or not torch.equal(got, form(values)):
            return Outcome("fail", f"the result of {name} differs from the result on the host")
    return ran_on_host(bridge, before) or Outcome("pass", ", ".join(forms))


def check_token_masks(bridge: HabanaBridge) -> Outcome:
    """Check masking of logits by the allowed tokens of some requests, with and without padding."""
    words = np.stack([pack_allowed(range(n, _VOCAB_SIZE, 3 + n), _VOCAB_SIZE) for n in range(3)])
    rows = np.array([3, 0, 2], np.int64)
    before = bridge.counters().cpu_fallbacks
    for width in (num_words(_VOCAB_SIZE) * 32, _PADDED_SIZE):
        logits = torch.randn(5, width).bfloat16()
        on_card = logits.to(bridge.device)
        run = partial(_mask(words, rows, bridge.device).apply, on_card)
        run()
        want = logits.clone()
        _mask(words, rows, torch.device("cpu")).apply(want)
        if not torch.equal(on_card.cpu(), want):
            return Outcome("fail", f"with {width} tokens, the masked tokens differ from the host")
        if (slow := slow_call(f"{width} tokens", shortest_s(bridge, run), MAX_STEP_S)) is not None:
            return Outcome("fail", slow)
    found = ran_on_host(bridge, before)
    return found or Outcome("pass", "3 requests, with and without padding of the vocabulary")


def check_drafts(bridge: HabanaBridge) -> Outcome:
    """Check that the card computes how many drafts are accepted, and the tokens with which the next
    decode begins.
    """
    first, second = _launches()
    # Each draft is token 1. Row i samples token 1 at its first i positions, so i drafts are
    # accepted.
    sampled = np.tri(_NUM_ROWS + 1, 1 + _MAX_DRAFTS, -1, np.int32)
    before = bridge.counters().cpu_fallbacks
    got, want = (
        [x.cpu() for x in _verify(device, first, second, sampled)]
        for device in (bridge.device, torch.device("cpu"))
    )
    names = ("outputs", "newest tokens", "ends", "tokens")
    for name, ours, theirs in zip(names, got, want, strict=True):
        if not torch.equal(ours, theirs):
            return Outcome("fail", f"the {name} of a forward pass with drafts differ from the host")
    num_right = (want[0][:_NUM_ROWS, 0] - 1).tolist()
    detail = (
        f"accepted drafts of {_NUM_ROWS} requests: {num_right} of {_MAX_DRAFTS}, as on the host"
    )
    return ran_on_host(bridge, before) or Outcome("pass", detail)


def check_pinned_copies(bridge: HabanaBridge) -> Outcome:
    """Check copies without waiting from pinned memory and from other memory. Their times show which
    is faster on this machine.
    """
    values = torch.arange(_COPY_WORDS, dtype=torch.int32)
    pinned, pageable = bridge.pinned(_COPY_WORDS).copy_(values), values.clone()
    times = []
    for source in (pinned, pageable):
        copy = partial(source.to, bridge.device, non_blocking=True)
        if not torch.equal(copy().cpu(), values):
            return Outcome("fail", "the bytes on the card differ from the bytes that were sent")
        times.append(f"{shortest_s(bridge, copy) * 1e6:.0f} us")
    kind = "pinned memory" if pinned.is_pinned() else "memory that could not be pinned"
    return Outcome("pass", f"1 MiB takes {times[0]} from {kind}, {times[1]} from pageable memory")


def _mask(words: IntArray, rows: "np.typing.NDArray[np.int64]", device: torch.device) -> TokenMasks:
    return TokenMasks(rows, torch.from_numpy(words).to(device), bit_values(device))


def _launches() -> list[tuple[Tensor, PaddedShape]]:
    """Return two packed decodes of the same requests with drafts, and their shapes. The second
    begins where the first ends if all of its drafts are accepted.
    """
    batch = InputBatch(_NUM_ROWS, _MAX_LEN, _MAX_LEN // _BLOCK_SIZE)
    batch.token_ids[:] = 1
    batch.block_table[:] = 1 + np.arange(batch.block_table.size).reshape(batch.block_table.shape)
    builder = HPUInputBuilder(batch, _BLOCK_SIZE, has_device_drafts=True)
    rows = np.arange(_NUM_ROWS, dtype=np.int32)
    num_drafts = np.full(_NUM_ROWS, _MAX_DRAFTS, np.int32)
    num_blocks = _NUM_ROWS * _MAX_LEN // _BLOCK_SIZE
    begin = np.arange(10, 10 + _NUM_ROWS, dtype=np.int32)
    packed = []
    for start in (begin, begin + 1 + _MAX_DRAFTS):
        batch.num_tokens[rows] = start + 1
        launch = PaddedLaunch(
            rows,
            start,
            num_drafts + 1,
            decode(_NUM_ROWS + 1, num_blocks, 1 + _MAX_DRAFTS),
            num_drafts=num_drafts,
        )
        packed.append((torch.from_numpy(builder.pack(launch)[0]), launch.shape))
        builder.mark_sampled(rows)
    return packed


def _verify(
    device: torch.device,
    first: tuple[Tensor, PaddedShape],
    second: tuple[Tensor, PaddedShape],
    sampled: IntArray,
) -> list[Tensor]:
    """Run both decodes on a device, and return the resulting state of the requests, in the order of
    `check_drafts`.
    """
    device_tokens = DeviceTokens(_NUM_ROWS, device, _MAX_DRAFTS)
    device_tokens.drafts.fill_(1)
    token_ids = torch.from_numpy(sampled.ravel()).to(device)
    output = device_tokens.accept(
        first[0].to(device), first[1], SamplerOutput(token_ids, token_ids)
    )
    assert output is not None
    next_decode = device_tokens.fill_in(unpack_decode(second[0].to(device), second[1]), second[1])
    kept = [
        x[:_NUM_ROWS] for x in (device_tokens.newest, device_tokens.ends)
    ]  # leaves out the padding row
    return [output, *kept, next_decode.token_ids]
