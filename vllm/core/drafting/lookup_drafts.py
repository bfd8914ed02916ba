"""Find drafts in tokens that exist already: the prompt, the output so far, and earlier outputs."""

from collections.abc import Sequence

from vllm.config.speculative import DraftOptions
from vllm.core.drafting.token_index import TokenIndex
from vllm.request import Request

_INDEXED_PER_STEP = 8192
"""Tokens of one request that are indexed in one step, about 3 ms."""
_END = -1
"""Stands between two outputs in the index of earlier ones; no token has this id."""
_DRAFTS_PER_TOKEN = 2
"""Maximum number of drafts from an earlier output, for each token that agrees with it."""


class NgramDrafts:
    """Drafts tokens from the request itself: the tokens after earlier occurrences of its last
    tokens.

    Args:
        options: settings with the method ngram or suffix.
    """

    def __init__(self, options: DraftOptions) -> None:
        self.max_drafts = options.num_speculative_tokens
        self._n = options.prompt_lookup_min
        self._most = options.prompt_lookup_max
        self._indexes: dict[str, TokenIndex] = {}

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """Propose the tokens that followed earlier occurrences of the last tokens of each
        request.
        """
        return [self.propose_for(request) for request in requests]

    def leave(self, request: Request) -> None:
        """Drop the index of a request that has finished."""
        self._indexes.pop(request.request_id, None)

    def propose_for(self, request: Request) -> list[int]:
        index = self._index(request)
        if index is None:
            return []
        end, length = index.find(request.token_ids[-self._most :], self._most)
        request.draft_evidence = length
        return index.continuation(end, self.max_drafts) if length else []

    def _index(self, request: Request) -> TokenIndex | None:
        """Return the index of a request's own tokens.

        None if the request has too few tokens, or so many that they are not all indexed.
        """
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = TokenIndex(self._n)
        known, text = len(index), request.token_ids
        index.append(text[known : known + _INDEXED_PER_STEP])
        return index if self._n < len(text) == len(index) else None


class SuffixDrafts(NgramDrafts):
    """Also drafts tokens from the outputs of earlier requests, if more of their tokens match.

    The more tokens match, the more drafts there are. Memory is bounded: there are two indexes, and
    when the newer one has half of the allowed tokens, the older one is dropped.

    Args:
        options: settings with the method suffix.
    """

    def __init__(self, options: DraftOptions) -> None:
        super().__init__(options)
        self._half = max(1, options.suffix_cache_tokens // 2)
        self._earlier = [TokenIndex(self._n)]
        """Indexes of earlier outputs, the newest one first."""

    def leave(self, request: Request) -> None:
        """Add the output of a finished request to the index of earlier outputs."""
        super().leave(request)
        output = request.output_token_ids[: self._half - 1]
        if len(output) <= self._n:
            return
        if len(self._earlier[0]) + len(output) >= self._half:
            self._earlier = [TokenIndex(self._n), self._earlier[0]]
        self._earlier[0].append([*output, _END])

    def propose_for(self, request: Request) -> list[int]:
        tail = request.token_ids[-self._most :]
        if len(tail) < self._n:
            return []
        best, best_length = [], 0
        own = self._index(request)
        if own is not None:
            end, length = own.find(tail, self._most)
            if length:
                best, best_length = own.continuation(end, self._count(length)), length
        for index in self._earlier:
            end, length = index.find(tail, self._most)
            if length > best_length:
                found = index.continuation(end, self._count(length), _END)
                if found:
                    best, best_length = found, length
        request.draft_evidence = best_length
        return best

    def _count(self, length: int) -> int:
        return min(self.max_drafts, _DRAFTS_PER_TOKEN * length)
