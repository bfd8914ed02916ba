"""Arguments of the public methods that ask for what this version does not have."""

from collections.abc import Callable, Sequence
from typing import Any

from vllm.errors import RequestError


def refuse(**given: Any) -> None:
    """Do nothing when every argument is None, or a list of None.

    Args:
        given: arguments as the caller got them, by name; every one of them has a row below.

    Raises:
        RequestError: one is given; says what this version does, and what to do.
    """
    for name, value in given.items():
        values = value if isinstance(value, Sequence) else [value]
        if (asked := next((each for each in values if each is not None), None)) is not None:
            raise RequestError(f"{name}{_REASONS[name](asked)}", param=name)


def _lora(adapter: Any) -> str:
    named = getattr(adapter, "lora_name", None)
    which = "" if named is None else f" {named!r}"
    return (
        f"{which}: this version runs no LoRA adapters. Merge the adapter into the weights of its "
        f"model (merge_and_unload of peft), load the merged model, and leave lora_request out"
    )


_REASONS: dict[str, Callable[[Any], str]] = {
    "lora_request": _lora,
    "prompt_adapter_request": lambda _: ": this version runs no prompt adapters. Leave it out",
    "mm_processor_kwargs": lambda _: ": this version reads text only. Leave it out",
    "data_parallel_rank": lambda rank: (
        f"={rank}: this version runs one engine, which has rank 0. Leave it out"
    ),
}
