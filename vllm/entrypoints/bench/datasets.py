"""Create the requests of a benchmark: random token ids, or prompts from a file.

random    ids drawn from the vocabulary
random-mm random prompts with random images
sharegpt  JSON: [{"conversations": [{"value": question}, {"value": answer}, ...]}, ...]
jsonl     one object per line: {"prompt": text or ids, "output_len": 128}; output_len is optional
text      one prompt per line
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vllm.entrypoints.bench.backends import BenchRequest
from vllm.entrypoints.bench.dataset_args import DatasetArgs
from vllm.entrypoints.bench.random_images import RandomImages
from vllm.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DEFAULT_OUTPUT_LEN = 128
_MAX_ATTEMPTS = 8
_NUM_WORDS = 512


# ---- random -------------------------------------------------------------------------------


def random_lengths(args: DatasetArgs, rng: random.Random) -> list[tuple[int, int]]:
    """Draw the numbers of prompt tokens (without the prefix) and output tokens of each request."""

    def draw(mean: int) -> int:
        low, high = round(mean * (1 - args.range_ratio)), round(mean * (1 + args.range_ratio))
        return rng.randint(max(1, low), max(1, high))

    output_len = args.output_len or _DEFAULT_OUTPUT_LEN
    return [(draw(args.input_len), draw(output_len)) for _ in range(args.num_prompts)]


def random_requests(args: DatasetArgs, token_ids: Sequence[int]) -> list[BenchRequest]:
    """Create requests with prompts of ids drawn evenly from `token_ids`."""
    rng = random.Random(args.seed)
    prefix = rng.choices(token_ids, k=args.prefix_len)
    return [
        BenchRequest(
            prefix + rng.choices(token_ids, k=num_input), num_output, num_input + len(prefix)
        )
        for num_input, num_output in random_lengths(args, rng)
    ]


def random_texts(args: DatasetArgs, tokenizer: "PreTrainedTokenizerBase") -> list[BenchRequest]:
    """Create requests with text prompts: words drawn from the vocabulary, with the wanted number of
    tokens.

    Some tokenizers do not return the same tokens for the text; the count is then approximate.
    """
    rng = random.Random(args.seed)
    words = _words(tokenizer, rng)
    prefix = rng.choices(words, k=args.prefix_len)
    requests = []
    for num_input, num_output in random_lengths(args, rng):
        ids = prefix + rng.choices(words, k=num_input)
        text, count = _text_of(ids, words, tokenizer, rng)
        requests.append(BenchRequest(text, num_output, count))
    return requests


def with_images(args: DatasetArgs, requests: list[BenchRequest]) -> list[BenchRequest]:
    """Add random images to the requests, if the dataset has images.

    Raises:
        ConfigError: Pillow is not installed.
    """
    if args.images is None:
        return requests
    images = RandomImages(args.images, args.seed)
    return [replace(request, images=images.draw()) for request in requests]


def ordinary_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return all token ids except the special ones."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return [token_id for token_id in range(len(tokenizer)) if token_id not in special]


def _words(tokenizer: "PreTrainedTokenizerBase", rng: random.Random) -> list[int]:
    """Return tokens that remain the same when they are decoded and encoded again."""
    ids = ordinary_ids(tokenizer)
    rng.shuffle(ids)
    words: list[int] = []
    for token_id in ids:
        text = cast(str, tokenizer.decode([token_id]))
        if text[:1] == " " and text[1:].isalpha() and _encode(tokenizer, text) == [token_id]:
            words.append(token_id)
            if len(words) == _NUM_WORDS:
                break
    return words if len(words) >= 16 else ids


def _text_of(
    ids: list[int], words: list[int], tokenizer: "PreTrainedTokenizerBase", rng: random.Random
) -> tuple[str, int]:
    """Return a text for about these ids, and its number of tokens."""
    wanted = len(ids)
    for _ in range(_MAX_ATTEMPTS):
        text = cast(str, tokenizer.decode(ids))
        found = _encode(tokenizer, text)
        if len(found) == wanted:
            break
        ids = found[:wanted] + rng.choices(words, k=max(0, wanted - len(found)))
    return text, len(found)


def _encode(
    tokenizer: "PreTrainedTokenizerBase", text: str, *, is_prompt: bool = False
) -> list[int]:
    """Return the token ids of a text. A prompt begins with the special tokens that the server
    adds.
    """
    return tokenizer(text, add_special_tokens=is_prompt, verbose=False)["input_ids"]


# ---- files --------------------------------------------------------------------------------


def file_requests(
    args: DatasetArgs, tokenizer: "PreTrainedTokenizerBase | None", max_model_len: int | None = None
) -> list[BenchRequest]:
    """Read the requests of a file, in a random order that depends on the seed. They are repeated if
    the file has too few.

    Args:
        args: settings with the path of the file.
        tokenizer: counts tokens; None: tokens are not counted, and answers of sharegpt have 128.
        max_model_len: longer requests are left out, if their tokens are known.

    Raises:
        ConfigError: the file cannot be read, or contains nothing usable.
    """
    assert args.path is not None
    readers = {"sharegpt": _read_sharegpt, "jsonl": _read_jsonl, "text": _read_lines}
    items = list(readers[args.name](args.path, _read_text(args.path)))
    random.Random(args.seed).shuffle(items)
    requests: list[BenchRequest] = []
    for prompt, output in items:
        request = _file_request(prompt, output, args, tokenizer)
        total = (request.num_prompt_tokens or 1) + request.max_tokens
        if max_model_len is None or total <= max_model_len:
            requests.append(request)
        if len(requests) == args.num_prompts:
            break
    if not requests:
        raise ConfigError(
            f"none of the {len(items)} requests in {args.path!r} (read as {args.name}) fits into "
            "the context length of the model"
            if items
            else f"{args.path!r} contains no prompt in the format {args.name}"
        )
    return [requests[i % len(requests)] for i in range(args.num_prompts)]


def _file_request(
    prompt: str | list[int],
    output: str | int | None,
    args: DatasetArgs,
    tokenizer: "PreTrainedTokenizerBase | None",
) -> BenchRequest:
    num_prompt = len(prompt) if isinstance(prompt, list) else None
    if num_prompt is None and tokenizer is not None:
        num_prompt = len(_encode(tokenizer, cast(str, prompt), is_prompt=True))
    num_output = output if isinstance(output, int) else None
    if isinstance(output, str) and tokenizer is not None:
        num_output = len(_encode(tokenizer, output))
    return BenchRequest(prompt, args.output_len or num_output or _DEFAULT_OUTPUT_LEN, num_prompt)


_Item = tuple[str | list[int], str | int | None]
"""A prompt, and the answer or its length, where there is one."""


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the dataset {path!r}: {error}") from None


def _read_sharegpt(path: str, text: str) -> Iterator[_Item]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"dataset {path!r} is not JSON: {error}") from None
    for entry in data if isinstance(data, list) else ():
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list) or len(turns) < 2:
            continue
        question, answer = (t.get("value") if isinstance(t, dict) else None for t in turns[:2])
        if isinstance(question, str) and isinstance(answer, str) and question and answer:
            yield question, answer


def _read_jsonl(path: str, text: str) -> Iterator[_Item]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"dataset {path!r}, line {number}: not JSON: {error}") from None
        entry = entry if isinstance(entry, dict) else {}
        prompt = entry.get("prompt", entry.get("prompt_token_ids"))
        output = entry.get("output_len", entry.get("max_tokens"))
        is_ids = isinstance(prompt, list) and all(type(token_id) is int for token_id in prompt)
        if not prompt or not (isinstance(prompt, str) or is_ids):
            raise ConfigError(
                f"dataset {path!r}, line {number}: 'prompt' must be a string or a list of token ids"
            )
        if output is not None and (type(output) is not int or output < 1):
            raise ConfigError(
                f"dataset {path!r}, line {number}: 'output_len' must be a number above 0, "
                f"got {output!r}"
            )
        yield prompt, output


def _read_lines(path: str, text: str) -> Iterator[_Item]:
    for line in text.splitlines():
        if line.strip():
            yield line, None
