"""Test the bytes of every token, and masks over tokens."""

import copy

import numpy as np
import pytest
from tokenizers import AddedToken

from tests.engine import tokenizers_for_tests as tokenizers
from tests.structured_output.helpers import allowed
from vllm.errors import RequestError
from vllm.structured_output.backends.vocabulary import Vocabulary, pack_tokens


@pytest.mark.parametrize("make", [tokenizers.byte_level, tokenizers.sentencepiece])
def test_tokens_are_the_bytes_they_are_decoded_to(make):
    tokenizer = make()
    vocabulary = Vocabulary.of(tokenizer, len(tokenizer) + 40)
    text = "import os\nthe hat é😀"
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(vocabulary.tokens[t] for t in token_ids).decode().strip() == text
    assert all(not vocabulary.tokens[t] for t in tokenizer.all_special_ids)
    assert vocabulary.tokens[len(tokenizer) :] == [b""] * 40
    text_ids = allowed(vocabulary.text_mask)
    assert text_ids == [t for t, token in enumerate(vocabulary.tokens) if token]


def normalized():
    """Return a tokenizer with a token that its normalizer changes."""
    tokenizer = copy.deepcopy(tokenizers.sentencepiece())
    tokenizer.add_tokens(["<think>"])
    return tokenizer


@pytest.mark.parametrize("make", [tokenizers.byte_level, tokenizers.sentencepiece])
def test_the_file_of_a_tokenizer_has_the_same_vocabulary(make, tmp_path):
    tokenizer = copy.deepcopy(make())
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", " two")])
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(tmp_path)
    size = len(tokenizer) + 40
    read = Vocabulary.of_file(tmp_path / "tokenizer.json", size)
    assert read.key == Vocabulary.of(tokenizer, size).key
    assert Vocabulary.of_file(tmp_path / "tokenizer.json", 100).tokens == read.tokens[:100]


@pytest.mark.parametrize(
    "content", [None, "", "[]", '{"model": {"vocab": {}}}', tokenizers.metaspace, normalized]
)
def test_a_file_that_does_not_say_the_bytes_has_no_vocabulary(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        content().save_pretrained(tmp_path)
    assert Vocabulary.of_file(path, 100) is None


def test_another_process_gets_the_same_vocabulary():
    vocabulary = Vocabulary([b"a", b"", b"\xff"])
    same = Vocabulary.decode(vocabulary.encoded)
    assert (same.tokens, same.key) == (vocabulary.tokens, vocabulary.key)
    assert Vocabulary([b"a", b"\xff", b""]).key != vocabulary.key


@pytest.mark.parametrize("make", [tokenizers.metaspace, tokenizers.python_bytes, lambda: None])
def test_a_tokenizer_whose_text_is_not_its_bytes_is_refused(make):
    with pytest.raises(RequestError, match="needs a tokenizer whose text is the bytes"):
        Vocabulary.of(make(), 100)


@pytest.mark.parametrize("token_ids", [[], [0], [31, 32, 63], [5, 64, 200]])
def test_a_mask_has_the_tokens_that_fit(token_ids):
    mask = pack_tokens(np.array(token_ids, np.int64), 2)
    assert mask.shape == (2,)
    assert allowed(mask) == [t for t in token_ids if t < 64]
