"""Sample tokens from logits.

For each request, in this order:

    rules of the model                                                   forbid
    processors, logit_bias, allowed_token_ids, bad_words, min_tokens     change logits, or forbid
    repetition, frequency and presence penalty
    argmax, if the request is greedy; else
    temperature -> min_p -> top_k -> top_p                               each on what is left
    one draw by the request's random numbers                             an exponential race

Log-probabilities are computed from the model's logits, after the rules of the model. Nothing here
waits for the device or has a shape that depends on values, and the token of a request does not
depend on the other requests. The exception is logits processors, which are Python functions of a
user: except on a CPU, a batch with one waits for its logits and copies them to the host and back.

On a device that compiles shapes this is a sequence of stages; see `static_shapes`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vllm.sample.block_reductions import (
    argmax,
    as_whole_blocks,
    block_max,
    draw,
    padded_copy,
    split_blocks,
)
from vllm.sample.buffers import Buffers
from vllm.sample.features import Feature, Param
from vllm.sample.filters import keep_from, likelihoods, logit_floor, nucleus_floor
from vllm.sample.logprobs import LogprobTensors, gather_logprobs
from vllm.sample.metadata import FeatureArray, IndexArray, LogprobPlan, SamplingMetadata
from vllm.sample.restrictions.processors import LogitsProcessorError, RowProcessors

_PASS_ELEMENTS = 2**20
"""Number of logits in one pass: temporaries then fit into the cache of a CPU."""

_SPLIT_ELEMENTS = 2**16
"""With fewer logits than this, all rows are sampled in one pass."""


@dataclass(frozen=True)
class SamplerOutput:
    """Sampled tokens of n requests. The tensors are on the device and may not be computed yet."""

    token_ids: Tensor
    """[n] int32, always in the vocabulary; meaningless where `invalid` or in `errors`."""
    host_ids: Tensor
    """[n] int32: the same, but -1 where `invalid`: all that the host needs, in one copy."""
    logprobs: LogprobTensors | None = None
    """Log-probabilities of the rows of `logprob_plan`, in its order."""
    logprob_plan: LogprobPlan | None = None
    errors: dict[int, str] = field(default_factory=dict)
    """Host: row of the launch -> error of a user's logits processor."""

    @property
    def invalid(self) -> Tensor:
        """[n] bool: the logits of the request contain NaN or +inf, or no token is allowed."""
        return self.host_ids < 0


def _no_stages() -> None:
    """Do nothing at the end of a stage; for devices that run operators when they are called."""


