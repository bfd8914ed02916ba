"""Test the log-probabilities of completions: the texts of the tokens are the parts of the output
text.
"""

import itertools

import pytest

from tests.engine import tokenizers_for_tests
from tests.loops import loop_over
from vllm.entrypoints.openai.shared.logprob_formats import (
    CompletionLogprobs,
    bytes_of_tokens,
)
from vllm.outputs import Logprob

TEXTS = [
    "import os",
    "\u0141\u00f3d\u017a: x",
    "\u65e5\u672c x",
    " two  spaces",
    "a\n\n\U0001f600b",
    "the cat",
]
KINDS = ("byte_level", "sentencepiece")


def positions_of(tokenizer, token_ids):
    return [{i: Logprob(-0.5, 1, tokenizer.decode([i]))} for i in token_ids]


def make(tokenizer, token_ids, num_prompt_tokens, *, step, **fields):
    """Return the joined log-probabilities of pieces with some tokens each; the prompt is one
    piece.
    """
    logprobs = CompletionLogprobs(
        as_token_ids=False,
        text_of=lambda i: tokenizer.decode([i]),
        bytes_of=bytes_of_tokens(tokenizer),
        **fields,
    )
    positions = positions_of(tokenizer, token_ids)
    starts = [0, *range(num_prompt_tokens or step, len(token_ids), step), len(token_ids)]
    tokens, offsets = [], []
    for start, end in itertools.pairwise(starts):
        count = num_prompt_tokens if start == 0 else 0
        made = logprobs.make(token_ids[start:end], positions[start:end], count)
        tokens += made["tokens"]
        offsets += made["text_offset"]
    return tokens, offsets


def check(text, tokens, offsets):
    assert "".join(tokens) == text
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]


@loop_over("kind", KINDS)
@loop_over("text", TEXTS)
@loop_over("step", [1, 3])
def test_the_tokens_of_a_prompt_and_its_output_join_to_the_text(kind, text, step):
    tokenizer = getattr(tokenizers_for_tests, kind)()
    prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    output_ids = tokenizer(" os" + text[-3:], add_special_tokens=False)["input_ids"]
    output = b"".join(map(bytes_of_tokens(tokenizer), output_ids)).decode()
    ids = prompt_ids + output_ids
    tokens, offsets = make(tokenizer, ids, len(prompt_ids), step=step, prompt=text)
    check(text + output, tokens, offsets)
    alone, offsets = make(tokenizer, output_ids, 0, step=step)
    check(output, alone, offsets)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_without_text_show_their_name_and_move_nothing(kind):
    tokenizer = getattr(tokenizers_for_tests, kind)()
    first, last = tokenizer.convert_tokens_to_ids(["<s>", "</s>"])
    ids = [first, *tokenizer("the cat", add_special_tokens=False)["input_ids"], last]
    fields = {"prompt": "the cat", "hidden": {first}, "skipped": {first, last}}
    tokens, offsets = make(tokenizer, ids, len(ids) - 1, step=1, **fields)
    assert (tokens[0], tokens[-1]) == ("<s>", "</s>")
    assert (offsets[0], offsets[-1]) == (0, len("the cat"))
    check("the cat", tokens[1:-1], offsets[1:-1])
