"""The bytes of every token, and masks over them."""

import numpy as np
import pytest

from tests.engine import tokenizers_for_tests as tokenizers
from tests.structured_output.helpers import allowed
from vllm.errors import RequestError
from vllm.structured_output.vocabulary import Vocabulary, pack_tokens


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


def test_another_process_gets_the_same_vocabulary():
    vocabulary = Vocabulary([b"a", b"", b"\xff"])
    copy = Vocabulary.decode(vocabulary.encoded)
    assert (copy.tokens, copy.key) == (vocabulary.tokens, vocabulary.key)
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
