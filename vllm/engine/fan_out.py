"""Split a user's request into requests of the engine core, one per sample."""

import copy

import msgspec

from vllm.messages import EngineRequest


def fan_out(request: EngineRequest) -> list[EngineRequest]:
    """Split a request into one request per sample, in order. A request with one sample is returned
    unchanged.

    Sample i of request r has the id "i_r" and the seed of r plus i.
    """
    params = request.sampling_params
    if params.num_sampled == 1:
        return [request]
    requests = []
    for index in range(params.num_sampled):
        own = copy.copy(params)
        own.n, own.best_of = 1, None
        if params.is_ranked and own.logprobs is None:
            own.logprobs = 0  # samples are ranked by the log-probabilities of their tokens
        seed = (request.seed + index + 2**63) % 2**64 - 2**63  # wraps around like an int64
        if own.seed is not None:
            own.seed = seed
        if index:
            # Only the first sample computes them: they are the same for every sample and need a
            # full prefill.
            own.prompt_logprobs = None
        requests.append(
            msgspec.structs.replace(
                request,
                request_id=sample_id(request.request_id, index),
                sampling_params=own,
                seed=seed,
            )
        )
    return requests


def sample_id(request_id: str, index: int) -> str:
    """Return the id in the core of one sample of a request with several samples."""
    return f"{index}_{request_id}"


def known_ids(request_id: str) -> tuple[str, str]:
    """Return the ids that a request may have in the core: its own id, or the id of its first
    sample.
    """
    return request_id, sample_id(request_id, 0)
