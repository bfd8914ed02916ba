"""Run a list of requests to the end. Every method of `LLM` uses this loop."""

import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

from vllm.engine.llm_engine import LLMEngine
from vllm.entrypoints.offline.progress import GenerationProgress, MakeBar
from vllm.errors import CapacityError, RequestError
from vllm.inputs import PromptType
from vllm.messages import EngineRequest
from vllm.outputs import AnyRequestOutput, RequestOutput

Prompts = PromptType | Sequence[PromptType]


class PendingInterrupt:
    """Records whether Ctrl-C was pressed since `defer_interrupts` was entered."""

    def __init__(self) -> None:
        self.is_set = False

    def raise_if_set(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed. Called where an interrupt is safe."""
        if self.is_set:
            raise KeyboardInterrupt

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal of Ctrl-C. The second Ctrl-C interrupts at once."""
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


@contextmanager
def defer_interrupts() -> Iterator[PendingInterrupt]:
    """Defer Ctrl-C inside the context until the end of the running step; the code there must check
    the yielded object.

    An interrupted step would leave the scheduler and the workers in different states, and the
    engine could not continue. Changes nothing outside the main thread, or if the program handles
    SIGINT itself.
    """
    pending = PendingInterrupt()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pending
        return
    signal.signal(signal.SIGINT, pending.handle)
    try:
        yield pending
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_requests(
    engine: LLMEngine,
    requests: Sequence[tuple[str | None, EngineRequest]],
    use_tqdm: bool | MakeBar,
) -> list[AnyRequestOutput]:
    """Run requests that the input processor created. If the run is interrupted, all remaining
    requests are aborted.

    Returns:
        One output per request, in the same order.

    Raises:
        CapacityError: a prompt can never fit into the KV cache; names the prompt.
        RequestError: a request was refused before it ran, because its adapter does not fit the
            model; names the prompt.
    """
    pending: dict[str, None] = {}
    try:
        for index, (text, request) in enumerate(requests):
            with naming_prompt(index, len(requests)):
                engine.submit(text, request)
            pending[request.request_id] = None
        finished = _collect(engine, pending, use_tqdm)
    finally:
        engine.abort_request(pending)
    return [finished[request.request_id] for _, request in requests]


def _collect(
    engine: LLMEngine, pending: dict[str, None], use_tqdm: bool | MakeBar
) -> dict[str, AnyRequestOutput]:
    """Run steps until `pending` is empty; finished requests are removed from it."""
    finished: dict[str, AnyRequestOutput] = {}
    indices = {request_id: index for index, request_id in enumerate(pending)}
    with GenerationProgress(len(pending), use_tqdm) as progress, defer_interrupts() as ctrl_c:
        while pending:
            ctrl_c.raise_if_set()
            for output in engine.step():
                if output.finished and output.request_id in pending:
                    del pending[output.request_id]
                    with naming_prompt(indices[output.request_id], len(indices)):
                        _refuse_wrong_adapter(output)
                    finished[output.request_id] = output
                    progress.update(output)
    return finished


def _refuse_wrong_adapter(output: AnyRequestOutput) -> None:
    """Raise an error if a request with an adapter was refused before its first token, because the
    files of the adapter are then wrong for every request.
    """
    if isinstance(output, RequestOutput) and output.lora_request is not None:
        for sample in output.outputs:
            if sample.is_refused and not sample.token_ids:
                raise RequestError(str(sample.stop_reason))


@contextmanager
def naming_prompt(index: int, count: int) -> Iterator[None]:
    """Add the index of the prompt to the beginning of an error, if there are several prompts."""
    try:
        yield
    except (RequestError, CapacityError) as error:
        if count > 1:
            error.args = (f"prompt {index} of {count}: {error}",)
        raise


def per_prompt(name: str, values: Iterable[Any] | None, count: int) -> list[Any] | None:
    """Return the values as a list with one entry per prompt; None stays None.

    Raises:
        RequestError: the number of values differs from the number of prompts.
    """
    if values is None:
        return None
    found = list(values)
    if len(found) != count:
        raise RequestError(
            f"{name} must have one entry for each of the {count} prompts, got {len(found)}",
            param=name,
        )
    return found


def as_list(prompts: Prompts) -> list[PromptType]:
    """Return one prompt, or several, as a list. An array, a column of a table, or a generator is
    read as a list.

    Raises:
        RequestError: `prompts` is neither.
    """
    if isinstance(prompts, (str, Mapping)):
        return [cast(PromptType, prompts)]
    if hasattr(prompts, "tolist"):
        prompts = cast(Any, prompts).tolist()
    elif isinstance(prompts, Iterator):
        return cast(list[PromptType], list(prompts))
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}",
            param="prompts",
        )
    if prompts and isinstance(prompts[0], int):
        return [cast(list[int], prompts)]
    return list(cast(Sequence[PromptType], prompts))
