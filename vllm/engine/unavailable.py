"""Refuse arguments of the public methods for features that this version does not have."""

from collections.abc import Callable
from typing import Any

from vllm.errors import RequestError


def refuse(**given: Any) -> None:
    """Raise an error if any argument is given; None, or a list of None, counts as not given.

    Args:
        given: arguments by name; each name has an entry in `_REASONS`.

    Raises:
        RequestError: an argument is given; the message says what to do.
    """
    for name, value in given.items():
        values = value if isinstance(value, list | tuple) else [value]
        if (asked := next((each for each in values if each is not None), None)) is not None:
            raise RequestError(f"{name}{_REASONS[name](asked)}", param=name)


_NO_LORA = (
    "LoRA adapters are not supported by this method. Merge the adapter into the "
    "weights of its model (merge_and_unload of peft) and load the merged model"
)


def _lora(adapter: Any) -> str:
    named = getattr(adapter, "lora_name", None)
    which = "" if named is None else f" {named!r}"
    return f"{which}: {_NO_LORA}, and leave lora_request out"


_REASONS: dict[str, Callable[[Any], str]] = {
    "lora_request": _lora,
    "prompt_adapter_request": lambda _: ": prompt adapters are not supported. Leave it out",
}
