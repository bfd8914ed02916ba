"""The result of a forward pass: sampled tokens on the device, which the host reads later."""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from vllm.messages import IntArray, LogprobRows
from vllm.sample.logprobs import LogprobTensors
from vllm.sample.sampler import SamplerOutput
from vllm.worker.batch.input_batch import ExpectedTokens
from vllm.worker.batch.verification import count_accepted


@dataclass(frozen=True)
class PendingLogprobs:
    """Log-probabilities of consecutive positions of one request, still on the device."""

    parts: list[LogprobTensors]
    """Parts of consecutive positions; the last part ends with padding."""
    num_positions: int
    num_logprobs: int
    vocab_size: int = 0
    """Tokens that the output head has."""
    absent: dict[int, int] = field(default_factory=dict)
    """Position -> the token there, which the output head does not have: its log-probability is
    -inf, and it comes after all others."""

    def result(self) -> LogprobRows:
        """Copy the log-probabilities to the host; waits for the device."""
        found, logprobs, ranks = (
            np.concatenate([tensor.cpu().numpy() for tensor in column])[: self.num_positions]
            for column in zip(*self.parts, strict=True)
        )
        if self.absent:
            indices = list(self.absent)
            found[indices, 0] = list(self.absent.values())
            logprobs[indices, 0], ranks[indices] = -np.inf, self.vocab_size + 1
        width = 1 + self.num_logprobs
        return LogprobRows(token_ids=found[:, :width], logprobs=logprobs[:, :width], ranks=ranks)


def join_logprobs(parts: list[LogprobRows]) -> LogprobRows:
    """Concatenate the log-probabilities of the positions of one request."""
    return LogprobRows(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
    )


PendingRows = tuple[int, PendingLogprobs]
"""Batch index of a request, and the log-probabilities that a forward pass computes of its
prompt."""


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """The result of one forward pass, still on the device."""

    rows: IntArray
    """[n] the row of each row of the logits; a row with drafts occurs once per position."""
    indices: IntArray
    """[t] indices of the entries that sampled a token, ascending."""
    sampled: SamplerOutput | None
    """The sampled tokens of n rows or more; None when t is 0."""
    prompt_logprobs: list[PendingRows]
    num_drafts: IntArray | None = field(default=None, kw_only=True)
    """[m] number of drafts of each row of the batch that sampled; the row has one more entry in
    `indices`. None if no row has drafts; m is t then."""
    accepted: Tensor | None = field(default=None, kw_only=True)
    """[rows, 1 + Q] where the device has compared drafts: see `DeviceTokens.accept`; the rows of
    the logits belong to its last Q columns. None: the host compares them."""

    @classmethod
    def unsampled(cls, rows: IntArray, num_drafts: IntArray | None) -> "LaunchResult":
        """Make the result for a pipeline stage that does not sample; the last stage samples.

        Args:
            rows: [m] batch indices of the requests that sample.
            num_drafts: [m] drafts of each; None: no request has drafts.
        """
        if num_drafts is not None:
            rows = np.repeat(rows, num_drafts + 1)
        indices = np.arange(len(rows), dtype=np.int32)
        return cls(rows, indices, None, [], num_drafts=num_drafts)

    def read(self, expected: ExpectedTokens) -> tuple[IntArray, IntArray | None]:
        """Wait for the sampled tokens, and return them with the number that each request outputs.

        It is None if each outputs one token and no request has drafts.
        """
        assert self.sampled is not None
        if self.accepted is None:
            host_ids = self.sampled.host_ids.cpu().numpy()
            if expected.num_drafts is None:
                return host_ids, None
            assert expected.draft_ids is not None
            sampled = host_ids[self.indices]
            return host_ids, count_accepted(sampled, expected.draft_ids, expected.num_drafts)
        found = self.accepted.cpu().numpy()
        host_ids = found[:, 1:].ravel()
        if expected.num_drafts is None:
            return host_ids, None
        first = np.cumsum(expected.num_drafts + 1) - expected.num_drafts - 1
        return host_ids, found[self.indices[first] // (found.shape[1] - 1), 0]

    @property
    def sampled_rows(self) -> IntArray:
        """[m] batch indices of the requests that sampled."""
        rows = self.rows[self.indices]
        if self.num_drafts is None:
            return rows
        return rows[np.cumsum(self.num_drafts + 1) - 1]


PendingLaunch = tuple[LaunchResult, ExpectedTokens]
"""A launch, and the expected tokens of its `indices` in the batch."""
