"""Compute the merges of a BPE vocabulary that only orders its tokens."""

from collections.abc import Iterable, Iterator, Mapping


def merges_in_order(
    tokens: Iterable[str], vocabulary: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """Yield all pairs of tokens whose concatenation is a token, in the order of the resulting
    tokens.

    Args:
        tokens: tokens, in the order in which merges create them.
        vocabulary: token -> id. If several pairs give one token, the pair with the lower ids is
            first.
    """
    for token in tokens:
        pairs = ((token[:end], token[end:]) for end in range(1, len(token)))
        known = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        yield from sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
