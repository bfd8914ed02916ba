"""Numbers and names for things that must be told apart."""

import uuid
from collections.abc import Iterator


class Counter(Iterator[int]):
    """Whole numbers, one after the other.

    Attributes:
        counter: the number that `next` gives.
    """

    def __init__(self, start: int = 0) -> None:
        self.counter = start

    def __next__(self) -> int:
        number = self.counter
        self.counter += 1
        return number

    def reset(self) -> None:
        """Begin again with 0."""
        self.counter = 0


def random_uuid() -> str:
    """32 hexadecimal digits, made of 122 random bits."""
    return uuid.uuid4().hex
