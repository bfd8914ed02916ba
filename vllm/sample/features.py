"""Represent the sampling features of a request as bits, and their parameters as an array."""

from enum import IntEnum
from functools import reduce
from operator import or_


class Feature:
    """Bits for the sampling features that a request uses. A greedy request without other features
    has none.
    """

    RANDOM = 1
    TEMPERATURE = 2
    """A temperature other than 1."""
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
    RULES = 2048
    """Rules of the model for its outputs, which change logits before everything else."""
    GRAMMAR = 4096
    """Structured output: the mask of `MASK` is another one after each token."""


SMALL_TOP_K = 128
"""Up to this, top_k is cheap; rows with a larger top_k are grouped so that they do not slow others
down."""


class Param(IntEnum):
    """The parameters of a request, in the order of the first dimension of
    `SamplingMetadata.params`.

    Each has the name of its field of `SamplingParams`, the neutral value that changes nothing, and
    the feature bit of requests with another value. A greedy request without other features has only
    neutral values. The C++ kernels have the same order (`Param` of csrc/cpu/sampling_args.h), which
    is checked when they are loaded.
    """

    neutral: float
    bit: int

    def __new__(cls, neutral: float, bit: int) -> "Param":
        """Give each member its index, from 0."""
        member = int.__new__(cls, len(cls.__members__))
        member._value_ = int(member)
        member.neutral, member.bit = neutral, bit
        return member

    TEMPERATURE = 1.0, Feature.TEMPERATURE
    MIN_P = 0.0, Feature.MIN_P
    TOP_K = 0.0, Feature.TOP_K
    TOP_P = 1.0, Feature.TOP_P
    PRESENCE_PENALTY = 0.0, Feature.PENALTIES
    FREQUENCY_PENALTY = 0.0, Feature.PENALTIES
    REPETITION_PENALTY = 1.0, Feature.PENALTIES
    IS_GREEDY = 1.0, Feature.RANDOM
    """Follows from the temperature and top_k: no field."""


NEUTRAL = tuple(param.neutral for param in Param)
DISTRIBUTION = reduce(or_, (param.bit for param in Param), Feature.LARGE_TOP_K) & ~Feature.PENALTIES
"""Features that turn logits into a distribution, and do not change logits."""
MASKS = Feature.MASK | Feature.RULES
"""Features that forbid tokens by a mask."""
PLAIN_PARAMS = tuple(
    (param, param.name.lower())
    for param in Param
    if param.bit & DISTRIBUTION and param not in (Param.TOP_K, Param.IS_GREEDY)
)
"""Parameters of a distribution that are copied as they are, with their fields of
`SamplingParams`."""
