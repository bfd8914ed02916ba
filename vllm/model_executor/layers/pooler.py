"""From the hidden states of prompts to their results: which tokens count, and the last function.

Tokens are chosen on the device; the last function runs on the host, in float32, since it depends
on what each request asks for.
"""

import numpy as np
import torch
from torch import Tensor

from vllm.config import PoolerConfig
from vllm.messages import FloatArray, IntArray
from vllm.pooling_params import PoolingParams


def pool_tokens(
    hidden_states: Tensor, config: PoolerConfig, starts: IntArray, counts: IntArray
) -> Tensor:
    """Pool to one row per prompt, or one per token if each counts on its own.

    Args:
        hidden_states: [T, hidden] of a launch.
        config: of the model.
        starts: [n] first of the T tokens of each prompt.
        counts: [n] tokens of each; LAST: of its last chunk.

    Returns:
        [n, hidden] in the dtype of the hidden states; ALL and STEP: [sum(counts), hidden].
    """
    if config.pooling_type == "LAST":
        return _rows(hidden_states, starts + counts - 1)
    if config.pooling_type == "CLS":
        return _rows(hidden_states, starts)
    tokens = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
    chosen = _rows(hidden_states, tokens)
    if config.pooling_type != "MEAN":
        return chosen
    prompt = _index(np.repeat(np.arange(len(counts)), counts), hidden_states.device)
    sums = torch.zeros(
        len(counts), chosen.shape[1], dtype=torch.float32, device=hidden_states.device
    ).index_add_(0, prompt, chosen.float())
    sums /= _index(counts, hidden_states.device)[:, None]
    return sums.to(hidden_states.dtype)


def split_results(numbers: FloatArray, config: PoolerConfig, counts: IntArray) -> list[FloatArray]:
    """Split a result of `pool_tokens` that went through the head by prompts.

    Args:
        numbers: [n or sum(counts), size].
        config: of the model.
        counts: [n] tokens of each prompt.

    Returns:
        n arrays, [size] or [tokens, size].
    """
    if config.pooling_type in ("ALL", "STEP"):
        return np.split(numbers, np.cumsum(counts)[:-1])
    return list(numbers)


def finish(
    numbers: FloatArray, config: PoolerConfig, params: PoolingParams, token_ids: IntArray
) -> FloatArray:
    """Select steps and values, shorten them, and apply the activation.

    Args:
        numbers: [size] or [tokens, size].
        config: of the model.
        params: of the request.
        token_ids: [tokens] of the prompt.

    Returns:
        [size] or [tokens, size], with fewer of them where asked for.
    """
    if config.pooling_type == "STEP":
        numbers = numbers[token_ids == config.step_tag_id]
    if config.returned_token_ids:
        numbers = numbers[..., list(config.returned_token_ids)]
    if params.dimensions is not None:
        numbers = numbers[..., : params.dimensions]
    return activate(numbers, config.activation)


def activate(numbers: FloatArray, activation: str) -> FloatArray:
    """Apply the activation over the last dimension; see `vllm.config.pooler.Activation`."""
    if activation == "normalize":
        length = np.sqrt(np.square(numbers).sum(-1, keepdims=True))
        return numbers / np.maximum(length, np.float32(1e-12))
    if activation == "softmax":
        weights = np.exp(numbers - numbers.max(-1, keepdims=True, initial=-np.inf))
        result: FloatArray = weights / weights.sum(-1, keepdims=True)
        return result
    if activation == "sigmoid":
        # With the absolute value, exp cannot overflow.
        small = np.exp(-np.abs(numbers))
        return np.where(numbers >= 0, 1 / (1 + small), small / (1 + small)).astype(np.float32)
    return numbers


def _rows(hidden_states: Tensor, index: IntArray) -> Tensor:
    if len(index) == len(hidden_states) and (index == np.arange(len(index))).all():
        return hidden_states
    return hidden_states[_index(index, hidden_states.device)]


def _index(values: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)
