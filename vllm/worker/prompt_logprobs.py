"""Log-probabilities of prompt tokens, for the few requests that ask for them."""

import numpy as np
import torch
from torch import Tensor

from vllm.messages import EngineRequest, LogprobRows
from vllm.model_executor.models.interface import CausalLM
from vllm.sample.logprobs import gather_logprobs
from vllm.worker.input_batch import InputBatch
from vllm.worker.launch import Launch

_MAX_ROWS = 256
"""Positions whose logits are in memory at one time."""


class PromptLogprobs:
    """Remembers which rows want them, and computes them from a launch's hidden states.

    Args:
        model: has `compute_logits`.
    """

    def __init__(self, model: CausalLM) -> None:
        self._compute_logits = model.compute_logits
        self._wanted: dict[int, int] = {}

    def add(self, row: int, request: EngineRequest) -> None:
        """A request has taken the row."""
        if request.sampling_params.prompt_logprobs is not None:
            self._wanted[row] = request.sampling_params.prompt_logprobs

    def remove(self, row: int) -> None:
        """The row's request has left."""
        self._wanted.pop(row, None)

    def compute(
        self, batch: InputBatch, launch: Launch, hidden_states: Tensor
    ) -> dict[int, LogprobRows]:
        """Log-probabilities of the tokens that follow this launch's prompt positions.

        Args:
            batch: has the prompts.
            launch: a ragged launch of T tokens.
            hidden_states: [T, hidden].

        Returns:
            row -> one entry per position p of the launch with p + 1 inside the prompt, for
            token p + 1.
        """
        if not self._wanted:
            return {}
        found: dict[int, LogprobRows] = {}
        ends = np.cumsum(launch.num_scheduled_tokens)
        for index, row in enumerate(launch.rows.tolist()):
            if row not in self._wanted:
                continue
            start = int(launch.num_computed_tokens[index])
            count = min(
                int(launch.num_scheduled_tokens[index]),
                int(batch.num_prompt_tokens[row]) - 1 - start,
            )
            if count <= 0:
                continue
            first = int(ends[index] - launch.num_scheduled_tokens[index])
            targets = batch.token_ids[row, start + 1 : start + 1 + count]
            found[row] = self._rows(
                hidden_states[first : first + count], targets, self._wanted[row]
            )
        return found

    def _rows(self, hidden_states: Tensor, targets: np.ndarray, num_logprobs: int) -> LogprobRows:
        parts = []
        for start in range(0, len(targets), _MAX_ROWS):
            chunk = slice(start, start + _MAX_ROWS)
            logits = self._compute_logits(hidden_states[chunk]).float()
            token_ids = torch.from_numpy(targets[chunk].astype(np.int64)).to(logits.device)
            parts.append(gather_logprobs(logits, token_ids, num_logprobs))
        found, logprobs, ranks = (
            torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)
        )
        return LogprobRows(token_ids=found, logprobs=logprobs, ranks=ranks)
