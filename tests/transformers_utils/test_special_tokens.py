"""Test that every kind of tokenizer gives the same special tokens to all parts that ask for
them.
"""

import copy

import pytest
from tokenizers import AddedToken

from tests.engine import tokenizers_for_tests as tokenizers
from vllm.engine.output.detokenizer import DetokenizerFactory
from vllm.structured_output.backends.vocabulary import Vocabulary
from vllm.transformers_utils.special_tokens import SpecialTokens

FLAGGED = AddedToken("<TOOL_CALLS>", special=True, normalized=False)
PLAIN = AddedToken("<tool_call>", special=False, normalized=False)


def with_markers(make):
    """Return a tokenizer with three added tokens: one is special only by its flag, one by its name,
    and one is plain.
    """
    tokenizer = copy.deepcopy(make())
    tokenizer.add_tokens([FLAGGED, PLAIN])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    ids = tokenizer.convert_tokens_to_ids([FLAGGED.content, PLAIN.content, "<|end|>"])
    return tokenizer, ids


KINDS = [
    tokenizers.byte_level,
    tokenizers.sentencepiece,
    tokenizers.metaspace,
    tokenizers.python_bytes,
]


@pytest.mark.parametrize("make", KINDS)
def test_flagged_and_named_tokens_are_special_and_no_others(make):
    tokenizer, (flagged, plain, named) = with_markers(make)
    special = SpecialTokens.of(tokenizer)
    assert special is SpecialTokens.of(tokenizer)
    assert special.texts[flagged] == "<TOOL_CALLS>" and special.texts[named] == "<|end|>"
    assert plain not in special.ids
    assert set(tokenizer.all_special_ids) <= special.ids
    assert special.eos_token_id == tokenizer.eos_token_id
    assert special.parts_of(["<TOOL_CALLS>", "<tool_call>"]) == {flagged: "<TOOL_CALLS>"}


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(
    ("skips", "keeps", "shown"),
    [
        (True, (), "<tool_call>"),
        (True, (0,), "<TOOL_CALLS><tool_call>"),
        (True, (0, 2), "<TOOL_CALLS><tool_call><|end|>"),
        (False, (), "<TOOL_CALLS><tool_call><|end|>"),
    ],
)
def test_a_text_has_the_special_tokens_that_are_kept(make, skips, keeps, shown):
    tokenizer, ids = with_markers(make)
    detokenizer = DetokenizerFactory(tokenizer).create(
        None,
        skip_special_tokens=skips,
        kept_special_token_ids=[ids[i] for i in keeps],
    )
    text = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.flush()
    assert text.replace(" ", "") == shown


def test_a_named_token_has_no_text_in_a_grammar_even_without_the_flag():
    tokenizer, (flagged, plain, named) = with_markers(tokenizers.byte_level)
    tokenizer.eos_token = "<tool_call>"
    vocabulary = Vocabulary.of(tokenizer, len(tokenizer))
    texts = [bool(vocabulary.tokens[token_id]) for token_id in (flagged, plain, named)]
    assert texts == [False, False, False]


def test_without_a_tokenizer_nothing_is_special():
    assert SpecialTokens.of(None).ids == frozenset()
