"""What the engines answer to requests about LoRA adapters, which are not available yet."""

from typing import NoReturn

from vllm.errors import RequestError


def refuse_lora(param: str) -> NoReturn:
    """Say that there are no adapters.

    Args:
        param: the argument that asks for one.

    Raises:
        RequestError: always.
    """
    raise RequestError(
        f"{param}: LoRA is not enabled in this engine, as this version has no adapters yet",
        param=param,
    )
