"""Parameters of a request to a pooling model, checked when they are created. Independent of torch
and the engine."""

from typing import Any

import msgspec

from vllm.errors import RequestError

MAX_DIMENSIONS = 2**20
"""More than any model has. The limit of the model is checked with the request."""


class PoolingParams(msgspec.Struct, omit_defaults=True):
    """Parameters of one request to a pooling model.

    Raises:
        RequestError: (a ValueError) a value is out of range.
    """

    dimensions: int | None = None
    """Number of elements of the embedding to keep, for models that were trained for it
    (Matryoshka). None: all of them."""
    additional_data: Any = None
    """Accepted for the API; no model here reads it, and it is not sent to the engine."""
    truncate_prompt_tokens: int | None = None
    """Truncate longer prompts to this many tokens; -1: to max_model_len. None: refuse them."""

    def __post_init__(self) -> None:
        self._check("dimensions", 1, MAX_DIMENSIONS)
        self._check("truncate_prompt_tokens", -1, 2**31 - 1)
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens must be -1 or at least 1, got 0",
                param="truncate_prompt_tokens",
            )

    def _check(self, name: str, smallest: int, largest: int) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if type(value) is not int or not smallest <= value <= largest:
            raise RequestError(
                f"{name} must be an integer from {smallest} to {largest}, got {value!r}", param=name
            )

    def clone(self) -> "PoolingParams":
        """Return an independent copy."""
        return msgspec.structs.replace(self)
