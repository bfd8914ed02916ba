"""What each row of the batch asked of the sampler, and what of its history sampling depends on.

Lives on the host. A structure of arrays over rows, so that a launch is a few numpy gathers and one
copy to the device; what few requests use is in dictionaries by row, and costs nothing while nobody
uses it.
"""

import numpy as np
import numpy.typing as npt
import torch

from vllm.messages import EngineRequest, FloatArray, IntArray, LogprobRows
from vllm.sample.blocks import num_draws
from vllm.sample.constraints import LogitEdits, RowConstraints, TokenMasks, forbidden_mask
from vllm.sample.logprobs import split_rows
from vllm.sample.metadata import (
    ALL_GREEDY,
    SMALL_TOP_K,
    Feature,
    FeatureArray,
    LogprobPlan,
    SamplingMetadata,
    has_unbounded_top_p,
)
from vllm.sample.penalties import Penalties, TokenCounts
from vllm.sample.processors import RowProcessors
from vllm.sample.random import exponentials_at, stream_keys
from vllm.sample.sampler import SamplerOutput
from vllm.sampling_params import SamplingParams

# Rows of `SamplingState._params`.
_TEMPERATURE, _MIN_P, _TOP_K, _TOP_P, _PRESENCE, _FREQUENCY, _REPETITION, _IS_GREEDY = range(8)
_NUM_PARAMS = 8
_DEFAULTS = np.array([1, 0, 0, 1, 0, 0, 1, 1], np.float32)

_EXTREME = 1e30
"""Numbers beyond it, or below its inverse, do the same as it does but overflow a float32."""

_INVALID = "no token can be sampled: the logits hold NaN or infinity, or every token is forbidden"


