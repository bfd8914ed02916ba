"""Index token sequences, to find earlier occurrences of their last tokens."""

from collections.abc import Sequence

_MAX_OCCURRENCES = 8
"""Maximum number of earlier occurrences that are compared for one lookup."""
_TOKEN_BITS = 32
"""Bits of a token in a key."""


class TokenIndex:
    """Stores token sequences one after the other, and indexes their n-grams.

    Adding a token takes constant time, and so does a lookup. The n-gram of the last tokens leads to
    its latest occurrences. Of these, `find` chooses the one with the longest match. (Prompt lookup
    decoding: Saxena 2023; suffix decoding: Oliaro et al. 2024, arXiv 2411.04975. This index has
    neither a tree nor an automaton, so its memory is a few integers per token.)

    Args:
        n: length of the n-grams, at least 1.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._tokens: list[int] = []
        self._mask = (1 << n * _TOKEN_BITS) - 1
        self._key = 0
        """Key of the last n tokens; see `_key_of`."""
        self._latest: dict[int, int] = {}
        """Key of an n-gram -> index after its latest occurrence."""
        self._before: list[int] = []
        """For each index, the index after the previous occurrence of the same n-gram; 0: none."""

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens to the current sequence."""
        latest, key, mask = self._latest, self._key, self._mask
        get, add = latest.get, self._before.append
        # The index of the n-gram before a token is looked up only when that token is added. At the
        # start of the text the n-grams are shorter; their keys never equal the key of a full
        # n-gram.
        for end, token in enumerate(tokens, len(self._tokens)):
            add(get(key, 0))
            latest[key] = end
            key = (key << _TOKEN_BITS | token + 1) & mask
        self._key = key
        self._tokens.extend(tokens)

    def find(self, tail: Sequence[int], most: int) -> tuple[int, int]:
        """Find the longest earlier occurrence of the tail of a sequence that is followed by another
        token.

        Args:
            tail: last tokens of the sequence, at least n.
            most: maximum number of tokens to compare, at least n.

        Returns:
            (end, length): the index after the occurrence, and how many tokens match. The latest one
            of equally long occurrences; (0, 0) if there is none.
        """
        n, text, best, best_length = self._n, self._tokens, 0, 0
        end = self._latest.get(_key_of(tail[len(tail) - n :]), 0)
        most = min(most, len(tail))
        for _ in range(_MAX_OCCURRENCES):
            if not end or best_length >= most:
                break
            length, limit = n, min(most, end)
            while length < limit and text[end - length - 1] == tail[len(tail) - length - 1]:
                length += 1
            if length > best_length:
                best, best_length = end, length
            end = self._before[end]
        return best, best_length

    def continuation(self, end: int, count: int, stop: int | None = None) -> list[int]:
        """Return the tokens after an index.

        Args:
            end: index, as `find` returns it.
            count: maximum number of tokens.
            stop: a token that ends the sequence; it is not returned. None: the tokens form one
                sequence, which is continued periodically after its end.
        """
        found = self._tokens[end : end + count]
        if stop is not None:
            return found[: found.index(stop)] if stop in found else found
        period = len(self._tokens) - end
        while len(found) < count:
            found.append(found[len(found) - period])
        return found


def _key_of(tokens: Sequence[int]) -> int:
    """Encode an n-gram as one integer, which takes less time and memory than a tuple.

    Each token id (-1 or more) plus one takes `_TOKEN_BITS` bits; the last token has the lowest
    bits.
    """
    key = 0
    for token in tokens:
        key = key << _TOKEN_BITS | token + 1
    return key
