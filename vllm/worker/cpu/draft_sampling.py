"""Samples draft tokens from the logits of a draft model or speculator."""

from typing import Protocol

import numpy as np
from torch import Tensor

from vllm.messages import IntArray
from vllm.sample.sampler import Sampler
from vllm.sample.state import SamplingState
from vllm.worker.batch.input_batch import InputBatch


class SamplesDrafts(Protocol):
    """Attributes that the runners of drafts have in common with the runner of the model."""

    batch: InputBatch
    sampling: SamplingState
    sampler: Sampler


def append_drafts(runner: SamplesDrafts, rows: IntArray, logits: Tensor) -> None:
    """Sample a draft for each of n requests, and append it to the tokens of the request.

    Uses the random number that the model will use at the same position.

    Args:
        runner: runner of the drafts.
        rows: [n] batch indices.
        logits: [n, tokens]
    """
    batch = runner.batch
    positions = batch.num_tokens[rows]
    num_output = positions - batch.num_prompt_tokens[rows]
    metadata = runner.sampling.distribution(rows, num_output)
    token_ids = runner.sampler(logits, metadata).host_ids.numpy()
    batch.token_ids[rows, positions] = np.maximum(token_ids, 0)
    batch.num_tokens[rows] += 1
