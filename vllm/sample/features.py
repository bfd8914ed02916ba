"""The features of the sampler that a row can use, as bits, and their parameters, as an array."""


class Feature:
    """Bits that say what a row uses. A greedy row that asks for nothing has none."""

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


DISTRIBUTION = (
    Feature.RANDOM
    | Feature.TEMPERATURE
    | Feature.MIN_P
    | Feature.TOP_K
    | Feature.LARGE_TOP_K
    | Feature.TOP_P
)
"""What makes a distribution of logits, and changes none of them."""

SMALL_TOP_K = 128
"""Up to this, top_k is cheap; rows with a larger top_k are grouped so that they do not slow others
down."""


class Param:
    """Indices into the first dimension of `SamplingMetadata.params`."""

    TEMPERATURE, MIN_P, TOP_K, TOP_P, PRESENCE, FREQUENCY, REPETITION, IS_GREEDY = range(8)


NEUTRAL = (1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0)
"""The parameters of a greedy row that asks for nothing, in the order of `Param`."""
