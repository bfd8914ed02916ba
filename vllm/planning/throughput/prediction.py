"""Predicts the speed of an engine that always runs a number of equal requests.

Each request that finishes is replaced by the next: while a request generates its output, each of
the others is replaced once, and its prefill delays the decodes. Lengths are padded to blocks; the
padding of buckets is not included.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import ArrayLike

from vllm.cost_model.fitted import Floats
from vllm.cost_model.throughput import ServingCost, StepTime


@dataclass(frozen=True)
class Lengths:
    """Prompt and output tokens of a request."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        """Tokens of prompt and output together."""
        return self.prompt + self.output


@dataclass(frozen=True)
class Speed:
    """Times of a request, and rates of an engine; arrays have one value per batch size.

    Attributes:
        ttft_s: seconds from the arrival of a request to its first token: the running decode, then
            its prefill.
        tpot_s: between two tokens of a request, with the prefills of others.
        tokens_per_s: tokens per second of all outputs together.
        prompt_tokens_per_s: tokens per second of a prefill, without decodes.
        decode_tokens_per_s: tokens per second of decodes, without prefills.
    """

    ttft_s: Floats
    tpot_s: Floats
    tokens_per_s: Floats
    prompt_tokens_per_s: Floats
    decode_tokens_per_s: Floats

    def at(self, index: int) -> "Speed":
        """Return the speed of one of the batch sizes."""
        return Speed(*(getattr(self, field.name)[index : index + 1] for field in fields(self)))


@dataclass(frozen=True)
class Prediction:
    """The predicted speed for some batch sizes, its uncertainty, and what limits it.

    Attributes:
        batch: requests that run at a time.
        lengths: length of each request.
        expected, slow, fast: the middle and the ends of the uncertainty band.
        prefill_bound, decode_bound: one of `cost_model.throughput.PARTS` for each batch.
        outside: why no published run is near; empty if one is.
    """

    batch: Floats
    lengths: Lengths
    expected: Speed
    slow: Speed
    fast: Speed
    prefill_bound: Sequence[str]
    decode_bound: Sequence[str]
    outside: tuple[str, ...]

    def at(self, index: int) -> "Prediction":
        """Return the prediction for one of the batch sizes."""
        return replace(
            self,
            batch=self.batch[index : index + 1],
            expected=self.expected.at(index),
            slow=self.slow.at(index),
            fast=self.fast.at(index),
            prefill_bound=self.prefill_bound[index : index + 1],
            decode_bound=self.decode_bound[index : index + 1],
        )


def predict(
    cost: ServingCost, batch: ArrayLike, lengths: Lengths, *, block_size: int, longest_prefill: int
) -> Prediction:
    """Predict the speed of an engine.

    Args:
        cost: cost of its steps.
        batch: [n] numbers of requests that run at a time.
        lengths: length of each request.
        block_size: tokens of a block.
        longest_prefill: tokens of a prefill; longer prompts are prefilled in chunks.
    """
    batch = np.atleast_1d(np.asarray(batch, np.float64))
    prefill = _prefill(cost, lengths.prompt, block_size, longest_prefill)
    decode = cost.decode_seconds(batch, batch * mean_context(lengths, block_size))
    return Prediction(
        batch=batch,
        lengths=lengths,
        expected=_speed(batch, lengths, prefill.seconds, decode.seconds),
        slow=_speed(batch, lengths, prefill.high, decode.high),
        fast=_speed(batch, lengths, prefill.low, decode.low),
        prefill_bound=[str(prefill.bound_by)] * len(batch),
        decode_bound=[str(name) for name in decode.bound_by],
        outside=cost.outside_of_data(lengths.prompt),
    )


def mean_context(lengths: Lengths, block_size: int) -> float:
    """Return the average number of tokens that a decode reads of one request, in whole blocks."""
    positions = lengths.prompt + np.arange(1, max(lengths.output, 2))
    return float(block_size * np.mean(-(-positions // block_size)))


def _prefill(cost: ServingCost, prompt_len: int, block_size: int, longest: int) -> StepTime:
    """Predict the time of all chunks of one prompt."""
    chunk = max(block_size, longest // block_size * block_size)
    starts = np.arange(0, prompt_len, chunk)
    blocks = -(-np.minimum(prompt_len - starts, chunk) // block_size)
    steps = cost.prefill_seconds(1, blocks * block_size, starts // block_size)
    return StepTime(steps.parts.sum(0), steps.low.sum(), steps.high.sum())


def _speed(batch: Floats, lengths: Lengths, prefill_s: Floats, decode_s: Floats) -> Speed:
    num_decodes = max(lengths.output - 1, 0)
    cycle_s = batch * prefill_s + num_decodes * decode_s
    others_s = (batch - 1) * prefill_s
    return Speed(
        ttft_s=prefill_s + decode_s,
        tpot_s=decode_s + others_s / max(num_decodes, 1),
        tokens_per_s=batch * lengths.output / cycle_s,
        prompt_tokens_per_s=np.full_like(batch, lengths.prompt / prefill_s),
        decode_tokens_per_s=batch / decode_s,
    )
