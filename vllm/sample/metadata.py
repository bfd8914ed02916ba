"""Define the sampling parameters of the n requests in one batch. Independent of requests and
history.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vllm.sample.constraints import LogitEdits
from vllm.sample.features import SMALL_TOP_K, Feature, Param
from vllm.sample.penalties import Penalties
from vllm.sample.random import KeyArray, exponentials_at
from vllm.sample.restrictions.masks import TokenMasks
from vllm.sample.restrictions.output_rules import LogitRules
from vllm.sample.restrictions.processors import RowProcessors

FeatureArray = npt.NDArray[np.int32]
IndexArray = npt.NDArray[np.int64]

_Rows = TypeVar("_Rows", Tensor, LogitEdits, Penalties)


@dataclass(frozen=True)
class LogprobPlan:
    """The requests of a batch that want log-probabilities, and how many."""

    indices: IndexArray
    """[m] rows of the launch that want them, on the host."""
    num_logprobs: npt.NDArray[np.int32]
    """[m] number of most likely tokens that each wants, in addition to the sampled one."""
    width: int
    """Number of most likely tokens to compute; at least each of `num_logprobs`."""
    rows: Tensor | None
    """[m] `indices` on the device, to compute no others; None: all n rows of the launch."""


@dataclass(frozen=True)
class RandomKeys:
    """Keys and positions of the random numbers of n requests, on the host."""

    keys: KeyArray
    """[n] of `random.stream_keys`."""
    positions: IndexArray
    """[n]"""

    def exponentials(self, count: int) -> npt.NDArray[np.float32]:
        """Compute the exponentially distributed random numbers [n, count]."""
        return exponentials_at(self.keys, self.positions, count)

    def __getitem__(self, indices: IndexArray) -> "RandomKeys":
        """Select the keys of requests [m]."""
        return RandomKeys(self.keys[indices], self.positions[indices])


class OperatorChoice(NamedTuple):
    """Host fields of `SamplingMetadata` that decide which torch operators run."""

    all_random: bool = False
    max_top_k: int | None = None
    unbounded_top_p: bool = False

    @classmethod
    def of(cls, features: FeatureArray, top_k: npt.NDArray[np.float32]) -> "OperatorChoice":
        """Choose the operators for requests [n] on a device without static shapes."""
        has_top_k = len(features) and np.bitwise_or.reduce(features) & Feature.TOP_K
        return cls(
            all_random=bool(np.bitwise_and.reduce(features) & Feature.RANDOM),
            max_top_k=int(top_k.max()) if has_top_k else None,
            unbounded_top_p=has_unbounded_top_p(features),
        )


@dataclass(frozen=True)
class SamplingMetadata:
    """Sampling parameters of one batch, per request.

    A field that no request of the batch needs is None. The default values mean greedy requests
    without other features, and fit any number n of requests.

    Tensors are on the device of the logits. They were only copied to the device: no operator has
    run on them, so that no operator is recorded before the sampler's first stage. Fields whose text
    begins with "Host" are on the host and decide which operators run. The fields of
    `OperatorChoice` are left out if `draw_keys` is given, which is for a sampler that does not run
    torch operators.
    """

    features: FeatureArray | None = None
    """[n] host: bits of `Feature` of each row; None: no row has any."""
    active: int = 0
    """Host: the bits of any row; with static shapes rounded up to a kind of distribution."""
    all_random: bool = False
    """Host: every row is random. Always False with static shapes, where every launch has a mask of
    the random rows."""
    params: Tensor | None = None
    """[params, n] float32 in the order of `Param`; None when all are greedy and have no penalty."""
    exponentials: Tensor | None = None
    """[n, K] float32 above 0, K of `blocks.num_draws`: the random numbers of each row; None when
    all are greedy, or for a sampler that makes them of `draw_keys`."""
    draw_keys: RandomKeys | None = None
    """Host: instead of `exponentials`; None if all are greedy."""
    max_top_k: int | None = None
    """Host: at least each of `top_k`; the number of candidates to look at."""
    unbounded_top_p: bool = False
    """Host: a row may have top_p without top_k, so that its whole vocabulary is searched."""
    processors: tuple[tuple[int, RowProcessors], ...] = ()
    """Host: (row of the launch, logits processors)."""
    edits: LogitEdits | None = None
    """logit_bias, bad_words and min_tokens."""
    masks: TokenMasks | None = None
    """allowed_token_ids and structured output."""
    penalties: Penalties | None = None
    rules: LogitRules | None = None
    """Rules of the model, which log-probabilities follow too."""
    logprobs: LogprobPlan | None = None

    @property
    def all_greedy(self) -> bool:
        """Whether all requests are greedy."""
        return not self.active & Feature.RANDOM

    @property
    def changes_logits(self) -> bool:
        """Whether the distribution of a request differs from the model's."""
        # `is not None` and not the truth of the objects: torch.compile of torch 2.6 cannot trace
        # that.
        changes = (self.edits, self.masks, self.penalties)
        return bool(self.processors) or any(change is not None for change in changes)

    @property
    def greedy_mask(self) -> Tensor | None:
        """[n] bool, True for greedy requests; None if all requests are greedy or none is."""
        if self.all_random:
            return None
        is_greedy = self.param(Param.IS_GREEDY)
        return None if is_greedy is None else is_greedy > 0

    @property
    def top_k(self) -> Tensor | None:
        """[n] int32 top_k of each request, 0 if off; None if no request has it."""
        top_k = self.param(Param.TOP_K)
        return None if top_k is None else top_k.int()

    def param(self, param: Param) -> Tensor | None:
        """Return a parameter of the requests: [n] float32; None if it changes nothing for any
        request.
        """
        return self.params[param] if self.params is not None and self.active & param.bit else None

    def select(self, indices: IndexArray, rows: Tensor) -> "SamplingMetadata":
        """Return the metadata of some requests, without `logprobs`, `rules` and fields that none of
        them needs.

        Args:
            indices: [m] indices in the batch, on the host.
            rows: [m] int64, the same on the device.
        """
        if self.features is None:
            return ALL_GREEDY
        features = self.features[indices]
        active = int(np.bitwise_or.reduce(features))
        if not active:
            return ALL_GREEDY

        params = self.params
        if params is not None:
            params = params.index_select(1, rows) if needs_params(active) else None

        def select(values: _Rows | None, needed: int) -> _Rows | None:
            return values[rows] if values is not None and active & needed else None

        max_top_k = self.max_top_k
        if max_top_k is not None and not active & Feature.LARGE_TOP_K:
            max_top_k = min(max_top_k, SMALL_TOP_K) if active & Feature.TOP_K else None
        position = {old: new for new, old in enumerate(indices.tolist())} if self.processors else {}
        return SamplingMetadata(
            features=features,
            active=active,
            all_random=bool(np.bitwise_and.reduce(features) & Feature.RANDOM),
            params=params,
            exponentials=select(self.exponentials, Feature.RANDOM),
            draw_keys=self.draw_keys[indices] if self.draw_keys is not None else None,
            max_top_k=max_top_k,
            unbounded_top_p=has_unbounded_top_p(features),
            processors=tuple((position[i], p) for i, p in self.processors if i in position),
            edits=select(self.edits, Feature.EDITS),
            masks=self.masks.select(indices) if self.masks is not None else None,
            penalties=select(self.penalties, Feature.PENALTIES),
        )


ALL_GREEDY = SamplingMetadata()


def needs_params(active: int) -> bool:
    """Return whether these bits of `Feature` need parameters."""
    return bool(active & (Feature.RANDOM | Feature.PENALTIES))


def has_unbounded_top_p(features: FeatureArray) -> bool:
    """Return whether a request has top_p and no top_k."""
    bits = Feature.TOP_P | Feature.TOP_K
    return bool(((features & bits) == Feature.TOP_P).any())
