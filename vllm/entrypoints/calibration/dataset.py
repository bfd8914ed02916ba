"""Split the texts of a calibration into samples of tokens."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm.errors import ConfigError

_KEYS = ("text", "prompt", "question", "content")
"""Keys for the text of an object; the first of these that it has."""

_SEED = 42
_SHARE_HELD_OUT = 0.2
_MIN_TOKENS = 2
"""Minimum number of tokens of a sample: the first token of a text has no probability."""


def read_texts(path: str) -> list[str]:
    """Read the texts of a file: .jsonl (an object or a string per line), .json (a list of them), or
    plain text.

    Raises:
        ConfigError: the file cannot be read, or has no text.
    """
    if path.endswith((".pkl", ".pickle")):
        raise ConfigError(
            f"--dataset {path}: pickle files are not read, because they can run code. Write the "
            f"texts "
            'to a .jsonl file with lines such as {"text": "..."}'
        )
    try:
        content = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset {path}: cannot be read: {error}") from None
    texts = [text for text in _texts(path, content) if text.strip()]
    if not texts:
        raise ConfigError(f"--dataset {path}: the file contains no text")
    return texts


def _texts(path: str, content: str) -> list[str]:
    if path.endswith(".jsonl"):
        lines = content.splitlines()
        entries = [
            (f"line {n}", _parsed(f"{path}: line {n}", line))
            for n, line in enumerate(lines, start=1)
            if line.strip()
        ]
    elif path.endswith(".json"):
        parsed = _parsed(path, content)
        if not isinstance(parsed, list):
            raise ConfigError(f"--dataset {path}: it must be a list of strings")
        entries = [(f"entry {n}", entry) for n, entry in enumerate(parsed, start=1)]
    else:
        return [content]
    return [_text_of(f"{path}: {place}", entry) for place, entry in entries]


def _parsed(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--dataset {place} is not valid JSON: {error}") from None


def _text_of(place: str, entry: Any) -> str:
    if isinstance(entry, dict):
        entry = next((entry[key] for key in _KEYS if key in entry), None)
    if not isinstance(entry, str):
        raise ConfigError(
            f"--dataset {place} must be a string, or an object with one of {', '.join(_KEYS)}"
        )
    return entry


def split_samples(
    texts: Sequence[str], encode: Callable[[str], list[int]], sample_tokens: int, num_samples: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Split texts into samples of at most `sample_tokens` tokens.

    The split depends only on the texts. If there is only one sample, it is in both lists.

    Returns:
        (samples to measure, held-out samples).

    Raises:
        ConfigError: the texts are too short.
    """
    samples = []
    for text in texts:
        tokens = encode(text)
        for start in range(0, len(tokens), sample_tokens):
            sample = tokens[start : start + sample_tokens]
            if len(sample) >= _MIN_TOKENS:
                samples.append(sample)
    if not samples:
        raise ConfigError("--dataset must have at least one text of two or more tokens")
    random.Random(_SEED).shuffle(samples)
    num_held_out = max(1, round(_SHARE_HELD_OUT * min(num_samples, len(samples))))
    if len(samples) == 1:
        return samples, samples
    measured = samples[num_held_out : num_held_out + num_samples]
    return measured, samples[:num_held_out]


def write_samples(path: Path, samples: Sequence[Sequence[int]]) -> None:
    """Write one sample of token ids per line."""
    lines = (json.dumps({"prompt_token_ids": list(sample)}) + "\n" for sample in samples)
    path.write_text("".join(lines), encoding="utf-8")


def read_samples(path: Path) -> list[list[int]]:
    """Read the samples that `write_samples` wrote.

    Raises:
        ConfigError: the file does not exist, or was changed.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        samples = [json.loads(line)["prompt_token_ids"] for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}); run `vllm calibrate --step prepare` again"
        ) from None
    if not all(
        isinstance(sample, list) and sample and all(type(token) is int for token in sample)
        for sample in samples
    ):
        raise ConfigError(f"{path} is damaged; run `vllm calibrate --step prepare` again")
    return samples
