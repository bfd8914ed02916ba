"""The merges of a BPE vocabulary that says only in which order its tokens are made."""

from collections.abc import Iterable, Iterator, Mapping


def merges_in_order(
    tokens: Iterable[str], vocabulary: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """Yield all pairs of tokens that make a token, in the order of the tokens that they make.

    Args:
        tokens: that are made of others or not, the one that is made first at the beginning.
        vocabulary: token -> id. Of two pairs for one token, that with the lower ids is first.
    """
    for token in tokens:
        pairs = ((token[:end], token[end:]) for end in range(1, len(token)))
        known = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        yield from sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
