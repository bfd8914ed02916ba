"""Set positions of tokens that differ from their indices: the parts of an image have positions in
height and width.
"""

from hashlib import sha256

import msgspec
import numpy as np

from vllm.config import ModelArch
from vllm.errors import RequestError
from vllm.messages import CacheKey, EngineRequest, IntArray, TokenPositions


def with_positions(
    request: EngineRequest, positions: IntArray, arch: ModelArch, offset: int | None = None
) -> EngineRequest:
    """Return the request with explicit token positions, and with their keys for the prefix cache.

    Args:
        request: request with a prompt of n tokens.
        positions: [P, n] positions of the prompt tokens.
        arch: architecture of the model, which defines P and the largest position.
        offset: position minus index of every token after the prompt; None: they follow the largest
            position of the prompt.

    Raises:
        RequestError: the model does not accept such positions, or it pools; or a position of the
            prompt or of the output is out of range.
    """
    if request.pooling_params is not None:
        raise RequestError(
            "positions cannot be given to a pooling model, because the engine numbers its "
            "tokens. Leave positions out",
            param="positions",
        )
    num_prompt = len(request.prompt_token_ids)
    if positions.shape != (arch.num_positions, num_prompt):
        raise RequestError(
            f"positions must have the shape [{arch.num_positions}, {num_prompt}], "
            f"{arch.num_positions} for each of the {num_prompt} tokens of the prompt, got "
            f"{list(positions.shape)}",
            param="positions",
        )
    if offset is None:
        offset = int(positions.max()) + 1 - num_prompt
    limit, last = arch.derived_max_model_len, request.max_total_tokens - 1 + offset
    lowest = min(int(positions.min()), num_prompt + offset)
    highest = max(int(positions.max()), last)
    if lowest < 0 or highest >= limit:
        raise RequestError(
            f"positions of prompt and output must be from 0 to {limit - 1}, got {lowest} to "
            f"{highest}. Send a shorter prompt, or a video of fewer seconds",
            param="positions",
        )
    keys = position_keys(positions, offset)
    return msgspec.structs.replace(
        request,
        positions=TokenPositions(data=positions.astype("<i4").tobytes(), offset=offset),
        cache_extra_keys=request.cache_extra_keys + keys,
    )


def position_keys(positions: IntArray, offset: int) -> tuple[CacheKey, ...]:
    """Return prefix-cache keys for the positions [P, n] of a prompt and the offset after it.

    A token whose positions are one above the positions of the token before it needs no key. Every
    run of other tokens has a key at its start, so that requests share the blocks before their first
    difference.
    """
    num_positions, num_prompt = positions.shape
    after = np.full((num_positions, 1), num_prompt + offset)
    before = np.full((num_positions, 1), -1)
    known = np.concatenate((before, positions, after), axis=1)
    jumps = np.flatnonzero((np.diff(known, axis=1) != 1).any(0))
    runs = np.split(jumps, np.flatnonzero(np.diff(jumps) != 1) + 1)
    return tuple(
        CacheKey(int(run[0]), "positions:" + _hash_of(known[:, run + 1]))
        for run in runs
        if len(run)
    )


def _hash_of(positions: IntArray) -> str:
    digest = sha256(repr(positions.shape).encode())
    digest.update(np.ascontiguousarray(positions, "<i4").tobytes())
    return digest.hexdigest()
