"""Test that text made token by token equals text made at once, for every kind of tokenizer."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tokenizers_for_tests import byte_level, metaspace, python_bytes, sentencepiece
from vllm.engine.output.detokenizer import (
    ByteDetokenizer,
    DetokenizerFactory,
    WindowDetokenizer,
)

TOKENIZERS = [byte_level, sentencepiece, metaspace, python_bytes]
UNKNOWN = "\ufffd"

every_tokenizer = pytest.mark.parametrize("make", TOKENIZERS)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def encode(tokenizer, prompt):
    return tokenizer(prompt, add_special_tokens=False)["input_ids"]


def stream(tokenizer, token_ids, prompt=(), **options):
    """Return the text that is shown after each token, and at the end."""
    detokenizer = DetokenizerFactory(tokenizer).create(prompt, **options)
    return [detokenizer.push([token_id]) for token_id in token_ids] + [detokenizer.flush()]


@every_tokenizer
@given(text=text)
@settings(max_examples=150, deadline=None)
def test_any_text_comes_out_as_decoding_it_at_once(make, text):
    tokenizer = make()
    token_ids = encode(tokenizer, text)
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert "".join(stream(tokenizer, token_ids)) == whole


@pytest.mark.parametrize("make", [byte_level, metaspace, python_bytes])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_tokens_come_out_as_decoding_them_at_once(make, data):
    tokenizer = make()
    token_ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    skips = data.draw(st.booleans())
    whole = tokenizer.decode(token_ids, skip_special_tokens=skips)
    assert "".join(stream(tokenizer, token_ids, skip_special_tokens=skips)) == whole


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_byte_runs_cut_off_by_other_tokens_or_the_end_show_one_mark_per_byte(data):
    tokenizer = sentencepiece()
    first_byte = tokenizer.convert_tokens_to_ids("<0x00>")
    pieces = st.integers(first_byte + 256, len(tokenizer) - 1)
    cut = st.sampled_from(["é", "日", "🙂"]).map(
        lambda c: [b + first_byte for b in c.encode()[:-1]]
    )
    runs = st.tuples(cut, pieces).map(lambda run: [*run[0], run[1]])
    groups = data.draw(st.lists(pieces.map(lambda piece: [piece]) | runs))
    token_ids = [token_id for group in groups for token_id in group]
    token_ids += data.draw(st.just([]) | cut)
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_characters_that_were_shown_stay_when_their_byte_run_turns_out_invalid():
    tokenizer = sentencepiece()
    first_byte = tokenizer.convert_tokens_to_ids("<0x00>")
    token_ids = [first_byte + byte for byte in "日".encode() + b"\xff"]
    assert stream(tokenizer, token_ids) == ["", "", "日", UNKNOWN, ""]


@every_tokenizer
@given(text=text.filter(lambda text: UNKNOWN not in text))
@settings(max_examples=100, deadline=None)
def test_half_a_character_is_never_shown(make, text):
    tokenizer = make()
    assert not any(UNKNOWN in shown for shown in stream(tokenizer, encode(tokenizer, text)))


@every_tokenizer
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_how_tokens_are_grouped_does_not_matter(make, data):
    tokenizer = make()
    token_ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=20))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=5)))
    detokenizer = DetokenizerFactory(tokenizer).create([])
    groups = zip([0, *cuts], [*cuts, len(token_ids)], strict=True)
    grouped = [detokenizer.push(token_ids[start:end]) for start, end in groups]
    assert "".join(grouped) + detokenizer.flush() == "".join(stream(tokenizer, token_ids))


@pytest.mark.parametrize("make", [sentencepiece, metaspace])
@pytest.mark.parametrize("prompt", ["", "the", "the cat sat on the mat and the hat was red"])
def test_output_joins_the_prompt_with_the_space_that_decoding_both_shows(make, prompt):
    tokenizer = make()
    prompt_ids = [1, *encode(tokenizer, prompt)]
    token_ids = encode(tokenizer, "hat on a mat")
    before = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    both = tokenizer.decode(prompt_ids + token_ids, skip_special_tokens=True)
    assert before + "".join(stream(tokenizer, token_ids, prompt_ids)) == both


def test_output_that_follows_an_unknown_prompt_keeps_its_first_space():
    tokenizer = sentencepiece()
    token_ids = encode(tokenizer, "hat on a mat")
    assert DetokenizerFactory(tokenizer).create([]).push(token_ids).startswith("hat")
    assert DetokenizerFactory(tokenizer).create(None).push(token_ids).startswith(" hat")


@every_tokenizer
def test_an_incomplete_character_at_the_end_reads_as_decode_shows_it(make):
    tokenizer = make()
    token_ids = encode(tokenizer, "a🙂")[:-1]
    *shown, flushed = stream(tokenizer, token_ids)
    assert "".join(shown) + flushed == tokenizer.decode(token_ids)
    assert UNKNOWN not in "".join(shown)


@every_tokenizer
def test_ids_beyond_the_tokenizer_have_no_text(make):
    tokenizer = make()
    token_ids = encode(tokenizer, "the mat")
    padded = [t for token_id in token_ids for t in (len(tokenizer) + 5, token_id, 10**7)]
    assert "".join(stream(tokenizer, padded)) == "".join(stream(tokenizer, token_ids))
    assert DetokenizerFactory(tokenizer).text_of(10**7) == ""


@every_tokenizer
def test_special_tokens_are_shown_only_when_asked_for(make):
    tokenizer = make()
    token_ids = [*encode(tokenizer, "mat"), tokenizer.eos_token_id]
    assert "".join(stream(tokenizer, token_ids)) == "mat"
    assert "".join(stream(tokenizer, token_ids, skip_special_tokens=False)) == "mat</s>"


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_added_tokens_read_as_they_are_written(make):
    tokenizer = copy.deepcopy(make())
    tokenizer.add_tokens(["<\uff5cuser\uff5c>", "<a b>"])
    token_ids = encode(tokenizer, "the <\uff5cuser\uff5c> mat <a b>")
    assert token_ids[-1] == len(tokenizer) - 1
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_common_tokenizers_take_the_fast_way_and_others_the_general_one(make):
    assert isinstance(DetokenizerFactory(make()).create([]), ByteDetokenizer)
    assert isinstance(DetokenizerFactory(metaspace()).create([]), WindowDetokenizer)
    assert isinstance(DetokenizerFactory(python_bytes()).create([]), WindowDetokenizer)


def test_text_of_one_token_keeps_its_space_and_marks_part_of_a_character():
    tokenizer = byte_level()
    factory = DetokenizerFactory(tokenizer)
    (token_id,) = encode(tokenizer, " the")
    assert factory.text_of(token_id) == " the"
    assert factory.text_of(encode(tokenizer, "🙂")[0]) == UNKNOWN
    assert factory.text_of(tokenizer.eos_token_id) == "</s>"


def test_a_decoder_with_one_mark_per_byte_shows_no_half_character_either():
    def decode(token_ids):
        try:
            return bytes(token_ids).decode()
        except UnicodeDecodeError as error:
            good = bytes(token_ids[: error.start]).decode()
            return good + UNKNOWN * (len(token_ids) - error.start)

    detokenizer = WindowDetokenizer(decode, range(256), prompt_token_ids=[])
    assert [detokenizer.push([byte]) for byte in "🙂".encode()] == ["", "", "", "🙂"]


def test_work_per_token_does_not_grow_even_when_nothing_is_valid():
    lengths = []

    def decode(token_ids):
        lengths.append(len(token_ids))
        return bytes(token_ids).decode(errors="replace")

    detokenizer = WindowDetokenizer(decode, range(256), prompt_token_ids=[])
    shown = "".join(detokenizer.push([0xFF]) for _ in range(300)) + detokenizer.flush()
    assert shown == UNKNOWN * 300
    assert max(lengths) < 20
