"""Defines the finite set of launches on a device that compiles shapes.

There, sampling is a sequence of stages, each of which is a recipe of its own (or, in eager mode, a
few operators with shapes of their own). A stage that no row needs is skipped:

    rules          one for each number of rows with rules of the model, if it has any
    start          copy the logits, if they are going to change
    edits          one recipe for each width of the longest list (logit_bias, bad_words, ...)
    masks          one for each number of rows with a mask (allowed_token_ids)
    penalties      one for each width of the most distinct tokens
    distribution   one for each kind, on logits that have changed or not
    logprobs       one for each width

The recipes of a stage depend only on the padded batch and on its own class, so the number of
recipes is a sum over the stages, not their product. All other parameters of a request are values in
a tensor.

Both roundings cost extra work. A launch filters all of its rows by min_p, top_k and top_p when one
of them asks for any of these, with values that change nothing for the others. And widths are powers
of 8, up to the largest there can be, so that a launch works with at most 8 times the width it
needs; powers of 2 would be at most 2 times and two to three times as many recipes. The stages with
widths move few bytes next to those of the logits, while a recipe takes longer to compile than many
steps take to run.
"""

from dataclasses import dataclass

from vllm.sample.features import DISTRIBUTION, SMALL_TOP_K, Feature

_FACTOR = 8

GREEDY = 0
RANDOM = Feature.RANDOM | Feature.TEMPERATURE
FILTERED = DISTRIBUTION & ~Feature.LARGE_TOP_K
FILTERED_LARGE = DISTRIBUTION
"""Kinds of distribution: bits of `Feature`. Each one includes those before it."""

_KINDS = (GREEDY, RANDOM, FILTERED, FILTERED_LARGE)


def canonical(active: int) -> int:
    """Round up the bits of the distribution in `Feature` bits to a kind."""
    wanted = active & FILTERED_LARGE
    return active | next(kind for kind in _KINDS if not wanted & ~kind)


def size_classes(limit: int) -> tuple[int, ...]:
    """Return the sizes that stand for 1 ... limit, ascending; the last is the limit."""
    sizes = []
    size = _FACTOR
    while size < limit:
        sizes.append(size)
        size *= _FACTOR
    return (*sizes, limit)


@dataclass(frozen=True)
class StaticShapes:
    """The limits of launches, from which their shapes follow."""

    vocab_size: int
    max_model_len: int
    """Tokens of the longest request."""
    max_logprobs: int
    """The most log-probabilities that a request may ask for."""
    has_rules: bool = False
    """The model has rules for its outputs."""

    @property
    def kinds(self) -> tuple[int, ...]:
        """The kinds of distribution that can occur; a top_k of the whole vocabulary is none."""
        return _KINDS if self.vocab_size - 1 > SMALL_TOP_K else _KINDS[:-1]

    @property
    def max_edits(self) -> int:
        """Of one row: each token is edited at most once."""
        return self.vocab_size

    @property
    def max_penalties(self) -> int:
        """Distinct tokens of one row."""
        return min(self.vocab_size, self.max_model_len)

    @property
    def max_likeliest(self) -> int:
        """Return how many log-probabilities of one row there can be, in addition to its token's."""
        return min(self.vocab_size, max(1, self.max_logprobs))

    def max_top_k(self, active: int) -> int | None:
        """Return the number of candidates to search in a launch with these bits of `Feature`; None:
        no top_k."""
        if not active & Feature.TOP_K:
            return None
        return self.vocab_size if active & Feature.LARGE_TOP_K else SMALL_TOP_K


def class_of(size: int, limit: int) -> int:
    """Return the least of `size_classes(limit)` that holds `size`; a size of 0 counts as 1."""
    assert size <= limit, f"{size} is above the limit of {limit}"
    return next(width for width in size_classes(limit) if width >= size)
