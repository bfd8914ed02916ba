"""Provide objects that older releases of vLLM have in an engine, for programs that read them."""

from typing import TYPE_CHECKING, Any, NoReturn, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INSTEAD = (
    "this engine has no {name}: its model runs in workers, which may be other processes. To use "
    "the modules of the model, call LLM.apply_model(function); to call a worker, "
    "LLM.collective_rpc(method)"
)


class _Engine(Protocol):
    """The methods of `LLMEngine` that these objects call."""

    def get_tokenizer(self) -> "PreTrainedTokenizerBase": ...

    def set_tokenizer(self, tokenizer: "PreTrainedTokenizerBase") -> None: ...

    def shutdown(self) -> None: ...

    def collective_rpc(self, *args: Any, **kwargs: Any) -> list[Any]: ...


class TokenizerGroup:
    """The tokenizer of an engine, as `tokenizer` of this object. It also has all attributes of the
    tokenizer itself.

    Args:
        engine: the engine; its tokenizer may be replaced later.
    """

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer. Setting it is the same as `LLMEngine.set_tokenizer`."""
        return self._engine.get_tokenizer()

    @tokenizer.setter
    def tokenizer(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._engine.set_tokenizer(tokenizer)

    def get_lora_tokenizer(self, lora_request: Any = None) -> "PreTrainedTokenizerBase":
        """Return the tokenizer, which is the same for every adapter."""
        return self.tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Tokenise with the tokenizer."""
        return self.tokenizer(*args, **kwargs)

    def __len__(self) -> int:
        return len(self.tokenizer)


class ModelExecutor:
    """The attribute `model_executor` of an engine, which programs delete or shut down.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine

    def shutdown(self) -> None:
        """Shut the engine down."""
        self._engine.shutdown()

    def collective_rpc(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every worker; see `LLMEngine.collective_rpc`."""
        return self._engine.collective_rpc(*args, **kwargs)

    @property
    def driver_worker(self) -> NoReturn:
        """Raise an error that names what to use; deleting it shuts the engine down."""
        raise AttributeError(_INSTEAD.format(name="model_executor.driver_worker"))

    @driver_worker.deleter
    def driver_worker(self) -> None:
        self._engine.shutdown()
