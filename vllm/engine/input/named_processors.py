"""Check the names of logits processors in requests, and import the callables.

Only names are sent between the processes, never code. The API process only checks the names; the
engine core, where processors run, imports them.
"""

import re
from typing import Any

import msgspec

from vllm.errors import RequestError
from vllm.messages import EngineRequest
from vllm.sampling_params import LogitsProcessorConstructor, SamplingParams
from vllm.utils.imports import IMPORT_LOCK, load_name

_ANY_FAILURE = (Exception, SystemExit)
"""Exceptions that the named code may raise; they must not end the engine."""


class NamedProcessors:
    """The logits processors that requests may name.

    Args:
        pattern: pattern of allowed names (`ModelConfig.logits_processor_pattern`); None: no name is
            allowed.
    """

    def __init__(self, pattern: str | None) -> None:
        self._pattern = None if pattern is None else re.compile(pattern)

    def check(self, params: SamplingParams) -> None:
        """Check only the names of logits processors; nothing is imported.

        Raises:
            RequestError: a name is not allowed.
        """
        for processor in params.logits_processors or ():
            if (name := _name_of(processor)) is not None:
                self._check_name(name)

    def resolve(self, request: EngineRequest) -> EngineRequest:
        """Return the request with names of logits processors replaced by callables; unchanged if it
        has no names.

        Raises:
            RequestError: a name is not allowed or cannot be imported, or the named object is not a
                processor and does not return one.
        """
        processors = request.sampling_params.logits_processors or ()
        if all(_name_of(processor) is None for processor in processors):
            return request
        params = request.sampling_params.clone()
        params.logits_processors = [self._resolve(processor) for processor in processors]
        return msgspec.structs.replace(request, sampling_params=params)

    def _check_name(self, name: str) -> None:
        if self._pattern is None:
            raise _refused(
                f"{name!r} cannot be used: this engine accepts no logits processors by name. "
                "Start it with --logits-processor-pattern to allow some"
            )
        if not self._pattern.fullmatch(name):
            raise _refused(
                f"{name!r} is not allowed: the whole name must match "
                f"--logits-processor-pattern ({self._pattern.pattern!r})"
            )

    def _resolve(self, processor: Any) -> Any:
        name = _name_of(processor)
        if name is None:
            return processor
        self._check_name(name)
        found = _import(name)
        if not callable(found):
            raise _refused(f"{name!r} is a {type(found).__name__}, which cannot be called")
        if not isinstance(processor, LogitsProcessorConstructor):
            return found
        try:
            with IMPORT_LOCK:  # the processor may import modules when it is created
                made = found(*(processor.args or ()), **(processor.kwargs or {}))
        except _ANY_FAILURE as error:
            raise _refused(f"calling {name!r} failed: {_describe(error)}") from error
        if not callable(made):
            raise _refused(
                f"{name!r} returned a {type(made).__name__}; it must return a logits processor, "
                "which is called with token ids and logits"
            )
        return made


def _name_of(processor: Any) -> str | None:
    """Return the qualified name of a processor; None if it is a callable."""
    if isinstance(processor, LogitsProcessorConstructor):
        return processor.qualname
    return processor if isinstance(processor, str) else None


def _import(name: str) -> Any:
    try:
        return load_name(name)
    except _ANY_FAILURE as error:
        raise _refused(f"{name!r} cannot be imported: {_describe(error)}") from error


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _refused(message: str) -> RequestError:
    return RequestError(f"logits_processors: {message}", param="logits_processors")