class Sampler:
    """Samples one token for each request. It has no state except buffers.

    Args:
        pass_elements: logits per pass; on a CPU, requests are sampled in passes of about this many
            logits, so that temporaries fit into the cache and no request computes features of
            others. None: one pass over all requests, for a device with static shapes. The tokens
            are the same.
        end_stage: called before the first stage and after each one, for a device that compiles the
            operators recorded until then: its `mark_step`. None: there are no stages.
    """

    def __init__(
        self,
        pass_elements: int | None = _PASS_ELEMENTS,
        end_stage: Callable[[], None] | None = None,
    ) -> None:
        self._pass_elements = pass_elements
        self._end_stage = end_stage or _no_stages
        self._kept_buffers = Buffers()

    @torch.inference_mode()
    def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Sample one token for each of n requests.

        Args:
            logits: [n, V] float32, bfloat16 or float16; only read.
            metadata: metadata of the same n requests.
        """
        errors: dict[int, str] = {}
        if metadata.rules is not None:
            self._end_stage()
            logits = metadata.rules.apply(logits)
        # Several passes reuse small buffers. A single pass over the whole batch allocates from the
        # device.
        buffers = None if self._pass_elements is None else self._kept_buffers
        self._end_stage()  # separates earlier recorded operations from the first stage
        passes = self._passes(logits, metadata.features)
        if len(passes) > 1:
            token_ids, top = self._sample_in_passes(logits, metadata, passes, errors, buffers)
        else:
            token_ids, top = self._sample(logits, metadata, errors, buffers)
        plan = metadata.logprobs
        # `top - top` is NaN if top is infinite or NaN.
        host_ids = token_ids.masked_fill((top - top) != 0, -1)
        self._end_stage()
        return SamplerOutput(
            token_ids=token_ids,
            host_ids=host_ids,
            logprobs=None if plan is None else self._logprobs(logits, token_ids, plan, buffers),
            logprob_plan=plan,
            errors=errors,
        )

    def gather_logprobs(
        self, logits: Tensor, token_ids: Tensor, num_logprobs: int
    ) -> LogprobTensors:
        """Return log-probabilities of given tokens, such as the tokens of a prompt.

        Args:
            logits: [n, V] any float dtype, unchanged from the model.
            token_ids: [n] int32 or int64, on the device of the logits.
            num_logprobs: number of most likely tokens; at most V are returned.
        """
        buffers = None if self._pass_elements is None else Buffers()
        return gather_logprobs(logits.float(), token_ids, num_logprobs, buffers=buffers)

    def _passes(self, logits: Tensor, features: FeatureArray | None) -> list[IndexArray]:
        """Return the requests of each pass; an empty list or one pass means all requests at
        once.
        """
        num_rows, vocab_size = logits.shape
        if self._pass_elements is None or features is None or num_rows == 1:
            return []
        if num_rows * vocab_size <= _SPLIT_ELEMENTS:
            return []
        return _split_rows(features, max(1, self._pass_elements // vocab_size))

    def _logprobs(
        self, logits: Tensor, token_ids: Tensor, plan: LogprobPlan, buffers: Buffers | None
    ) -> LogprobTensors:
        if plan.rows is not None:
            logits, token_ids = logits[plan.rows], token_ids[plan.rows]
        found = gather_logprobs(
            logits, token_ids, plan.width, pass_elements=self._pass_elements, buffers=buffers
        )
        self._end_stage()
        return found

    def _sample_in_passes(
        self,
        logits: Tensor,
        metadata: SamplingMetadata,
        passes: list[IndexArray],
        errors: dict[int, str],
        buffers: Buffers | None,
    ) -> tuple[Tensor, Tensor]:
        """Sample like `_sample`, in several passes over parts of the requests."""
        num_rows = logits.shape[0]
        token_ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
        top = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
        for indices in passes:
            rows = torch.from_numpy(indices).to(logits.device)
            first, last = int(indices[0]), int(indices[-1])
            # Consecutive rows can be a view, which is free; others need a copy.
            is_slice = last - first == len(indices) - 1
            part = logits[first : last + 1] if is_slice else logits[rows]
            part_errors: dict[int, str] = {}
            part_metadata = metadata.select(indices, rows)
            part_token_ids, part_top = self._sample(part, part_metadata, part_errors, buffers)
            token_ids[rows] = part_token_ids
            top[rows] = part_top.float()
            errors.update({int(indices[i]): error for i, error in part_errors.items()})
        return token_ids, top

    def _sample(
        self,
        logits: Tensor,
        metadata: SamplingMetadata,
        errors: dict[int, str],
        buffers: Buffers | None,
    ) -> tuple[Tensor, Tensor]:
        """Return [n] int32 token ids and [n] largest processed logits, which are not finite for a
        failed request.

        The last stage (distribution) is not ended yet.
        """
        vocab_size = logits.shape[-1]
        if metadata.changes_logits:
            x = padded_copy(logits, buffers)
            self._end_stage()
            self._change_logits(x, vocab_size, metadata, errors)
        elif metadata.all_greedy:
            x = logits
        else:
            x = as_whole_blocks(logits, buffers)
        maxima = block_max(x)
        top = maxima.amax(-1)
        if metadata.all_greedy:
            token_ids = argmax(x, maxima)
        else:
            token_ids = _sample_random(x, maxima, vocab_size, metadata, buffers)
            if (greedy_mask := metadata.greedy_mask) is not None:
                token_ids = torch.where(greedy_mask, argmax(x, maxima), token_ids)
        # For rows with NaN, argmax and searchsorted may return an index beyond the vocabulary on
        # some devices.
        return token_ids.clamp_max(vocab_size - 1), top

    def _change_logits(
        self, x: Tensor, vocab_size: int, metadata: SamplingMetadata, errors: dict[int, str]
    ) -> None:
        """Change the first `vocab_size` columns of x in place, with one stage for each kind of
        change.
        """
        if metadata.processors:
            _run_processors(x, vocab_size, metadata.processors, errors)
        if metadata.edits is not None:
            metadata.edits.apply(x)
            self._end_stage()
        if metadata.masks is not None:
            metadata.masks.apply(x)
            self._end_stage()
        if metadata.penalties is not None:
            assert metadata.params is not None
            metadata.penalties.apply(x, metadata.params)
            self._end_stage()


def _split_rows(features: FeatureArray, size: int) -> list[IndexArray]:
    """Split requests into groups of at most `size` requests with similar cost and features. Each
    request is in one group.
    """
    is_random = (features & Feature.RANDOM) > 0
    bits = Feature.TOP_P | Feature.TOP_K
    is_expensive = ((features & bits) == Feature.TOP_P) | ((features & Feature.LARGE_TOP_K) > 0)
    cost = is_random.astype(np.int32) + (is_random & is_expensive)
    order = np.lexsort((features, cost))
    ends = np.flatnonzero(np.diff(cost[order])) + 1
    return [
        np.sort(group[start : start + size])
        for group in np.split(order, ends)
        for start in range(0, len(group), size)
    ]


def _run_processors(
    x: Tensor,
    vocab_size: int,
    processors: tuple[tuple[int, RowProcessors], ...],
    errors: dict[int, str],
) -> None:
    # Copy all rows: copying selected rows would compile an operator for each number of rows.
    host = x.cpu()
    for row, row_processors in processors:
        try:
            row_processors.apply(host[row, :vocab_size])
        except LogitsProcessorError as error:
            errors[row] = str(error)
    if host is not x:
        x.copy_(host)


def _sample_random(
    x: Tensor, maxima: Tensor, vocab_size: int, metadata: SamplingMetadata, buffers: Buffers | None
) -> Tensor:
    assert metadata.exponentials is not None
    top = maxima.amax(-1, keepdim=True)
    out = None if buffers is None else buffers.get_like("weights", x)
    weights = likelihoods(x, top, metadata.param(Param.TEMPERATURE), out=out)
    floor = logit_floor(x, maxima, top, metadata)
    if floor is not None:
        weights.mul_(keep_from(x, floor, buffers))
    top_p = metadata.param(Param.TOP_P)
    if metadata.unbounded_top_p and top_p is not None:
        # Top_p of these rows was already applied together with top_k.
        if metadata.top_k is not None:
            top_p = torch.where(metadata.top_k > 0, 1.0, top_p)
        least = nucleus_floor(weights, top_p, vocab_size, buffers)
        weights.mul_(keep_from(weights, least, buffers))
    return draw(split_blocks(weights), metadata.exponentials)