class SamplingState:
    """Sampling parameters and history of every row.

    Args:
        max_num_seqs: number of rows.
        vocab_size: V of the logits.
        device: of the logits.
        static_shapes: round sizes that depend on the requests up to powers of two, for a device
            that compiles shapes.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        *,
        static_shapes: bool = False,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._static_shapes = static_shapes
        self._padding_row = max_num_seqs  # one row more, that nobody uses, for padded launches
        self._features: FeatureArray = np.zeros(max_num_seqs + 1, np.int32)
        self._params: FloatArray = np.repeat(_DEFAULTS[:, None], max_num_seqs + 1, 1)
        self._keys = np.zeros(max_num_seqs + 1, np.uint64)
        self._num_logprobs: IntArray = np.zeros(max_num_seqs + 1, np.int32)
        self._counts = TokenCounts(max_num_seqs + 1, vocab_size)
        self._constraints: dict[int, RowConstraints] = {}
        self._masks: dict[int, torch.Tensor] = {}
        self._processors: dict[int, RowProcessors] = {}
        self._recorded: set[int] = set()
        """Rows whose sampling depends on their output."""

    def add(self, row: int, request: EngineRequest, output_token_ids: list[int]) -> None:
        """Place a request.

        Args:
            row: free.
            request: token ids of its prompt, logit_bias and allowed_token_ids are inside the
                vocabulary.
            output_token_ids: generated before a preemption; only read.
        """
        assert not self._features[row], f"row {row} is taken"
        params = request.sampling_params
        self._keys[row] = stream_keys(np.array([request.seed & 2**64 - 1], np.uint64))[0]
        features = self._add_distribution(row, params)
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
            features |= Feature.PENALTIES
            # Presence and frequency are about the output only.
            prompt = request.prompt_token_ids if params.repetition_penalty != 1 else []
            self._counts.add(row, prompt, output_token_ids)
            self._recorded.add(row)
        constraints = RowConstraints(request, self._vocab_size, output_token_ids)
        if not constraints.is_empty:
            features |= Feature.EDITS
            self._constraints[row] = constraints
            if constraints.needs_output:
                self._recorded.add(row)
        if params.allowed_token_ids is not None:
            features |= Feature.MASK
            mask = forbidden_mask(params.allowed_token_ids, self._vocab_size)
            self._masks[row] = mask.to(self._device)
        if params.logits_processors:
            features |= Feature.PROCESSORS
            self._processors[row] = RowProcessors(request, output_token_ids)
            self._recorded.add(row)
        if params.logprobs is not None:
            features |= Feature.LOGPROBS
            self._num_logprobs[row] = params.logprobs
        self._features[row] = features

    def _add_distribution(self, row: int, params: SamplingParams) -> int:
        """Write what becomes tensors; returns the features of a random row, 0 for a greedy one."""
        values = _DEFAULTS.copy()
        values[_PRESENCE] = params.presence_penalty
        values[_FREQUENCY] = params.frequency_penalty
        values[_REPETITION] = min(max(params.repetition_penalty, 1 / _EXTREME), _EXTREME)
        features = 0
        # The one likeliest token needs no draw.
        if params.temperature > 0 and params.top_k != 1:
            features |= Feature.RANDOM
            values[_IS_GREEDY] = 0
            if params.temperature != 1:
                features |= Feature.TEMPERATURE
                values[_TEMPERATURE] = min(params.temperature, _EXTREME)
            if params.min_p > 0:
                features |= Feature.MIN_P
                values[_MIN_P] = params.min_p
            if 0 < params.top_k < self._vocab_size:
                large = params.top_k > SMALL_TOP_K
                features |= Feature.TOP_K | (Feature.LARGE_TOP_K if large else 0)
                values[_TOP_K] = params.top_k
            if params.top_p < 1:
                features |= Feature.TOP_P
                values[_TOP_P] = params.top_p
        self._params[:, row] = values
        return features

    def remove(self, row: int) -> None:
        """The row's request has finished, was cancelled or preempted: the row is free."""
        if self._features[row] & Feature.PENALTIES:
            self._counts.remove(row)
        self._constraints.pop(row, None)
        self._masks.pop(row, None)
        self._processors.pop(row, None)
        self._recorded.discard(row)
        self._features[row] = 0
        self._params[:, row] = _DEFAULTS
        self._num_logprobs[row] = 0

    def record(self, rows: IntArray, token_ids: IntArray) -> None:
        """The rows [n] have generated these tokens [n]."""
        if not self._recorded:
            return
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            if row not in self._recorded:
                continue
            if self._features[row] & Feature.PENALTIES:
                self._counts.record(row, token_id)
            if (constraints := self._constraints.get(row)) and constraints.needs_output:
                constraints.record(token_id)
            if processors := self._processors.get(row):
                processors.record(token_id)

    def metadata(
        self, rows: IntArray, num_output_tokens: IntArray, padded_size: int | None = None
    ) -> SamplingMetadata:
        """What the sampler needs for the rows that sample in a launch.

        Args:
            rows: [n] in the order of the logits.
            num_output_tokens: [n] how many tokens each has generated.
            padded_size: logits have this many rows; those from n on are padding and greedy.
        """
        if padded_size is not None and padded_size > len(rows):
            padding = padded_size - len(rows)
            rows = np.concatenate([rows, np.full(padding, self._padding_row, np.int32)])
            num_output_tokens = np.concatenate([num_output_tokens, np.zeros(padding, np.int32)])
        features = self._features[rows]
        active = int(np.bitwise_or.reduce(features))
        if not active:
            return ALL_GREEDY
        return self._metadata(rows, num_output_tokens, features, active)

    def _metadata(
        self, rows: IntArray, num_output_tokens: IntArray, features: FeatureArray, active: int
    ) -> SamplingMetadata:
        is_random = bool(active & Feature.RANDOM)
        all_random = is_random and bool(np.bitwise_and.reduce(features) & Feature.RANDOM)
        params = self._device_params(rows)
        has_top_k = bool(active & Feature.TOP_K)
        return SamplingMetadata(
            features=features,
            all_greedy=not is_random,
            all_random=all_random,
            greedy_mask=params[_IS_GREEDY] > 0 if is_random and not all_random else None,
            exponentials=self._exponentials(rows, num_output_tokens) if is_random else None,
            temperature=params[_TEMPERATURE] if active & Feature.TEMPERATURE else None,
            min_p=params[_MIN_P] if active & Feature.MIN_P else None,
            top_k=params[_TOP_K].long() if has_top_k else None,
            max_top_k=self._round_up(int(self._params[_TOP_K, rows].max())) if has_top_k else None,
            top_p=params[_TOP_P] if active & Feature.TOP_P else None,
            unbounded_top_p=bool(active & Feature.TOP_P) and has_unbounded_top_p(features),
            processors=self._row_processors(rows, features) if active & Feature.PROCESSORS else (),
            edits=self._edits(rows, num_output_tokens, features)
            if active & Feature.EDITS
            else None,
            masks=self._token_masks(rows, features) if active & Feature.MASK else None,
            penalties=self._penalties(rows, params) if active & Feature.PENALTIES else None,
            logprobs=self._logprob_plan(rows, features) if active & Feature.LOGPROBS else None,
        )

    def logprob_rows(self, rows: IntArray, sampled: SamplerOutput) -> dict[int, LogprobRows]:
        """row -> one position, for the rows that asked. Waits for the device.

        Args:
            rows: [n] as given to `metadata`.
            sampled: from its metadata.
        """
        if sampled.logprobs is None or sampled.logprob_plan is None:
            return {}
        return split_rows(sampled.logprobs, rows, sampled.logprob_plan)

    def errors_of(self, rows: IntArray, sampled: SamplerOutput) -> dict[int, str]:
        """row -> why it has no token. Waits for the device.

        Args:
            rows: [n] as given to `metadata`.
            sampled: from its metadata.
        """
        invalid = np.flatnonzero(sampled.invalid.cpu().numpy()[: len(rows)])
        errors = {int(rows[i]): _INVALID for i in invalid}
        errors.update({int(rows[i]): error for i, error in sampled.errors.items()})
        return errors

    def _device_params(self, rows: IntArray) -> torch.Tensor:
        """[8, n] float32 on the device: all parameters of the launch in one copy."""
        packed = np.empty((_NUM_PARAMS, len(rows)), np.float32)
        # Rows are in range; with mode="raise" numpy goes through a temporary.
        np.take(self._params, rows, axis=1, out=packed, mode="clip")
        return torch.from_numpy(packed).to(self._device)

    def _exponentials(self, rows: IntArray, num_output_tokens: IntArray) -> torch.Tensor:
        """[n, K] float32 on the device: the random numbers of each row's next token."""
        count = num_draws(self._vocab_size)
        values = exponentials_at(self._keys[rows], num_output_tokens, count)
        return torch.from_numpy(values).to(self._device)

    def _row_processors(
        self, rows: IntArray, features: FeatureArray
    ) -> tuple[tuple[int, RowProcessors], ...]:
        found = np.flatnonzero(features & Feature.PROCESSORS).tolist()
        return tuple((i, self._processors[int(rows[i])]) for i in found)

    def _edits(
        self, rows: IntArray, num_output_tokens: IntArray, features: FeatureArray
    ) -> LogitEdits | None:
        pairs = {}
        for i in np.flatnonzero(features & Feature.EDITS).tolist():
            found = self._constraints[int(rows[i])].pairs(int(num_output_tokens[i]))
            if len(found[0]):
                pairs[i] = found
        if not pairs:
            return None
        width = self._round_up(max(len(token_ids) for token_ids, _ in pairs.values()))
        return LogitEdits.build(len(rows), pairs, width, self._device)

    def _token_masks(self, rows: IntArray, features: FeatureArray) -> TokenMasks:
        found = self._padded(np.flatnonzero(features & Feature.MASK))
        return TokenMasks(found, tuple(self._masks[int(rows[i])] for i in found))

    def _penalties(self, rows: IntArray, params: torch.Tensor) -> Penalties:
        width = self._round_up(self._counts.max_distinct(rows.tolist()))
        token_ids, counts = self._counts.gather(rows, width)
        return Penalties(
            token_ids=torch.from_numpy(token_ids).to(self._device),
            counts=torch.from_numpy(counts).to(self._device),
            presence=params[_PRESENCE],
            frequency=params[_FREQUENCY],
            repetition=params[_REPETITION],
        )

    def _logprob_plan(self, rows: IntArray, features: FeatureArray) -> LogprobPlan:
        indices = np.flatnonzero(features & Feature.LOGPROBS)
        num_logprobs = self._num_logprobs[rows[indices]]
        device_rows = None
        if len(indices) < len(rows):
            device_rows = torch.from_numpy(self._padded(indices)).to(self._device)
        width = self._round_up(int(num_logprobs.max()))
        return LogprobPlan(indices, num_logprobs, min(width, self._vocab_size), device_rows)

    def _round_up(self, size: int) -> int:
        """To a power of two, 8 at least, if shapes are static; 0 stays 0."""
        return max(8, 1 << (size - 1).bit_length()) if self._static_shapes and size else size

    def _padded(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """With the last one repeated up to a power of two, if shapes are static."""
        padding = self._round_up(len(indices)) - len(indices)
        return np.concatenate([indices, np.repeat(indices[-1:], padding)]) if padding else indices
