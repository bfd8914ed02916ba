"""The data of requests in a batch other than tokens: one protocol, and the list of parts.

Examples of parts are sampling parameters, grammars, log-probabilities of the prompt, embeddings,
and adapters. Runners and workers use the list; each part stores the data of the requests that have
some.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from vllm.attention import LaunchContext, LaunchParts, share_context
from vllm.messages import (
    BoolArray,
    EngineRequest,
    IntArray,
    NewRequest,
    RunnerStats,
    SchedulerOutput,
)
from vllm.model_executor.models.interface import CausalLM
from vllm.sample.state import SamplingState
from vllm.structured_output.matchers import GrammarMatchers
from vllm.utils.futures import wait_all
from vllm.worker.batch.launch import Launch
from vllm.worker.batch.launch_result import PendingRows
from vllm.worker.parts.memory_use import MemoryUse


class RowPart:
    """Base class: one kind of data of requests.

    Methods that a subclass does not override are never called.
    """

    def prepare(self, request: EngineRequest) -> Future[Any] | None:
        """Load in the background what the steps of a request need.

        Returns:
            A future: None when it is loaded, or the reason why it cannot be. None: nothing has to
                be loaded.
        """
        return None

    def release(self, request_ids: Iterable[str]) -> None:
        """Drop the data of requests that have ended."""

    def remove(self, row: int) -> None:
        """Clear the data of this batch index, if there is any."""

    def add(self, new: NewRequest) -> None:
        """Store the data of a new request under its batch index."""

    def note_step(self) -> None:
        """Note that a step begins. Used to know whether steps run."""

    def begin(self, step: SchedulerOutput) -> None:
        """Prepare a step before its tokens run; its new requests were added already."""

    def needs_prefill(self, rows: IntArray, indices: IntArray) -> BoolArray | None:
        """Return which single tokens need a prefill, so that they must not run as a decode.

        A decode costs less, but does not read all data. None: no token needs it.

        Args:
            rows: [n] batch indices of the tokens.
            indices: [n] of the tokens in their requests.
        """
        return None

    def send(self, launch: Launch) -> None:
        """Copy data to a card that a prefill reads in addition to its packed input."""

    def part_of(self, launch: Launch) -> LaunchParts:
        """Return the data that layers need of the tokens of a forward pass; empty: nothing."""
        return {}

    def part_of_head(self, rows: IntArray) -> LaunchParts:
        """Return the data that the output head needs for hidden states of these requests [N].

        Empty: nothing.
        """
        return {}

    def read(self, launch: Launch, hidden_states: Tensor) -> list[PendingRows]:
        """Compute results from the hidden states [T, hidden] of a forward pass."""
        return []

    def count(self, stats: RunnerStats) -> RunnerStats:
        """Return the counters of the runner, with the counters of this part added."""
        return stats

    def errors_of(self, rows: IntArray) -> dict[int, str]:
        """Return batch index -> error, for the requests among these that have failed."""
        return {}

    def memory_uses(self) -> Sequence[MemoryUse]:
        """Return the uses of device memory that this part allocates at the start."""
        return ()


PartT = TypeVar("PartT", bound=RowPart)


class RowParts:
    """The list of all parts of one batch.

    Args:
        parts: called in this order.
    """

    def __init__(self, parts: Iterable[RowPart]) -> None:
        self._parts = tuple(parts)
        # Each step calls these hooks, and most parts implement only few of them. So the lists of
        # parts for each hook are made once.
        self._removing, self._adding = self._with("remove"), self._with("add")
        self._noting, self._failing = self._with("note_step"), self._with("errors_of")
        self._in_launch, self._in_head = self._with("part_of"), self._with("part_of_head")
        self._reading, self._sending = self._with("read"), self._with("send")
        self._choosing, self._beginning = self._with("needs_prefill"), self._with("begin")
        self._counting = self._with("count")

    def _with(self, hook: str) -> tuple[RowPart, ...]:
        default = getattr(RowPart, hook)
        return tuple(part for part in self._parts if getattr(type(part), hook) is not default)

    def find(self, kind: type[PartT]) -> PartT | None:
        """Return the part of this class; None if there is none."""
        return next((part for part in self._parts if isinstance(part, kind)), None)

    def prepare(self, request: EngineRequest) -> Future[str | None] | None:
        """Load in the background what a request needs, for all parts."""
        return wait_all([part.prepare(request) for part in self._parts])

    def release(self, request_ids: Sequence[str]) -> None:
        """Let every part drop the data of requests that have ended."""
        for part in self._parts:
            part.release(request_ids)

    def update(self, step: SchedulerOutput) -> None:
        """Clear the data of requests that a step has removed, and store the data of new ones."""
        for row in step.freed_rows:
            for part in self._removing:
                part.remove(row)
        for new in step.new_requests:
            for part in self._adding:
                part.add(new)
        for part in self._beginning:
            part.begin(step)

    def note_step(self) -> None:
        """Tell the parts that a step begins."""
        for part in self._noting:
            part.note_step()

    def needs_prefill(self, rows: IntArray, indices: IntArray) -> BoolArray | None:
        """Return which single tokens some part does not allow to run as decodes; None: all may."""
        found = [part.needs_prefill(rows, indices) for part in self._choosing]
        asked = [each for each in found if each is not None]
        return np.logical_or.reduce(asked) if asked else None

    def send(self, launch: Launch) -> None:
        """Let every part copy to a card what a prefill reads there."""
        for part in self._sending:
            part.send(launch)

    def of_launch(self, launch: Launch) -> LaunchParts:
        """Return the data of all parts for the layers in a forward pass."""
        found: LaunchParts = {}
        for part in self._in_launch:
            found.update(part.part_of(launch))
        return found

    def of_head(self, rows: IntArray) -> LaunchParts:
        """Return the data of all parts for the output head, for these requests."""
        found: LaunchParts = {}
        for part in self._in_head:
            found.update(part.part_of_head(rows))
        return found

    def read(self, launch: Launch, hidden_states: Tensor) -> list[PendingRows]:
        """Return the results that the parts compute from the hidden states of a forward pass."""
        found: list[PendingRows] = []
        for part in self._reading:
            found += part.read(launch, hidden_states)
        return found

    def count(self, stats: RunnerStats) -> RunnerStats:
        """Return the counters of the runner, with the counters of the parts added."""
        for part in self._counting:
            stats = part.count(stats)
        return stats

    def errors_of(self, rows: IntArray) -> dict[int, str]:
        """Return batch index -> error of these requests, from all parts."""
        errors: dict[int, str] = {}
        for part in self._failing:
            errors.update(part.errors_of(rows))
        return errors

    def memory_uses(self) -> list[MemoryUse]:
        """Return the uses of device memory of all parts."""
        return [use for part in self._parts for use in part.memory_uses()]


class SamplingRows(RowPart):
    """The sampling parameters of requests, and the grammars of their output.

    Args:
        sampling: sampling parameters by batch index.
        grammars: grammars of the requests.
        samples: whether tokens are sampled here; otherwise only drafts are.
    """

    def __init__(self, sampling: SamplingState, grammars: GrammarMatchers, samples: bool) -> None:
        self._sampling, self._grammars, self._samples = sampling, grammars, samples

    def prepare(self, request: EngineRequest) -> Future[None] | None:
        return self._grammars.prepare(request)

    def remove(self, row: int) -> None:
        self._sampling.remove(row)

    def add(self, new: NewRequest) -> None:
        request, token_ids = new.request, new.output_token_ids
        if not self._samples:
            self._sampling.add_distribution(new.row, request)
            return
        matcher = None
        if request.sampling_params.guided_decoding is not None:
            matcher = self._grammars.matcher(request, token_ids)
        self._sampling.add(new.row, request, token_ids, matcher)


_NO_TOKENS = LaunchContext(None, torch.empty(1, 0, dtype=torch.int64))
"""Context of the output head, which reads no positions."""


class OutputHead:
    """The output head of a model, with the data of requests that it needs, such as adapters.

    Args:
        model: loaded.

    Attributes:
        parts: parts of the batch; set after all of them are made.
    """

    parts: RowParts

    def __init__(self, model: CausalLM) -> None:
        self._model, self._holder = model, share_context(model)

    def __call__(self, hidden_states: Tensor, rows: IntArray) -> Tensor:
        """Return the logits [N, vocab_size] of hidden states [N, hidden] of the requests `rows`
        [N].
        """
        parts = self.parts.of_head(rows)
        if not parts:
            return self._model.compute_logits(hidden_states)
        context = replace(_NO_TOKENS, **parts)
        with self._holder.running(context):
            return self._model.compute_logits(hidden_states)
