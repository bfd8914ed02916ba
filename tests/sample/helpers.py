"""Builders, and slow references in plain Python or float64."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from torch import Tensor

from vllm.messages import EngineRequest
from vllm.sample.sampler import Sampler, SamplerOutput
from vllm.sample.state import SamplingState
from vllm.sampling_params import SamplingParams

CPU = torch.device("cpu")

repeatable = settings(deadline=None, derandomize=True)
"""Hypothesis: the same examples in every run, however busy the machine is."""


def make_request(
    *,
    prompt: Sequence[int] = (1,),
    seed: int = 0,
    eos: int | None = None,
    stop: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    **params: Any,
) -> EngineRequest:
    """Make a request; `params` are arguments of SamplingParams."""
    return EngineRequest(
        request_id="a",
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(**{"max_tokens": None, **params}),
        seed=seed,
        eos_token_id=eos,
        stop_token_ids=frozenset(stop),
        bad_words_token_ids=[list(word) for word in bad_words],
        max_total_tokens=10_000,
        arrival_time=0.0,
    )


def make_state(
    requests: Sequence[EngineRequest],
    vocab_size: int,
    outputs: Sequence[Sequence[int]] | None = None,
    **options: Any,
) -> SamplingState:
    """Make a state with request i at batch index i, with its output so far."""
    state = SamplingState(len(requests), vocab_size, CPU, **options)
    for row, request in enumerate(requests):
        state.add(row, request, list(outputs[row]) if outputs else [])
    return state


def rows(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def sample(
    requests: Sequence[EngineRequest],
    logits: Tensor,
    outputs: Sequence[Sequence[int]] | None = None,
    *,
    pass_elements: int | None = 2**20,
) -> SamplerOutput:
    """Sample once for all requests, in order."""
    n = len(requests)
    state = make_state(requests, logits.shape[-1], outputs)
    done = [len(output) for output in outputs] if outputs else [0] * n
    metadata = state.metadata(np.arange(n, dtype=np.int32), rows(*done))
    return Sampler(pass_elements)(logits, metadata)


def draws(logits: Tensor, num_draws: int, **params: Any) -> np.ndarray:
    """Return the tokens of one request at positions 0, 1, ..., from the same logits [V] at each
    position.
    """
    state = make_state([make_request(**params)], len(logits))
    metadata = state.metadata(np.zeros(num_draws, np.int32), np.arange(num_draws, dtype=np.int32))
    output = Sampler()(logits.expand(num_draws, -1), metadata)
    assert not output.invalid.any()
    return output.token_ids.numpy()


def reference_probs(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> np.ndarray:
    """Return the distribution [V] that the parameters define, in float64, if no values tie at a
    limit.
    """
    scaled = logits.double().numpy() / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    probs[probs < min_p * probs.max()] = 0
    order = np.argsort(-probs, kind="stable")
    if top_k > 0:
        probs[order[top_k:]] = 0
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= top_p]] = 0
    return probs / probs.sum()
