"""Keeps the newest tokens of the requests on the card, which knows them before the host.

A forward pass leaves the newest token of each request on the card, and the next one reads it there.
With drafts the card also counts how many of them were accepted. Every shape depends only on the
bucket.

Letters: R rows of the batch plus one of padding, k largest number of drafts of a request, B, Q and
T as in a packed decode.
"""

from dataclasses import fields

import torch
from torch import Tensor

from vllm.bucketing import Phase
from vllm.sample.sampler import SamplerOutput
from vllm.worker.hpu.launches.input import DecodeInput, unpack_decode, unpack_merged, unpack_prefill
from vllm.worker.hpu.launches.planner import PaddedShape

_FIELDS = tuple(field.name for field in fields(DecodeInput))
"""Read once: the compiler of torch cannot trace `fields`."""


class DeviceTokens:
    """The newest tokens of the requests of a model, on the device.

    Args:
        num_rows: number of rows of the batch.
        device: the card.
        max_drafts: k, drafts of a request that are made on the card; 0: none are.
        num_positions: positions that requests may give for each prompt token; 0: none.
        sees_ahead: tokens of images attend to later ones.

    Attributes:
        newest: [R] int32, the newest token of each request.
        ends: [R] int32, its index in the request. This and the following attributes exist only if
            drafts are made on the card.
        drafts: [R * k] int32, the drafts that the next forward pass of the request verifies.
        draft_tokens: the tokens of the draft model, which starts from the tokens of this model.
    """

    tokens_ahead = 0
    """Offset between a position and the token that runs there; see `HPUInputBuilder`."""

    def __init__(
        self,
        num_rows: int,
        device: torch.device,
        max_drafts: int = 0,
        num_positions: int = 0,
        *,
        sees_ahead: bool = False,
    ) -> None:
        self.max_drafts, self._num_positions = max_drafts, num_positions
        self._sees_ahead = sees_ahead
        self.draft_tokens: list[DeviceTokens] = []
        self.newest = _zeros(num_rows + 1, device)
        if max_drafts:
            self.ends = _zeros(num_rows + 1, device)
            self.drafts = _zeros((num_rows + 1) * max_drafts, device)

    # ---- a launch begins ------------------------------------------------------------------

    def fill_in(self, given: DecodeInput[Tensor], shape: PaddedShape) -> DecodeInput[Tensor]:
        """Return the inputs of a decode, with the tokens that only the card knows filled in."""
        on_card = self._tokens(given.rows, shape.bucket.query_len)
        known = torch.where(given.token_ids < 0, on_card, given.token_ids)
        others = {name: getattr(given, name) for name in _FIELDS}
        # `others | {...}` cannot be compiled by torch 2.6.
        return DecodeInput(**{**others, "token_ids": known})

    def _tokens(self, rows: Tensor, query_len: int) -> Tensor:
        """Return [B * Q]: the newest token of each request, and its drafts."""
        newest = self.newest.index_select(0, rows)
        if query_len == 1:
            return newest
        if not self.max_drafts:
            return newest.unsqueeze(-1).expand(-1, query_len).flatten()
        drafts = self.drafts.view(-1, self.max_drafts).index_select(0, rows)
        return torch.cat([newest[:, None], drafts[:, : query_len - 1]], 1).flatten()

    # ---- a launch has sampled -------------------------------------------------------------

    def accept(self, packed: Tensor, shape: PaddedShape, sampled: SamplerOutput) -> Tensor | None:
        """Store the newest token of each request that has sampled.

        With drafts, this is the first sampled token that differs from the draft at its position, or
        the last one.

        Returns:
            [B, 1 + Q] int32 for a decode of several tokens: how many of the sampled tokens of each
            request are output, and these tokens, -1 if none could be sampled. None for others: all
            are output.
        """
        if shape.bucket.phase is not Phase.DECODE:
            rows, ends = self._prompts(packed, shape)
            self._keep(rows, sampled.token_ids[:, None], torch.ones_like(rows), ends)
            return None
        given, query_len = unpack_decode(packed, shape), shape.bucket.query_len
        rows, token_ids = _first(given.sample_rows, shape), sampled.token_ids.view(-1, query_len)
        ends = _first(given.indices, shape)
        if query_len == 1:
            self._keep(rows, token_ids, torch.ones_like(rows), ends + 1)
            return None
        on_card = self._tokens(given.rows, query_len)
        run = torch.where(given.token_ids < 0, on_card, given.token_ids).view(-1, query_len)
        host_ids = sampled.host_ids.view(-1, query_len)
        column = _range(query_len, rows)
        is_last = column >= _num_more(given.indices, shape)[:, None]
        is_wrong = torch.cat([host_ids[:, :-1] != run[:, 1:], is_last[:, -1:]], 1)
        # For int32, the function `torch.amax` is documented for the device, but neither the method
        # `amax` nor a minimum.
        distance = torch.where(is_last | is_wrong, query_len - 1 - column, 0)
        end = query_len - 1 - torch.amax(distance, 1)
        has_failed = _at(host_ids, end) < 0  # the request failed before this token
        counts = end + 1 - ((end > 0) & has_failed).int()
        self._keep(rows, token_ids, counts, ends + counts)
        return torch.cat([counts[:, None], host_ids], 1)

    def _prompts(self, packed: Tensor, shape: PaddedShape) -> tuple[Tensor, Tensor]:
        """Return the requests [L] of the logits of a prefill, and the indices of the sampled
        tokens.
        """
        if shape.merged_prompts:
            merged = unpack_merged(packed, shape, self._num_positions, sees_ahead=self._sees_ahead)
            metadata = merged.metadata
            last = metadata.positions.index_select(0, metadata.last_token_indices)
            return merged.sample_rows, last + 1
        given = unpack_prefill(packed, shape, self._num_positions, sees_ahead=self._sees_ahead)
        return given.sample_rows, given.metadata.context_lens + given.metadata.query_lens

    def _keep(self, rows: Tensor, token_ids: Tensor, counts: Tensor, ends: Tensor) -> None:
        """Store the output of the requests `rows` [B]: the first `counts` of `token_ids` [B, n]."""
        index = rows.long()
        newest = _at(token_ids, counts - 1)
        for tokens in (self, *self.draft_tokens):
            tokens.newest.index_copy_(0, index, newest)
            if self.max_drafts:
                tokens.ends.index_copy_(0, index, ends)


