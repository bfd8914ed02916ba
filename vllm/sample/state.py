"""Store the sampling parameters of each request, and the history that sampling depends on.

The state is on the host. It consists of arrays over batch indices, so that a batch takes a few
numpy gathers and one copy to the device. Rarely used parameters are in dictionaries by batch index,
and cost nothing if unused.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm.messages import NO_TOKEN_LEFT, EngineRequest, FloatArray, IntArray, LogprobRows
from vllm.sample.block_reductions import num_draws
from vllm.sample.buffers import ToDevice
from vllm.sample.constraints import BiasTables, LogitEdits, RowConstraints
from vllm.sample.features import DISTRIBUTION, NEUTRAL, PLAIN_PARAMS, SMALL_TOP_K, Feature, Param
from vllm.sample.logprobs import split_rows
from vllm.sample.metadata import (
    ALL_GREEDY,
    FeatureArray,
    LogprobPlan,
    OperatorChoice,
    RandomKeys,
    SamplingMetadata,
    needs_params,
)
from vllm.sample.penalties import Penalties, TokenCounts
from vllm.sample.random import KeyArray, stream_keys
from vllm.sample.restrictions.masks import (
    MaskFiller,
    RowDrafts,
    TokenMasks,
    TokenMatcher,
    bit_values,
    num_words,
    pack_allowed,
)
from vllm.sample.restrictions.output_rules import NO_TIMES, LogitRules, RowRules
from vllm.sample.restrictions.processors import RowProcessors
from vllm.sample.sampler import SamplerOutput
from vllm.sample.static_shapes import StaticShapes, canonical, class_of
from vllm.sampling_params import SamplingParams

_DEFAULTS = np.array(NEUTRAL, np.float32)

_EXTREME = 1e30
"""Larger numbers, or smaller ones than its inverse, have the same effect but overflow a float32."""


class SamplingArrays(NamedTuple):
    """Views of the arrays of a `SamplingState`, which only it writes and never replaces.

    Their length is the number of requests + 1.
    """

    features: FeatureArray
    """[requests + 1] `Feature` bits."""
    params: FloatArray
    """[params, requests + 1] in the order of `Param`."""
    keys: KeyArray
    """[requests + 1] of random numbers."""
    masks: IntArray
    """[requests + 1, W] for requests with allowed_token_ids or rules: the tokens that they may
    generate after their first token. With rules for time tokens, a mask holds for the next token,
    after `update_masks`."""
    first_times: IntArray
    """[requests + 1] the first time token of requests with rules for them, else `NO_TIMES`."""


class SamplingState:
    """Sampling parameters and history of every request.

    Args:
        max_num_seqs: maximum number of requests.
        vocab_size: V of the logits.
        device: device of the logits.
        static_shapes: limits for a device that compiles shapes: batches belong to the finite set
            that `static_shapes` describes.
        max_model_len: tokens of the longest request; limits this set.
        max_logprobs: largest number that a request may ask for; limits this set. None: the
            vocabulary size.
        has_rules: the model has rules for its outputs.
        draw_keys: batches contain the keys of random numbers instead of the numbers, for a sampler
            that computes them.
        to_device: copies an array to the device, preferably without waiting; None: a copy that
            waits.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        *,
        static_shapes: bool = False,
        max_model_len: int | None = None,
        max_logprobs: int | None = None,
        has_rules: bool = False,
        draw_keys: bool = False,
        to_device: ToDevice | None = None,
    ) -> None:
        self.device = device
        self.to_device = to_device or self._copy
        self._has_draw_keys = draw_keys
        self._vocab_size = vocab_size
        self.shapes: StaticShapes | None = None
        """None: shapes are not static."""
        if static_shapes:
            self.shapes = StaticShapes(
                vocab_size=vocab_size,
                max_model_len=vocab_size if max_model_len is None else max_model_len,
                max_logprobs=vocab_size if max_logprobs is None else max_logprobs,
                has_rules=has_rules,
            )
        self._padding_row = max_num_seqs
        self._features: FeatureArray = np.zeros(max_num_seqs + 1, np.int32)
        self._params: FloatArray = np.repeat(_DEFAULTS[:, None], max_num_seqs + 1, 1)
        self._keys = np.zeros(max_num_seqs + 1, np.uint64)
        self._num_logprobs: IntArray = np.zeros(max_num_seqs + 1, np.int32)
        # Memory is only taken for requests that have masks.
        self._known_masks = np.zeros((max_num_seqs + 1, num_words(vocab_size)), np.int32)
        self._first_times: IntArray = np.full(max_num_seqs + 1, NO_TIMES, np.int32)
        self._counts = TokenCounts(max_num_seqs + 1, vocab_size)
        self._constraints: dict[int, RowConstraints] = {}
        self._bias_tables = BiasTables(vocab_size)
        self._masks: dict[int, IntArray] = {}
        self._last_mask: tuple[list[int], IntArray] | None = None
        """The newest allowed_token_ids, and their mask: samples of one request share it."""
        self._filler = MaskFiller(max_num_seqs, vocab_size)
        self._bit_values = bit_values(device)
        self._rules: dict[int, RowRules] = {}
        self._processors: dict[int, RowProcessors] = {}
        self._taken: set[int] = set()
        self._recorded: set[int] = set()
        """Rows whose sampling depends on their generated tokens."""
        self._with_logprobs: set[int] = set()

    @property
    def padding_row(self) -> int:
        """A batch index that is never assigned: in a batch it is greedy, and its token is
        ignored.
        """
        return self._padding_row

    @property
    def row_arrays(self) -> SamplingArrays:
        """The arrays over requests; see `SamplingArrays`."""
        return SamplingArrays(
            self._features, self._params, self._keys, self._known_masks, self._first_times
        )

    @property
    def has_processors(self) -> bool:
        """Whether a request has logits processors, which read logits on the host."""
        return bool(self._processors)

    def add(
        self,
        row: int,
        request: EngineRequest,
        output_token_ids: list[int],
        matcher: TokenMatcher | None = None,
    ) -> None:
        """Add a request.

        Args:
            row: a free batch index.
            request: request whose prompt tokens, logit_bias and allowed_token_ids are inside the
                vocabulary.
            output_token_ids: tokens generated before a preemption; only read.
            matcher: matcher of a request with structured output; it also applies allowed_token_ids.
        """
        self.add_distribution(row, request)
        params, features = request.sampling_params, int(self._features[row])
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
            features |= Feature.PENALTIES
            # Only the repetition penalty depends on the prompt; presence and frequency depend on
            # the output.
            known = request.known_prompt_token_ids or []
            prompt = known if params.repetition_penalty != 1 else []
            self._counts.add(row, prompt, output_token_ids)
            self._recorded.add(row)
        constraints = RowConstraints(self._bias_tables.get(request), output_token_ids)
        if not constraints.is_empty:
            features |= Feature.EDITS
            self._constraints[row] = constraints
            if constraints.needs_output:
                self._recorded.add(row)
        if matcher is not None:
            features |= Feature.MASK | Feature.GRAMMAR
            self._filler.add(row, matcher)
            self._recorded.add(row)
        elif params.allowed_token_ids is not None:
            features |= Feature.MASK
            self._masks[row] = self._known_masks[row] = self._allowed_mask(params.allowed_token_ids)
        if request.output_rules is not None:
            features |= Feature.RULES
            rules = RowRules(request.output_rules, output_token_ids, self._vocab_size)
            self._rules[row] = rules
            if rules.first_time is None:
                self._known_masks[row] = rules.allowed(1)
            else:
                self._first_times[row] = rules.first_time
                self._recorded.add(row)
        if params.logits_processors:
            features |= Feature.PROCESSORS
            self._processors[row] = RowProcessors(request, output_token_ids)
            self._recorded.add(row)
        if params.logprobs is not None:
            features |= Feature.LOGPROBS
            self._num_logprobs[row] = params.logprobs
            self._with_logprobs.add(row)
        self._features[row] = features

    def add_distribution(self, row: int, request: EngineRequest) -> None:
        """Add a request of which only `distribution` will be used, to make drafts; another sampler
        samples its tokens.

        Args:
            row: a free batch index.
            request: see `add`.
        """
        assert row not in self._taken, f"row {row} is already in use"
        self._taken.add(row)
        self._keys[row] = stream_keys(np.array([request.seed & 2**64 - 1], np.uint64))[0]
        self._features[row] = self._add_distribution(row, request.sampling_params)

    def _allowed_mask(self, token_ids: list[int]) -> IntArray:
        """Return the mask [W] of allowed_token_ids, which must not be changed."""
        if self._last_mask is None or self._last_mask[0] is not token_ids:
            self._last_mask = token_ids, pack_allowed(token_ids, self._vocab_size)
        return self._last_mask[1]

    def _add_distribution(self, row: int, params: SamplingParams) -> int:
        """Store the parameters that become tensors. Returns the features of a random request, 0 for
        a greedy one.
        """
        values = _DEFAULTS.copy()
        values[Param.PRESENCE_PENALTY] = params.presence_penalty
        values[Param.FREQUENCY_PENALTY] = params.frequency_penalty
        values[Param.REPETITION_PENALTY] = min(
            max(params.repetition_penalty, 1 / _EXTREME), _EXTREME
        )
        features = 0
        # With a single candidate, no random draw is needed.
        if params.temperature > 0 and params.top_k != 1:
            features |= Feature.RANDOM
            values[Param.IS_GREEDY] = 0
            for param, field in PLAIN_PARAMS:
                if (value := getattr(params, field)) != param.neutral:
                    features |= param.bit
                    values[param] = min(value, _EXTREME)
            if 0 < params.top_k < self._vocab_size:
                large = params.top_k > SMALL_TOP_K
                features |= Feature.TOP_K | (Feature.LARGE_TOP_K if large else 0)
                values[Param.TOP_K] = params.top_k
        self._params[:, row] = values
        return features

    def remove(self, row: int) -> None:
        """Free a batch index, because its request has finished, was cancelled or preempted."""
        self._taken.discard(row)
        if self._features[row] & Feature.PENALTIES:
            self._counts.remove(row)
        self._constraints.pop(row, None)
        self._masks.pop(row, None)
        self._rules.pop(row, None)
        self._filler.remove(row)
        self._processors.pop(row, None)
        self._recorded.discard(row)
        self._with_logprobs.discard(row)
        self._features[row] = 0
        self._params[:, row] = _DEFAULTS
        self._num_logprobs[row] = 0
        self._first_times[row] = NO_TIMES

    def record(self, rows: IntArray, token_ids: IntArray) -> None:
        """Record the generated tokens [n] of requests [n]."""
        if not self._recorded:
            return
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            if row not in self._recorded:
                continue
            if self._features[row] & Feature.PENALTIES:
                self._counts.record(row, token_id)
            if (constraints := self._constraints.get(row)) and constraints.needs_output:
                constraints.record(token_id)
            if rules := self._rules.get(row):
                rules.record(token_id)
            if processors := self._processors.get(row):
                processors.record(token_id)
            if row in self._filler:
                self._filler.accept(row, token_id)

    def follows_output(self, rows: IntArray) -> bool:
        """Return whether the next token of any of these requests depends on the recorded tokens."""
        return bool(self._recorded) and not self._recorded.isdisjoint(rows.tolist())

    def update_masks(self, rows: IntArray) -> None:
        """Update the masks of `row_arrays` for the next tokens of these requests, none of which is
        the first of its output.
        """
        if not self._recorded:
            return
        for row in rows[self._first_times[rows] != NO_TIMES].tolist():
            self._known_masks[row] = self._rules[row].allowed(1)

    def start_masks(self, rows: IntArray, drafts: RowDrafts | None = None) -> None:
        """Start to fill the masks of structured outputs, in other threads.

        Call this before the forward pass; `metadata` waits for the masks.

        Args:
            rows: [n] requests that will sample.
            drafts: drafts of the requests that have any; `metadata` must get the same.
        """
        self._filler.start(rows, drafts)

    def metadata(
        self,
        rows: IntArray,
        num_output_tokens: IntArray,
        padded_size: int | None = None,
        drafts: RowDrafts | None = None,
    ) -> SamplingMetadata:
        """Return the sampling metadata of a batch.

        Args:
            rows: [n] batch indices in the order of the logits; `padding_row` may be among them, and
                repeatedly.
            num_output_tokens: [n] number of tokens that each has generated; any number for padding.
            padded_size: number of logits rows; rows from n on are padding and greedy.
            drafts: drafts of requests whose sampling depends on the generated tokens: at its first
                position in `rows`, a request samples its next token, then the token after its first
                draft, and so on.
        """
        rows, num_output_tokens = self._pad(rows, num_output_tokens, padded_size)
        features = self._features[rows]
        active = int(np.bitwise_or.reduce(features))
        if not active:
            return ALL_GREEDY
        return self._metadata(rows, num_output_tokens, features, active, drafts or {})

    def distribution(
        self, rows: IntArray, num_output_tokens: IntArray, padded_size: int | None = None
    ) -> SamplingMetadata:
        """Return metadata like `metadata`, limited to the features of `DISTRIBUTION`."""
        rows, num_output_tokens = self._pad(rows, num_output_tokens, padded_size)
        own = self._features[rows] & DISTRIBUTION
        active = int(np.bitwise_or.reduce(own))
        if not active:
            return ALL_GREEDY
        return self._metadata(rows, num_output_tokens, own, active, {})

    def _pad(
        self, rows: IntArray, num_output_tokens: IntArray, padded_size: int | None
    ) -> tuple[IntArray, IntArray]:
        if padded_size is None or padded_size <= len(rows):
            return rows, num_output_tokens
        padding = padded_size - len(rows)
        rows = np.concatenate([rows, np.full(padding, self._padding_row, np.int32)])
        return rows, np.concatenate([num_output_tokens, np.zeros(padding, np.int32)])

    def _metadata(
        self,
        rows: IntArray,
        num_output_tokens: IntArray,
        features: FeatureArray,
        active: int,
        drafts: RowDrafts,
    ) -> SamplingMetadata:
        ahead = _tokens_ahead(rows, drafts) if drafts else None
        choice = OperatorChoice()
        if self.shapes is not None:
            active = canonical(active)
            choice = OperatorChoice(
                unbounded_top_p=bool(active & Feature.TOP_P),
                max_top_k=self.shapes.max_top_k(active),
            )
        elif not self._has_draw_keys:
            choice = OperatorChoice.of(features, self._params[Param.TOP_K, rows])
        exponentials, draw_keys = None, None
        if active & Feature.RANDOM:
            draw_keys = RandomKeys(self._keys[rows], num_output_tokens.astype(np.int64))
            if not self._has_draw_keys:
                drawn = draw_keys.exponentials(num_draws(self._vocab_size))
                exponentials, draw_keys = self.to_device(drawn), None
        edits = None
        if active & Feature.EDITS:
            edits = self._edits(rows, num_output_tokens, features, ahead)
        return SamplingMetadata(
            features=features,
            active=active,
            **choice._asdict(),
            params=self.to_device(self._params.take(rows, axis=1))
            if needs_params(active)
            else None,
            exponentials=exponentials,
            draw_keys=draw_keys,
            processors=self._row_processors(rows, features) if active & Feature.PROCESSORS else (),
            edits=edits,
            masks=self._token_masks(rows, features, drafts) if active & Feature.MASK else None,
            penalties=self._penalties(rows, ahead) if active & Feature.PENALTIES else None,
            rules=self._logit_rules(rows, num_output_tokens, features, ahead)
            if active & Feature.RULES
            else None,
            logprobs=self._logprob_plan(rows, features) if active & Feature.LOGPROBS else None,
        )

    def logprob_plan(self, rows: IntArray) -> LogprobPlan | None:
        """Return which of these requests [n] want log-probabilities; None: no request does."""
        if self._with_logprobs.isdisjoint(rows.tolist()):
            return None
        return self._logprob_plan(rows, self._features[rows])

    def logprob_rows(self, rows: IntArray, sampled: SamplerOutput) -> dict[int, LogprobRows]:
        """Return the log-probabilities of requests that asked for them, by batch index, one
        position for each time that a request is in the batch. Waits for the device.

        Args:
            rows: [n] as given to `metadata`.
            sampled: sampler output for this metadata.
        """
        if sampled.logprobs is None or sampled.logprob_plan is None:
            return {}
        return split_rows(sampled.logprobs, rows, sampled.logprob_plan)

    def errors_of(
        self, rows: IntArray, sampled: SamplerOutput, host_ids: IntArray | None = None
    ) -> dict[int, str]:
        """Return the reasons why requests have no token, by batch index, except for `padding_row`.

        Args:
            rows: [n] as given to `metadata`.
            sampled: sampler output for this metadata.
            host_ids: [n or more] `sampled.host_ids` on the host; None: copy them, which waits for
                the device.
        """
        if host_ids is None:
            host_ids = sampled.host_ids.cpu().numpy()
        errors = invalid_rows(rows, host_ids[: len(rows)])
        errors.update({int(rows[i]): error for i, error in sampled.errors.items()})
        errors.update(self._filler.errors(rows))
        errors.pop(self.padding_row, None)
        return errors

    def _copy(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _row_processors(
        self, rows: IntArray, features: FeatureArray
    ) -> tuple[tuple[int, RowProcessors], ...]:
        found = np.flatnonzero(features & Feature.PROCESSORS).tolist()
        return tuple((i, self._processors[int(rows[i])]) for i in found)

    def _edits(
        self,
        rows: IntArray,
        num_output_tokens: IntArray,
        features: FeatureArray,
        ahead: list[Sequence[int]] | None,
    ) -> LogitEdits | None:
        pairs = {}
        for i in np.flatnonzero(features & Feature.EDITS).tolist():
            constraints, before = self._constraints[int(rows[i])], ahead[i] if ahead else ()
            found = constraints.pairs(int(num_output_tokens[i]), before)
            if len(found[0]):
                pairs[i] = found
        if not pairs:
            return None
        width = max(len(token_ids) for token_ids, _ in pairs.values())
        if self.shapes is not None:
            width = class_of(width, self.shapes.max_edits)
        return LogitEdits.build(len(rows), pairs, width, self.to_device)

    def _token_masks(self, rows: IntArray, features: FeatureArray, drafts: RowDrafts) -> TokenMasks:
        found = np.flatnonzero(features & Feature.MASK)
        own = {row: iter(self._row_masks(row, drafts)) for row in set(rows[found].tolist())}
        return self._as_masks(rows, found, [next(own[row]) for row in rows[found].tolist()])

    def _logit_rules(
        self,
        rows: IntArray,
        num_output_tokens: IntArray,
        features: FeatureArray,
        ahead: list[Sequence[int]] | None,
    ) -> LogitRules:
        found = np.flatnonzero(features & Feature.RULES)
        indices = found.tolist()
        own = [self._rules[row] for row in rows[found].tolist()]
        allowed = [
            rules.allowed(int(num_output_tokens[i]), ahead[i] if ahead else ())
            for i, rules in zip(indices, own, strict=True)
        ]
        masks = self._as_masks(rows, found, allowed)
        first_times = [NO_TIMES if r.first_time is None else r.first_time for r in own]
        if self.shapes is None and min(first_times) == NO_TIMES:
            return LogitRules(masks)
        first_times += first_times[-1:] * (len(masks.rows) - len(first_times))
        return LogitRules(masks, self.to_device(np.array(first_times, np.int32)))

    def _as_masks(
        self, rows: IntArray, found: npt.NDArray[np.int64], masks: list[IntArray]
    ) -> TokenMasks:
        """Copy the masks [W] of some requests of a batch to the device."""
        if self.shapes is not None:
            padding = class_of(len(found), len(rows)) - len(found)
            found = np.concatenate([found, np.repeat(found[-1:], padding)])
            masks += masks[-1:] * padding
        words = self.to_device(np.stack(masks))
        device_rows = None if self.shapes is None else self.to_device(found)
        return TokenMasks(found, words, self._bit_values, device_rows)

    def _row_masks(self, row: int, drafts: RowDrafts) -> Iterable[IntArray]:
        """Yield the masks [W] of allowed tokens for the sampled positions of a request, one after
        another, on the host.

        W is the number of 32-bit words of a mask.
        """
        if row not in self._filler:
            return repeat(self._masks[row])
        return self._filler.masks(row, drafts)

    def _penalties(self, rows: IntArray, ahead: list[Sequence[int]] | None) -> Penalties:
        width = self._counts.max_distinct(rows.tolist())
        if ahead is not None:
            pairs = zip(rows.tolist(), ahead, strict=True)
            width = max(self._counts.max_distinct([row]) + len(more) for row, more in pairs)
        if self.shapes is not None:
            # The sum counts tokens twice if those ahead repeat earlier ones; the maximum bounds it.
            most = self.shapes.max_penalties
            width = class_of(min(width, most), most)
        if ahead is not None:
            return Penalties.build(*self._counts.gather_behind(rows, ahead, width), self.to_device)
        return Penalties.build(*self._counts.gather(rows, width), self.to_device)

    def _logprob_plan(self, rows: IntArray, features: FeatureArray) -> LogprobPlan:
        indices = np.flatnonzero(features & Feature.LOGPROBS)
        num_logprobs = self._num_logprobs[rows[indices]]
        width = min(int(num_logprobs.max()), self._vocab_size)
        if self.shapes is not None:
            width = class_of(width, self.shapes.max_likeliest)
            return LogprobPlan(indices, num_logprobs, width, None)
        some = len(indices) < len(rows)
        device_rows = self.to_device(indices) if some else None
        return LogprobPlan(indices, num_logprobs, width, device_rows)


def _tokens_ahead(rows: IntArray, drafts: RowDrafts) -> list[Sequence[int]]:
    """Return for each entry of a batch the drafts that precede it."""
    num_seen: Counter[int] = Counter()
    ahead: list[Sequence[int]] = []
    for row in rows.tolist():
        ahead.append(drafts[row][: num_seen[row]] if row in drafts else ())
        num_seen[row] += 1
    return ahead


def invalid_rows(rows: IntArray, host_ids: IntArray) -> dict[int, str]:
    """Return an error by batch index for the requests [n] whose `SamplerOutput.host_ids` [n] are
    negative.
    """
    return {int(rows[i]): NO_TOKEN_LEFT for i in np.flatnonzero(host_ids < 0)}
