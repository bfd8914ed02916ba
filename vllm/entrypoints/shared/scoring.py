"""Pair texts, and score pairs by their embeddings."""

from collections.abc import Sequence

import numpy as np

from vllm.errors import RequestError
from vllm.messages import FloatArray


def pair_up(
    text_1: str | Sequence[str], text_2: str | Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return pairs of texts, as two lists of the same length.

    Raises:
        RequestError: there are no texts, or `text_1` has neither one text nor as many as `text_2`.
    """
    first = [text_1] if isinstance(text_1, str) else list(text_1)
    second = [text_2] if isinstance(text_2, str) else list(text_2)
    for name, texts in (("text_1", first), ("text_2", second)):
        if not texts:
            raise RequestError(f"{name} must have at least one string, got none", param=name)
        if not all(isinstance(text, str) for text in texts):
            raise RequestError(f"{name} must be a string or a list of strings", param=name)
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise RequestError(
            f"text_1 must have one string, or as many as text_2 ({len(second)}), got {len(first)}",
            param="text_1",
        )
    return first, second


def cosine(left: FloatArray, right: FloatArray) -> float:
    """Return the cosine of the angle between two vectors; 0 if one of them is zero."""
    lengths = float(np.linalg.norm(left)) * float(np.linalg.norm(right))
    return float(left @ right) / lengths if lengths else 0.0