class DeviceDrafts(DeviceTokens):
    """The newest tokens of the draft model: drafts, which follow the tokens of the model.

    Its forward passes of several tokens run known tokens.

    Args:
        target: tokens of the model; if it has no drafts, they are kept only here, and the host
            reads them.
        num_rows: number of rows; see `DeviceTokens`.
        device: device; see `DeviceTokens`.
        tokens_ahead: see `HPUInputBuilder`.
    """

    def __init__(
        self, target: DeviceTokens, num_rows: int, device: torch.device, tokens_ahead: int
    ) -> None:
        super().__init__(num_rows, device)
        self.tokens_ahead = tokens_ahead
        self.ends = _zeros(num_rows + 1, device)
        self._target = target
        target.draft_tokens.append(self)

    def last_column(self, given: DecodeInput[Tensor], shape: PaddedShape) -> Tensor:
        """Return [B], the index of the last token of each request in a decode."""
        return _num_more(given.indices, shape)

    def are_drafts(self, given: DecodeInput[Tensor]) -> Tensor:
        """Return [B] bool for a decode of single tokens: whether the token is a draft on
        the card.
        """
        if not self._target.max_drafts:
            return given.token_ids < 0
        ends = self.ends.index_select(0, given.rows)
        return (given.token_ids < 0) & (ends > self._target.ends.index_select(0, given.rows))

    def accept(self, packed: Tensor, shape: PaddedShape, sampled: SamplerOutput) -> None:
        """Store the draft after the last token of each request of a decode."""
        if shape.bucket.phase is not Phase.DECODE:
            return
        given, query_len = unpack_decode(packed, shape), shape.bucket.query_len
        target, rows = self._target, _first(given.sample_rows, shape)
        column = self.last_column(given, shape)
        ends = _first(given.indices, shape) + self.tokens_ahead + 1 + column
        drafts = _at(sampled.token_ids.view(-1, query_len), column)
        if not target.max_drafts:
            self.newest.index_copy_(0, rows.long(), drafts)
            return
        index = ends - target.ends.index_select(0, rows) - 1
        most = target.max_drafts
        index = rows * most + index.clamp(0, most - 1)
        self.newest.index_copy_(0, rows.long(), drafts)
        self.ends.index_copy_(0, rows.long(), ends)
        target.drafts.index_copy_(0, index.long(), drafts)


def _zeros(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)


def _range(size: int, like: Tensor) -> Tensor:
    return torch.arange(size, dtype=torch.int32, device=like.device)


def _first(of_tokens: Tensor, shape: PaddedShape) -> Tensor:
    """Return [B]: the first of the Q entries of each request in [B * Q]."""
    query_len = shape.bucket.query_len
    return of_tokens if query_len == 1 else of_tokens.view(-1, query_len)[:, 0]


def _num_more(indices: Tensor, shape: PaddedShape) -> Tensor:
    """Return [B]: the number of tokens of each request after its first one.

    Padding repeats the last index.
    """
    by_row = indices.view(-1, shape.bucket.query_len)
    return by_row[:, -1] - by_row[:, 0]


def _at(values: Tensor, column: Tensor) -> Tensor:
    """Select from `values` [B, n] the value at one column [B] per request: [B]."""
    if values.shape[1] == 1:
        return values[:, 0]
    is_chosen = _range(values.shape[1], column) == column[:, None]
    return torch.sum(torch.where(is_chosen, values, 0), 1, dtype=torch.int32)
