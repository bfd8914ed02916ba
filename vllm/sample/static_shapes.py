"""Define the finite set of sampling shapes on a device that compiles shapes.

On such a device, sampling is a sequence of stages, each of which is a separate recipe (or, in eager
mode, a few operators with separate shapes). A stage that no request needs is skipped:

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

Both roundings cost extra work. A batch filters all of its requests by min_p, top_k and top_p if one
of them asks for any of these, with neutral values for the others. Widths are powers of 8, up to the
largest possible one, so that a batch uses at most 8 times the width that it needs. Powers of 2
would use at most 2 times the width, but need two to three times as many recipes. The stages with
widths move few bytes compared with the logits, while a recipe takes longer to compile than many
steps take to run.
"""

from dataclasses import dataclass

from vllm.sample.features import DISTRIBUTION, SMALL_TOP_K, Feature

_FACTOR = 8

GREEDY = 0
RANDOM = Feature.RANDOM | Feature.TEMPERATURE
FILTERED = DISTRIBUTION & ~Feature.LARGE_TOP_K
FILTERED_LARGE = DISTRIBUTION
"""Kinds of distribution: bits of `Feature`. Each kind includes the bits of the previous kinds."""

_KINDS = (GREEDY, RANDOM, FILTERED, FILTERED_LARGE)


def canonical(active: int) -> int:
    """Add `Feature` bits until the bits of the distribution are one of its kinds.

    So batches whose features differ slightly have the same shapes, and no new recipe is compiled.
    """
    wanted = active & FILTERED_LARGE
    return active | next(kind for kind in _KINDS if not wanted & ~kind)


def size_classes(limit: int) -> tuple[int, ...]:
    """Return the padded sizes for 1 ... limit in ascending order; the last one is the limit."""
    sizes = []
    size = _FACTOR
    while size < limit:
        sizes.append(size)
        size *= _FACTOR
    return (*sizes, limit)


@dataclass(frozen=True)
class StaticShapes:
    """The limits of batches, which determine their shapes."""

    vocab_size: int
    max_model_len: int
    """Tokens of the longest request."""
    max_logprobs: int
    """The most log-probabilities that a request may ask for."""
    has_rules: bool = False
    """The model has rules for its outputs."""

    @property
    def kinds(self) -> tuple[int, ...]:
        """The kinds of distribution that can occur. A top_k of the whole vocabulary does not
        occur.
        """
        return _KINDS if self.vocab_size - 1 > SMALL_TOP_K else _KINDS[:-1]

    @property
    def max_edits(self) -> int:
        """Maximum number of edits for a request: each token is edited at most once."""
        return self.vocab_size

    @property
    def max_penalties(self) -> int:
        """Maximum number of distinct tokens of a request."""
        return min(self.vocab_size, self.max_model_len)

    @property
    def max_likeliest(self) -> int:
        """Maximum number of log-probabilities of a request, in addition to its sampled token."""
        return min(self.vocab_size, max(1, self.max_logprobs))

    def max_top_k(self, active: int) -> int | None:
        """Return the number of candidates to search in a batch with these `Feature` bits; None: no
        top_k.
        """
        if not active & Feature.TOP_K:
            return None
        return self.vocab_size if active & Feature.LARGE_TOP_K else SMALL_TOP_K


def class_of(size: int, limit: int) -> int:
    """Return the smallest of `size_classes(limit)` that holds `size`; a size of 0 counts as 1."""
    assert size <= limit, f"{size} is above the limit of {limit}"
    return next(width for width in size_classes(limit) if width >= size)
