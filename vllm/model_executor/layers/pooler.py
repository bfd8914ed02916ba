"""Turns the hidden states of prompts into embeddings, scores or classes.

The device selects the tokens. The final steps, such as the activation, run on the host in float32,
since they depend on the parameters of each request.
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
    """Pool hidden states to one vector per prompt, or one per token (ALL, STEP).

    Args:
        hidden_states: [T, hidden] of a batch.
        config: pooling of the model.
        starts: [n], index among the T tokens of the first token of each prompt.
        counts: [n], tokens of each prompt; for LAST, of its last chunk.

    Returns:
        [n, hidden] in the dtype of the hidden states; for ALL and STEP [sum(counts), hidden].
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
    """Split a result of `pool_tokens`, after the head, into one array per prompt.

    Args:
        numbers: [n or sum(counts), size], the values.
        config: pooling of the model.
        counts: [n], tokens of each prompt.

    Returns:
        n arrays, [size] or [tokens, size].
    """
    if config.pooling_type in ("ALL", "STEP"):
        return np.split(numbers, np.cumsum(counts)[:-1])
    return list(numbers)


def finish(
    numbers: FloatArray, config: PoolerConfig, params: PoolingParams, token_ids: IntArray
) -> FloatArray:
    """Apply a request's pooling parameters: select steps and values, shorten, activate.

    Args:
        numbers: [size] or [tokens, size], the values.
        config: pooling of the model.
        params: pooling parameters of the request.
        token_ids: [tokens] of the prompt.

    Returns:
        [size] or [tokens, size]; smaller if the request selects steps or fewer dimensions.
    """
    if config.pooling_type == "STEP":
        numbers = numbers[token_ids == config.step_tag_id]
    if config.returned_token_ids:
        numbers = numbers[..., list(config.returned_token_ids)]
    if params.dimensions is not None:
        numbers = numbers[..., : params.dimensions]
    return activate(numbers, config.activation)


def activate(numbers: FloatArray, activation: str) -> FloatArray:
    """Apply the activation over the last dimension; `vllm.config.pooler.Activation` lists them."""
    if activation == "normalize":
        length = np.sqrt(np.square(numbers).sum(-1, keepdims=True))
        return numbers / np.maximum(length, np.float32(1e-12))
    if activation == "softmax":
        weights = np.exp(numbers - numbers.max(-1, keepdims=True, initial=-np.inf))
        return weights / weights.sum(-1, keepdims=True)
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
