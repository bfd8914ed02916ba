"""The data of requests in a batch other than tokens: one protocol, and the list of parts that a
runner keeps.

Examples are sampling parameters, grammars, log-probabilities of the prompt, embeddings, and
adapters. Runners and workers use the list; each part stores its data of the rows that have some.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm.attention import LaunchContext, LaunchParts, share_context
from vllm.messages import EngineRequest, IntArray, NewRequest, RunnerStats, SchedulerOutput
from vllm.model_executor.models.interface import CausalLM
from vllm.sample.state import SamplingState
from vllm.structured_output.matchers import GrammarMatchers
from vllm.utils.futures import wait_all
from vllm.worker.batch.launch import Launch
from vllm.worker.batch.launch_result import PendingRows
from vllm.worker.parts.memory_use import MemoryUse

BoolArray = npt.NDArray[np.bool_]


class RowPart:
    """One thing that requests may bring. A hook that a subclass leaves out is never called."""

    def prepare(self, request: EngineRequest) -> Future[Any] | None:
        """Load in the background what the steps of a request need.

        Returns:
            Done when it is loaded (None), or cannot be (why). None: nothing has to be loaded.
        """
        return None

    def release(self, request_ids: Iterable[str]) -> None:
        """Drop what requests have needed that have ended."""

    def remove(self, row: int) -> None:
        """Clear a row of the batch, if it has something."""

    def add(self, new: NewRequest) -> None:
        """Note what a request brings into its row."""

    def note_step(self) -> None:
        """Note that a step begins."""

    def begin(self, step: SchedulerOutput) -> None:
        """Do what a step asks for before its tokens run; its new requests are noted."""

    def needs_prefill(self, rows: IntArray, indices: IntArray) -> BoolArray | None:
        """Return which single tokens a card may not run as decodes, which cost less; None: it may
        run all of them.

        Args:
            rows: [n] of the tokens.
            indices: [n] in their requests.
        """
        return None

    def send(self, launch: Launch) -> None:
        """Copy to a card what a prefill reads there in addition to its packed input."""

    def part_of(self, launch: Launch) -> LaunchParts:
        """Return what the layers need to know of the tokens of a launch; empty: nothing."""
        return {}

    def part_of_head(self, rows: IntArray) -> LaunchParts:
        """Return what the output head needs to know of one hidden state of each of these rows [N];
        empty: nothing."""
        return {}

    def read(self, launch: Launch, hidden_states: Tensor) -> list[PendingRows]:
        """Make results from the hidden states [T, hidden] of a launch."""
        return []

    def count(self, stats: RunnerStats) -> RunnerStats:
        """Return counters of the runner with what this part has counted."""
        return stats

    def errors_of(self, rows: IntArray) -> dict[int, str]:
        """Return why some of these rows have failed, by row."""
        return {}

    def memory_uses(self) -> Sequence[MemoryUse]:
        """Return the memory of the device that is taken from the start, whatever requests bring."""
        return ()


PartT = TypeVar("PartT", bound=RowPart)


class RowParts:
    """The parts of one batch.

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
        """Return the part of a class; None: there is none."""
        return next((part for part in self._parts if isinstance(part, kind)), None)

    def prepare(self, request: EngineRequest) -> Future[str | None] | None:
        """Load in the background what a request needs of any part."""
        return wait_all([part.prepare(request) for part in self._parts])

    def release(self, request_ids: Sequence[str]) -> None:
        """Let every part drop what these requests have needed."""
        for part in self._parts:
            part.release(request_ids)

    def update(self, step: SchedulerOutput) -> None:
        """Clear the rows that a step has freed, and note what its new requests bring."""
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
        """Return which single tokens one of the parts keeps from running as decodes."""
        found = [part.needs_prefill(rows, indices) for part in self._choosing]
        asked = [each for each in found if each is not None]
        return np.logical_or.reduce(asked) if asked else None

    def send(self, launch: Launch) -> None:
        """Let every part bring to a card what a prefill reads there."""
        for part in self._sending:
            part.send(launch)

    def of_launch(self, launch: Launch) -> LaunchParts:
        """Join what the parts bring to a launch."""
        found: LaunchParts = {}
        for part in self._in_launch:
            found.update(part.part_of(launch))
        return found

    def of_head(self, rows: IntArray) -> LaunchParts:
        """Join what the parts bring to the output head for these rows."""
        found: LaunchParts = {}
        for part in self._in_head:
            found.update(part.part_of_head(rows))
        return found

    def read(self, launch: Launch, hidden_states: Tensor) -> list[PendingRows]:
        """Join the results that the parts make from the hidden states of a launch."""
        found: list[PendingRows] = []
        for part in self._reading:
            found += part.read(launch, hidden_states)
        return found

    def count(self, stats: RunnerStats) -> RunnerStats:
        """Return counters of the runner with what the parts have counted."""
        for part in self._counting:
            stats = part.count(stats)
        return stats

    def errors_of(self, rows: IntArray) -> dict[int, str]:
        """Join the errors of these rows."""
        errors: dict[int, str] = {}
        for part in self._failing:
            errors.update(part.errors_of(rows))
        return errors

    def memory_uses(self) -> list[MemoryUse]:
        """Join what the parts have taken of the memory of the device."""
        return [use for part in self._parts for use in part.memory_uses()]


class SamplingRows(RowPart):
    """The sampling parameters of requests, and the grammars of their output.

    Args:
        sampling: of the rows.
        grammars: of the requests.
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
"""The output head reads no positions."""


class OutputHead:
    """The output head of a model, with what rows bring to it.

    Args:
        model: loaded.

    Attributes:
        parts: of the rows; there once all of them are made.
    """

    parts: RowParts

    def __init__(self, model: CausalLM) -> None:
        self._model, self._holder = model, share_context(model)

    def __call__(self, hidden_states: Tensor, rows: IntArray) -> Tensor:
        """Return the logits [N, vocab_size] of hidden states [N, hidden] of rows [N]."""
        parts = self.parts.of_head(rows)
        if not parts:
            return self._model.compute_logits(hidden_states)
        context = replace(_NO_TOKENS, **parts)
        with self._holder.running(context):
            return self._model.compute_logits(hidden_states)
