"""Run the logits processors that a user passes in `SamplingParams`, request by request, in
Python.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm.messages import EngineRequest


class LogitsProcessorError(Exception):
    """A user's logits processor failed; the message is for the user."""


class RowProcessors:
    """The processors of one request, and the token ids that they get.

    Args:
        request: request with its prompt and its processors.
        output_token_ids: tokens generated so far.
    """

    def __init__(self, request: EngineRequest, output_token_ids: Sequence[int]) -> None:
        # Copies, so that a processor that changes the lists harms only its own request.
        self._prompt_token_ids = list(request.known_prompt_token_ids or ())
        self._output_token_ids = list(output_token_ids)
        processors = request.sampling_params.logits_processors or []
        self._processors = [(p, _num_arguments(p)) for p in processors]

    def record(self, token_id: int) -> None:
        """Record a generated token."""
        self._output_token_ids.append(token_id)

    def apply(self, logits: Tensor) -> None:
        """Run all processors in order, and write the result to `logits`.

        Args:
            logits: [vocab_size] float32. Processors get their own copy, which they may keep or
                change.

        Raises:
            LogitsProcessorError: a processor raised, or did not return logits of this shape. The
                logits are then unchanged.
        """
        result = logits.clone()
        for processor, num_arguments in self._processors:
            result = self._run(processor, num_arguments, result)
            if not isinstance(result, Tensor) or result.shape != logits.shape:
                raise LogitsProcessorError(
                    f"logits processor {_name(processor)} must return a tensor of shape "
                    f"{tuple(logits.shape)}, got {_describe(result)}"
                )
        logits.copy_(result)

    def _run(self, processor: Callable[..., Any], num_arguments: int, logits: Tensor) -> Any:
        prompt = (self._prompt_token_ids,) if num_arguments == 3 else ()
        try:
            return processor(*prompt, self._output_token_ids, logits)
        except (Exception, SystemExit) as error:  # any error fails only this request
            raise LogitsProcessorError(
                f"logits processor {_name(processor)} raised {type(error).__name__}: {error}"
            ) from error


def _num_arguments(processor: Callable[..., Any]) -> int:
    """Return 3 for a processor that must or can only be called with the prompt, else 2."""
    try:
        signature = inspect.signature(processor)
    except (TypeError, ValueError):  # a builtin has no signature
        return 2
    for arguments in (2, 3):
        try:
            signature.bind(*[None] * arguments)
        except TypeError:
            continue
        return arguments
    return 2


def _name(processor: Callable[..., Any]) -> str:
    return getattr(processor, "__qualname__", type(processor).__qualname__)


def _describe(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"shape {tuple(result.shape)}"
    return f"{type(result).__name__}"
