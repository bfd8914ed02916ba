"""Test the lower bound on the number of tokens of a text: it never exceeds the true number."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.engine.tokenizers_for_tests import byte_level, metaspace, python_bytes, sentencepiece
from vllm.transformers_utils.token_bytes import TextLengthBound

# Three characters with nine bytes; NFC makes one syllable of three bytes from them.
JAMO = "\u1112\u1161\u11ab"
PARTS = ["the cat ", " " * 300, "import os\n", "é", "e\u0301", JAMO * 40, "\U0001f600", "\x00"]


def byte_level_with(normalizer=None, pre_tokenizer=None) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE that has all bytes, series of spaces, and syllables."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ["the cat sat on the mat" + " " * 64, "\ud55c" * 64] * 20
    backend.train_from_iterator(corpus, trainer)
    backend.decoder = byte_level().backend_tokenizer.decoder
    backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def word_piece() -> PreTrainedTokenizerFast:
    """Return a WordPiece tokenizer in which one unknown token represents any word."""
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


BOUNDED = [
    byte_level,
    sentencepiece,
    byte_level_with,
    lambda: byte_level_with(normalizers.NFC()),
    lambda: byte_level_with(normalizers.Sequence([normalizers.NFC()])),
]


@pytest.mark.parametrize("make", BOUNDED)
def test_a_text_never_has_fewer_tokens_than_said(make):
    tokenizer = make()
    bound = TextLengthBound(tokenizer)
    assert bound.max_bytes is not None
    dice = random.Random(0)
    texts = ["".join(dice.choices(PARTS, k=dice.randrange(1, 30))) for _ in range(100)]
    for text in [*texts, *(part * 500 for part in PARTS)]:
        least = bound.min_tokens(text, len(text.encode()))
        assert least <= len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert bound.min_tokens("x" * 10**6, 10**6) > 5000


@pytest.mark.parametrize(
    "make",
    [
        metaspace,
        python_bytes,
        word_piece,
        lambda: byte_level_with(normalizers.NFKC()),
        lambda: byte_level_with(normalizers.Strip()),
        lambda: byte_level_with(normalizers.Replace("x", "")),
        lambda: byte_level_with(pre_tokenizer=pre_tokenizers.Whitespace()),
        lambda: byte_level_with(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
    ],
)
def test_a_tokenizer_that_drops_or_joins_text_has_no_bound(make):
    assert TextLengthBound(make()).min_tokens("x" * 10**6, 10**6) == 0


def test_a_token_that_takes_the_space_beside_it_away_ends_the_bound():
    tokenizer = byte_level_with()
    tokenizer.backend_tokenizer.add_tokens([AddedToken("<end>", rstrip=True)])
    bound, space = TextLengthBound(tokenizer), " " * 10**5
    assert bound.min_tokens(space, 10**5) > 100
    assert bound.min_tokens("<end>" + space, 10**5 + 5) == 0
    assert len(tokenizer("<end>" + space)["input_ids"]) == 1
