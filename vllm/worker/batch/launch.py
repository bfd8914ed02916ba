"""Splits one scheduler step into forward passes."""

from dataclasses import dataclass, field

import numpy as np

from vllm.messages import IntArray


@dataclass(frozen=True, slots=True)
class Launch:
    """One forward pass for n requests, in the order of `SchedulerOutput.rows`.

    The forward passes of a step run in order: a later one may read what an earlier one has cached.
    """

    rows: IntArray
    """[n]"""
    num_computed_tokens: IntArray
    """[n] position of each row's first token in this pass."""
    num_scheduled_tokens: IntArray
    """[n] tokens of each row in this pass."""
    num_drafts: IntArray | None = field(default=None, kw_only=True)
    """[n] number of drafts among them, which are the last ones; None if no row has drafts."""
    restored_states: IntArray | None = field(default=None, kw_only=True)
    """Copies of kept states before the tokens run, as in `SchedulerOutput`."""
    kept_states: IntArray | None = field(default=None, kw_only=True)
    """Copies to kept states after some of the tokens, as in `SchedulerOutput`."""
    num_replayed_tokens: IntArray | None = field(default=None, kw_only=True)
    """[n] tokens that recurrent states lack, as in `SchedulerOutput`."""

    @property
    def starts(self) -> IntArray:
        """[n] index of the first token of each request among the tokens of the forward pass."""
        count = self.num_scheduled_tokens
        return np.cumsum(count, dtype=np.int32) - count

    @property
    def num_known(self) -> IntArray:
        """[n] tokens of each request after the forward pass, without drafts."""
        end = self.num_computed_tokens + self.num_scheduled_tokens
        return end if self.num_drafts is None else end - self.num_drafts


@dataclass(frozen=True, slots=True)
class LaunchInput:
    """A forward pass whose inputs are built."""

    launch: Launch
    sampled: IntArray
    """[m] which of the launch's rows sample, as indices."""

    @property
    def rows(self) -> IntArray:
        """[m] batch indices of the requests that sample."""
        return self.launch.rows[self.sampled]

    @property
    def num_drafts(self) -> IntArray | None:
        """[m] number of drafts of each request that samples; None if no request has drafts."""
        counts = self.launch.num_drafts
        return None if counts is None else counts[self.sampled]
