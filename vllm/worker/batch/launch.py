"""How one scheduler step becomes forward passes."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from vllm.messages import IntArray, SchedulerOutput


@dataclass(frozen=True, slots=True)
class Launch:
    """One forward pass over n rows, in the order of `SchedulerOutput.rows`.

    Launches of a step run in order: a later one may read what an earlier one has cached.
    """

    rows: IntArray
    """[n]"""
    num_computed_tokens: IntArray
    """[n] position of each row's first token in this pass."""
    num_scheduled_tokens: IntArray
    """[n] tokens of each row in this pass."""
    num_drafts: IntArray | None = field(default=None, kw_only=True)
    """[n] number of drafts among them, which are the last ones; None if no row has drafts."""

    @property
    def starts(self) -> IntArray:
        """[n] where the tokens of each row begin among those of the launch."""
        count = self.num_scheduled_tokens
        return np.cumsum(count, dtype=np.int32) - count


class LaunchPlanner(Protocol):
    """Splits a step into launches that the device can run."""

    def plan(self, step: SchedulerOutput) -> list[Launch]:
        """Plan the launches of a step, in the order in which they run. Together they cover all its
        rows."""
        ...


class RaggedPlanner:
    """One launch per step without padding, for devices that accept any shape."""

    def plan(self, step: SchedulerOutput) -> list[Launch]:
        """One launch with all rows."""
        return [
            Launch(
                step.rows,
                step.num_computed_tokens,
                step.num_scheduled_tokens,
                num_drafts=step.num_draft_tokens,
            )
        ]
