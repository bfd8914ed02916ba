"""What the sampler must know about the n rows of one launch. Knows no request and no history."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vllm.sample.constraints import LogitEdits, TokenMasks
from vllm.sample.penalties import Penalties
from vllm.sample.processors import RowProcessors

FeatureArray = npt.NDArray[np.int32]
IndexArray = npt.NDArray[np.int64]

SMALL_TOP_K = 128
"""Candidates that are cheap to find; rows with a larger top_k must not slow others down."""

_Rows = TypeVar("_Rows", Tensor, LogitEdits, Penalties)


class Feature:
    """Bits that say what a row uses. A greedy row that asks for nothing has none."""

    RANDOM = 1
    TEMPERATURE = 2
    """Another one than 1."""
    MIN_P = 4
    TOP_K = 8
    TOP_P = 16
    PENALTIES = 32
    EDITS = 64
    MASK = 128
    PROCESSORS = 256
    LOGPROBS = 512

    LARGE_TOP_K = 1024
    """A top_k above `SMALL_TOP_K`."""

    CHANGES_LOGITS = PENALTIES | EDITS | MASK | PROCESSORS


@dataclass(frozen=True)
class LogprobPlan:
    """Which rows of a launch want log-probabilities, and how many."""

    indices: IndexArray
    """[m] rows of the launch that want them, on the host."""
    num_logprobs: npt.NDArray[np.int32]
    """[m] likeliest tokens that each wants, besides the sampled one."""
    width: int
    """Likeliest tokens to compute; at least each of `num_logprobs`."""
    rows: Tensor | None
    """[m or more] `indices` on the device, the last repeated as padding; None: all n rows."""


@dataclass(frozen=True)
class SamplingMetadata:
    """Per-row parameters of one launch. A field that no row of the launch needs is None.

    The default is n greedy rows that ask for nothing, for any n. Tensors are on the device of
    the logits; "host" fields decide which operators run, so on a device that compiles shapes
    each combination of them is a variant to warm up.
    """

    features: FeatureArray | None = None
    """[n] host: bits of `Feature` of each row; None: no row has any."""
    all_greedy: bool = True
    """Host: no row is random."""
    all_random: bool = False
    """Host: every row is random."""
    greedy_mask: Tensor | None = None
    """[n] bool; None when all rows are of one kind."""
    exponentials: Tensor | None = None
    """[n, K] float32 above 0, K of `blocks.num_draws`: the random numbers of each row; None when
    all are greedy."""
    temperature: Tensor | None = None
    """[n] float32, 1 for greedy rows; None when all are 1."""
    min_p: Tensor | None = None
    """[n] float32; 0 is off."""
    top_k: Tensor | None = None
    """[n] int64; 0 is off."""
    max_top_k: int | None = None
    """Host: at least each of `top_k`; the number of candidates to look at."""
    top_p: Tensor | None = None
    """[n] float32; 1 is off."""
    unbounded_top_p: bool = False
    """Host: a row has top_p and no top_k, so all of its vocabulary is searched."""
    processors: tuple[tuple[int, RowProcessors], ...] = ()
    """Host: (row of the launch, processors of a user)."""
    edits: LogitEdits | None = None
    """logit_bias, bad_words and min_tokens."""
    masks: TokenMasks | None = None
    """allowed_token_ids."""
    penalties: Penalties | None = None
    logprobs: LogprobPlan | None = None

    @property
    def changes_logits(self) -> bool:
        """The distribution of some row is not the model's own."""
        return bool(self.processors or self.edits or self.masks or self.penalties)

    def select(self, indices: IndexArray, rows: Tensor) -> "SamplingMetadata":
        """Of some rows only, without what none of them needs and without `logprobs`.

        Args:
            indices: [m] rows of the launch, on the host.
            rows: [m] int64, the same on the device.
        """
        if self.features is None:
            return ALL_GREEDY
        features = self.features[indices]
        active = int(np.bitwise_or.reduce(features))
        if not active:
            return ALL_GREEDY
        all_random = bool(np.bitwise_and.reduce(features) & Feature.RANDOM)

        def take(values: _Rows | None, needed: int) -> _Rows | None:
            return values[rows] if values is not None and active & needed else None

        max_top_k = self.max_top_k
        if max_top_k is not None and not active & Feature.LARGE_TOP_K:
            max_top_k = min(max_top_k, SMALL_TOP_K) if active & Feature.TOP_K else None
        position = {old: new for new, old in enumerate(indices.tolist())} if self.processors else {}
        return SamplingMetadata(
            features=features,
            all_greedy=not active & Feature.RANDOM,
            all_random=all_random,
            greedy_mask=None if all_random else take(self.greedy_mask, Feature.RANDOM),
            exponentials=take(self.exponentials, Feature.RANDOM),
            temperature=take(self.temperature, Feature.TEMPERATURE),
            min_p=take(self.min_p, Feature.MIN_P),
            top_k=take(self.top_k, Feature.TOP_K),
            max_top_k=max_top_k,
            top_p=take(self.top_p, Feature.TOP_P),
            unbounded_top_p=has_unbounded_top_p(features),
            processors=tuple((position[i], p) for i, p in self.processors if i in position),
            edits=take(self.edits, Feature.EDITS),
            masks=self.masks.select(indices) if self.masks is not None else None,
            penalties=take(self.penalties, Feature.PENALTIES),
        )


ALL_GREEDY = SamplingMetadata()


def has_unbounded_top_p(features: FeatureArray) -> bool:
    """A row has top_p and no top_k."""
    bits = Feature.TOP_P | Feature.TOP_K
    return bool(((features & bits) == Feature.TOP_P).any())
