"""Launches without requests that compile everything the sampler needs on a device with static
shapes, before the first request comes.

For a vocabulary of 128,256, requests of 8,192 tokens and 20 log-probabilities, a padded batch of
64 rows needs 24 recipes, which 10 launches compile. No launch needs more memory than a real one: on
the simulated card at most six times the logits as float32, when a row has a large top_k.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from vllm.sample.blocks import num_draws
from vllm.sample.constraints import LogitEdits
from vllm.sample.features import NEUTRAL, Feature
from vllm.sample.masks import TokenMasks, bit_values, num_words
from vllm.sample.metadata import ALL_GREEDY, LogprobPlan, SamplingMetadata
from vllm.sample.penalties import Penalties
from vllm.sample.state import SamplingState
from vllm.sample.static_shapes import GREEDY, StaticShapes, size_classes


def warmup_launches(state: SamplingState, padded_size: int) -> Iterator[SamplingMetadata]:
    """Launches of `padded_size` rows that together have every stage of every class.

    Each is made when the iterator advances. The sampled tokens have no meaning. Any finite logits
    of the model's shape and dtype can be used. User-supplied logits processors are not warmed up.

    Args:
        state: with static shapes.
        padded_size: rows of the logits.
    """
    shapes = state.shapes
    assert shapes is not None, "shapes are not static"
    for kind in shapes.kinds:
        yield _launch(shapes, padded_size, kind, state.device) if kind != GREEDY else ALL_GREEDY
    # Stages do not depend on each other: one launch serves a class of each of them.
    classes = (
        shapes.kinds,
        size_classes(shapes.max_edits),
        size_classes(padded_size),
        size_classes(shapes.max_penalties),
        size_classes(shapes.max_likeliest),
    )
    for i in range(max(len(column) for column in classes)):
        kind, *sizes = (column[i % len(column)] for column in classes)
        launch = _launch(shapes, padded_size, kind | Feature.PENALTIES, state.device)
        yield _with_all_stages(launch, shapes, sizes, state.device)


def _launch(
    shapes: StaticShapes, num_rows: int, active: int, device: torch.device
) -> SamplingMetadata:
    """Rows without a feature in a launch whose operators are those of `active`."""
    params = np.repeat(np.array(NEUTRAL, np.float32)[:, None], num_rows, 1)
    exponentials = np.ones((num_rows, num_draws(shapes.vocab_size)), np.float32)
    return SamplingMetadata(
        features=np.full(num_rows, active, np.int32),
        active=active,
        params=torch.from_numpy(params).to(device),
        exponentials=torch.from_numpy(exponentials).to(device),
        max_top_k=shapes.max_top_k(active),
        unbounded_top_p=bool(active & Feature.TOP_P),
    )


def _with_all_stages(
    launch: SamplingMetadata, shapes: StaticShapes, sizes: list[int], device: torch.device
) -> SamplingMetadata:
    """`launch` with edits, masks, penalties and logprobs of these sizes, which change no token."""
    num_edits, num_masks, num_penalties, num_logprobs = sizes
    assert launch.features is not None
    num_rows = len(launch.features)
    rows = np.arange(num_rows)
    words = np.full((num_masks, num_words(shapes.vocab_size)), -1, np.int32)
    token_ids = np.full((num_rows, num_penalties), shapes.vocab_size, np.int32)
    return replace(
        launch,
        edits=LogitEdits.build(num_rows, {}, num_edits, device),
        masks=TokenMasks(rows[:num_masks], torch.from_numpy(words).to(device), bit_values(device)),
        penalties=Penalties.build(token_ids, np.zeros(token_ids.shape, np.float32), device),
        logprobs=LogprobPlan(rows, np.full(num_rows, num_logprobs, np.int32), num_logprobs, None),
    )
