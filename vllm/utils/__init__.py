"""Provide helpers that do not depend on inference."""

import uuid
from collections.abc import Iterator

from vllm.utils.arguments import FlexibleArgumentParser

__all__ = ["Counter", "FlexibleArgumentParser", "random_uuid"]


class Counter(Iterator[int]):
    """Count 0, 1, 2, ...

    Attributes:
        counter: the number that `next` returns.
    """

    def __init__(self, start: int = 0) -> None:
        self.counter = start

    def __next__(self) -> int:
        number = self.counter
        self.counter += 1
        return number

    def reset(self) -> None:
        """Restart the count at 0."""
        self.counter = 0


def random_uuid() -> str:
    """Return 32 hexadecimal digits that contain 122 random bits."""
    return uuid.uuid4().hex
