"""Every exception this package raises on purpose.

    VllmError
    |- ConfigError            a flag, variable or model the engine cannot start with (exit code 2)
    |  `- WeightLoadError     checkpoint and model do not match
    |- RequestError           one request is wrong; the engine keeps serving (HTTP 400)
    |  |- PromptTooLongError  the prompt does not fit max_model_len
    |  |  `- TextTooLongError its text shows it, before it is tokenised
    |  `- NotFoundError        what it names is not there (HTTP 404)
    |- RequestTimeoutError    a request took longer than the server allows (504)
    |- CapacityError          can never fit (400), cannot fit now (503), or requests run (409)
    |  `- EngineAsleepError   the engine sleeps; wake it up first (503)
    |- CollectiveError        an exchange between the workers failed; the engine stops
    |- WorkerCallError        a call to the workers failed; the engine keeps serving (500)
    `- EngineDeadError        the engine core has died (500; health fails)
       `- EngineStoppedError  the engine was shut down on purpose (503)

A failed `assert` is a bug in this package. Bad input is never an `assert`.
"""

from collections.abc import Sequence


class VllmError(Exception):
    """Root of every deliberate error."""


class ConfigError(VllmError, ValueError):
    """The engine cannot start with these settings.

    The message is one line and says how to fix it.
    """


class WeightLoadError(ConfigError):
    """A checkpoint and a model do not match, or a checkpoint file is damaged."""


class RequestError(VllmError, ValueError):
    """One request is wrong; other requests are not affected.

    Attributes:
        status: HTTP status of the response.
        param: the request field at fault, or None.
        code: OpenAI's error code, which programs may check, or None.
    """

    status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""The code of a request that is too long for the model; agents shorten it then."""


class PromptTooLongError(RequestError):
    """The prompt leaves no room for an output token."""

    def __init__(self, num_prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"prompt has {num_prompt_tokens} tokens; this model takes at most "
            f"{max_model_len - 1} (max_model_len={max_model_len}, one is kept for the output)",
            param="prompt",
            code=CONTEXT_LENGTH_EXCEEDED,
        )


class TextTooLongError(PromptTooLongError):
    """A text is certainly too long for a prompt; its exact number of tokens is not known."""

    def __init__(self, num_bytes: int, max_tokens: int, max_model_len: int) -> None:
        RequestError.__init__(
            self,
            f"This model's maximum context length is {max_model_len} tokens. However, the prompt "
            f"has {num_bytes} bytes, which are more than {max_tokens} tokens, the most it may "
            f"have. Please reduce the length of the prompt.",
            param="prompt",
            code=CONTEXT_LENGTH_EXCEEDED,
        )


class NotFoundError(RequestError):
    """A model, a response or an adapter of this name does not exist."""

    status = 404


class RequestTimeoutError(VllmError, TimeoutError):
    """A request was ended because it took longer than the server allows."""

    status = 504


class CapacityError(VllmError, ValueError):
    """The engine does not have the capacity for a request.

    Attributes:
        status: 400 if it can never fit, 503 if it cannot fit now, 409 for calls that are not
            possible while requests run.
    """

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class EngineAsleepError(CapacityError):
    """A request arrived while the engine was asleep (sleep mode).

    Args:
        tags: the parts that sleep: weights, kv_cache or both.
    """

    def __init__(self, tags: Sequence[str]) -> None:
        super().__init__(
            f"the engine is asleep ({' and '.join(tags)}): call wake_up() of the LLM or the "
            f"engine, or POST /wake_up of the server, before you send requests",
            status=503,
        )


class WorkerCallError(VllmError, RuntimeError):
    """A method of the workers raised an exception; the message has its type and text."""

    status = 500


class CollectiveError(VllmError, RuntimeError):
    """A communication with the other ranks has failed; the state of the worker is then unknown.

    Args:
        operation: operation that failed, such as all_reduce.
        rank: rank that reports it.
        reason: message of the library, or which rank has not answered.
    """

    def __init__(self, operation: str, rank: int, reason: str) -> None:
        first_line = (reason.strip().splitlines() or ["no reason given"])[0]
        super().__init__(f"{operation} on rank {rank} failed: {first_line}")


class EngineDeadError(VllmError, RuntimeError):
    """The engine core has failed; no request can be served until a restart."""


class EngineStoppedError(EngineDeadError):
    """The engine was shut down on purpose, so the same request may succeed on another server."""
