"""Create batches without requests that compile everything the sampler needs, on a device with
static shapes.

For a vocabulary of 128,256, requests of 8,192 tokens and 20 log-probabilities, a padded batch of 64
requests needs 24 recipes, which 10 batches compile; greedy and random sampling are two of them. No
batch needs more memory than a real one: on the simulated card at most six times the logits as
float32, if a request has a large top_k.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from vllm.sample.block_reductions import num_draws
from vllm.sample.buffers import ToDevice
from vllm.sample.constraints import LogitEdits
from vllm.sample.features import NEUTRAL, Feature
from vllm.sample.metadata import ALL_GREEDY, LogprobPlan, SamplingMetadata
from vllm.sample.penalties import Penalties
from vllm.sample.restrictions.masks import TokenMasks, bit_values, num_words
from vllm.sample.restrictions.output_rules import NO_TIMES, LogitRules
from vllm.sample.state import SamplingState
from vllm.sample.static_shapes import FILTERED_LARGE, GREEDY, RANDOM, StaticShapes, size_classes

Stage = tuple[str, int, bool]
"""Name of a stage, its size or kind, and of a distribution whether the logits have changed."""


def stages_of(metadata: SamplingMetadata) -> frozenset[Stage]:
    """Return the stages that a batch compiles if nothing of it is compiled yet (see
    `static_shapes`).
    """
    changes = metadata.changes_logits
    stages: set[Stage] = {("distribution", metadata.active & FILTERED_LARGE, changes)}
    if changes:
        stages.add(("start", 0, True))
    if metadata.rules is not None:
        stages.add(("rules", len(metadata.rules.masks.rows), True))
    if metadata.edits is not None:
        stages.add(("edits", metadata.edits.token_ids.shape[1], True))
    if metadata.masks is not None:
        stages.add(("masks", len(metadata.masks.rows), True))
    if metadata.penalties is not None:
        stages.add(("penalties", metadata.penalties.token_ids.shape[1], True))
    if metadata.logprobs is not None:
        stages.add(("logprobs", metadata.logprobs.width, False))
    return frozenset(stages)


def basic_launches(state: SamplingState, padded_size: int) -> Iterator[SamplingMetadata]:
    """Yield a greedy batch and a random one, without other features.

    A model with rules for its outputs has more greedy batches: with these rules, and with the
    log-probabilities that transcriptions with time tokens need.
    """
    shapes = state.shapes
    assert shapes is not None, "shapes are not static"
    yield ALL_GREEDY
    yield _launch(shapes, padded_size, RANDOM, state.to_device)
    if shapes.has_rules:
        for num_rows in size_classes(padded_size):
            yield replace(ALL_GREEDY, rules=_rules(num_rows, shapes, state))
        smallest = size_classes(shapes.max_likeliest)[0]
        yield replace(ALL_GREEDY, logprobs=_logprobs(padded_size, smallest))


def heaviest_launch(state: SamplingState, padded_size: int) -> SamplingMetadata:
    """Return the batch that needs the most memory: every stage in its largest size class."""
    shapes = state.shapes
    assert shapes is not None, "shapes are not static"
    launch = _launch(shapes, padded_size, shapes.kinds[-1] | Feature.PENALTIES, state.to_device)
    sizes = [shapes.max_edits, padded_size, shapes.max_penalties, shapes.max_likeliest]
    return _with_all_stages(launch, shapes, sizes, state)


def warmup_launches(state: SamplingState, padded_size: int) -> Iterator[SamplingMetadata]:
    """Yield batches of `padded_size` that together run every stage of sampling in each size class.

    Each batch is created when the iterator advances. The sampled tokens have no meaning. Any finite
    logits of the model's shape and dtype can be used. User-supplied logits processors are not
    warmed up.

    Args:
        state: sampling state with static shapes.
        padded_size: padded batch size.
    """
    shapes = state.shapes
    assert shapes is not None, "shapes are not static"
    for kind in shapes.kinds:
        yield _launch(shapes, padded_size, kind, state.to_device) if kind != GREEDY else ALL_GREEDY
    # The stages of sampling are compiled independently, so one launch can warm up one size class of
    # each stage.
    classes = (
        shapes.kinds,
        size_classes(shapes.max_edits),
        size_classes(padded_size),
        size_classes(shapes.max_penalties),
        size_classes(shapes.max_likeliest),
    )
    for i in range(max(len(column) for column in classes)):
        kind, *sizes = (column[i % len(column)] for column in classes)
        launch = _launch(shapes, padded_size, kind | Feature.PENALTIES, state.to_device)
        yield _with_all_stages(launch, shapes, sizes, state)


def _launch(
    shapes: StaticShapes, num_rows: int, active: int, to_device: ToDevice
) -> SamplingMetadata:
    """Return a batch of neutral requests with the operators that `active` needs."""
    params = np.repeat(np.array(NEUTRAL, np.float32)[:, None], num_rows, 1)
    exponentials = np.ones((num_rows, num_draws(shapes.vocab_size)), np.float32)
    return SamplingMetadata(
        features=np.full(num_rows, active, np.int32),
        active=active,
        params=to_device(params),
        exponentials=to_device(exponentials),
        max_top_k=shapes.max_top_k(active),
        unbounded_top_p=bool(active & Feature.TOP_P),
    )


def _with_all_stages(
    launch: SamplingMetadata, shapes: StaticShapes, sizes: list[int], state: SamplingState
) -> SamplingMetadata:
    """Return `launch` with edits, masks, penalties and logprobs of these sizes, which change no
    token.
    """
    num_edits, num_masks, num_penalties, num_logprobs = sizes
    to_device = state.to_device
    assert launch.features is not None
    num_rows = len(launch.features)
    token_ids = np.full((num_rows, num_penalties), shapes.vocab_size, np.int32)
    return replace(
        launch,
        edits=LogitEdits.build(num_rows, {}, num_edits, to_device),
        rules=_rules(num_masks, shapes, state) if shapes.has_rules else None,
        masks=_masks(num_masks, shapes, state),
        penalties=Penalties.build(token_ids, np.zeros(token_ids.shape, np.float32), to_device),
        logprobs=_logprobs(num_rows, num_logprobs),
    )


def _logprobs(num_rows: int, width: int) -> LogprobPlan:
    """Return a plan of `width` log-probabilities for each request."""
    return LogprobPlan(np.arange(num_rows), np.full(num_rows, width, np.int32), width, None)


def _masks(num_rows: int, shapes: StaticShapes, state: SamplingState) -> TokenMasks:
    """Return masks for `num_rows` requests that allow all tokens."""
    words = np.full((num_rows, num_words(shapes.vocab_size)), -1, np.int32)
    rows = np.arange(num_rows)
    return TokenMasks(rows, state.to_device(words), bit_values(state.device), state.to_device(rows))


def _rules(num_rows: int, shapes: StaticShapes, state: SamplingState) -> LogitRules:
    """Return rules for `num_rows` requests that allow all tokens."""
    first_times = state.to_device(np.full(num_rows, NO_TIMES, np.int32))
    return LogitRules(_masks(num_rows, shapes, state), first_times)
