"""The correct result of requests, computed without a scheduler; and guesses of it.

A hash represents the content of a slot of the cache. It depends on everything that determines the
content: salt, extra keys, and all tokens up to the position. The next token is a function of this
hash only, so the tokens of a request must not depend on how it is scheduled.
"""

import random
import zlib
from collections.abc import Sequence

from vllm.messages import EngineRequest, Finished, FinishReason
from vllm.request import Request

VOCAB_SIZE = 7
FAILED = "sampling failed"
FAILED_IMAGE = "the image cannot be encoded"


def root_content(spec: EngineRequest) -> int:
    """Return what the cache content of a request depends on in addition to its tokens."""
    return zlib.crc32((spec.cache_salt or "").encode())


def next_content(content: int, token_id: int, keys: tuple[str, ...] = ()) -> int:
    """Return the content of a slot that follows a slot with `content`; `keys` are the extra keys
    that begin there."""
    return hash((content, token_id, *map(_stable, keys)))


def _stable(key: str) -> int:
    return zlib.crc32(key.encode())


def keys_at(spec: EngineRequest, position: int) -> tuple[str, ...]:
    """Return the extra keys of a request that begin at a position."""
    return tuple(key.key for key in spec.cache_extra_keys if key.start == position)


def next_token(spec: EngineRequest, content: int, num_output: int) -> int:
    """Return the token sampled at a position, with end tokens masked up to the least length."""
    token_id = (content >> 7) % VOCAB_SIZE
    if num_output < spec.sampling_params.min_tokens:
        while token_id == spec.eos_token_id or token_id in spec.stop_token_ids:
            token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def expected_result(spec: EngineRequest, fails_at: int | None = None) -> tuple[list[int], Finished]:
    """Return output tokens and finish reason of a request, computed without a scheduler."""
    content = root_content(spec)
    for position, token_id in enumerate(spec.prompt_token_ids):
        content = next_content(content, token_id, keys_at(spec, position))
    output: list[int] = []
    while True:
        if len(output) == fails_at:
            return output, Finished(FinishReason.ERROR, error=FAILED)
        token_id = next_token(spec, content, len(output))
        position = len(spec.prompt_token_ids) + len(output)
        output.append(token_id)
        content = next_content(content, token_id, keys_at(spec, position))
        if token_id == spec.eos_token_id:
            return output, Finished(FinishReason.STOP)
        if token_id in spec.stop_token_ids:
            return output, Finished(FinishReason.STOP, token_id)
        if len(spec.prompt_token_ids) + len(output) >= spec.max_total_tokens:
            return output, Finished(FinishReason.LENGTH)


def next_tokens(spec: EngineRequest, token_ids: list[int], count: int) -> list[int]:
    """Return the next sampled tokens of a request with these tokens, as if it never finished."""
    content = root_content(spec)
    for token_id in token_ids:
        content = next_content(content, token_id)
    found: list[int] = []
    for num_output in range(len(token_ids) - len(spec.prompt_token_ids), 10**9):
        if len(found) == count:
            break
        found.append(next_token(spec, content, num_output))
        content = next_content(content, found[-1])
    return found


class GuessSource:
    """Makes guesses that are right, right up to some token, wrong, or empty. They may go beyond the
    end of the output.
    """

    def __init__(self, rng: random.Random, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.num_proposed = 0
        self._rng = rng
        self._left: set[str] = set()

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        assert self._left.isdisjoint(request.request_id for request in requests)
        return [self._guess(request) for request in requests]

    def leave(self, request: Request) -> None:
        assert request.request_id not in self._left, "a request leaves once"
        self._left.add(request.request_id)

    def _guess(self, request: Request) -> list[int]:
        count = self._rng.choice([0, self.max_drafts, self._rng.randint(1, self.max_drafts)])
        guess = next_tokens(request.spec, request.token_ids, count)
        first_wrong = self._rng.choice([count, count, 0, self._rng.randint(0, count)])
        for index in range(first_wrong, count):
            guess[index] = (guess[index] + 1) % VOCAB_SIZE
        self.num_proposed += count
        return guess
