"""Test prompts, languages and time stamps of Whisper, against transformers if it has them."""

import random

import pytest
import torch
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

from tests.loops import loop_over
from vllm.errors import ConfigError, RequestError
from vllm.multimodal.families.whisper import WhisperSpeech
from vllm.multimodal.interface.languages import LANGUAGE_NAMES, find_language

END, START, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMES = range(100, 109)
FIRST_TIME = NO_TIMES + 1
CONFIG = {"vocab_size": FIRST_TIME + 1501}
GENERATION = {
    "begin_suppress_tokens": [7, END],
    "decoder_start_token_id": START,
    "eos_token_id": END,
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": EN, "<|de|>": DE},
    "max_initial_timestamp_index": 50,
    "no_timestamps_token_id": NO_TIMES,
    "prev_sot_token_id": PREVIOUS,
    "suppress_tokens": [1, 2, NO_SPEECH],
    "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
}
VOCABULARY = {
    "<|endoftext|>": END,
    "<|startoftranscript|>": START,
    "<|en|>": EN,
    "<|de|>": DE,
    "<|translate|>": TRANSLATE,
    "<|transcribe|>": TRANSCRIBE,
    "<|startofprev|>": PREVIOUS,
    "<|notimestamps|>": NO_TIMES,
}


def token_id(text):
    if text not in VOCABULARY:
        raise ConfigError(f"no token {text!r}")
    return VOCABULARY[text]


def make_rules(**changes):
    return WhisperSpeech(CONFIG, {**GENERATION, **changes}, token_id)


RULES = make_rules()
ENGLISH = make_rules(is_multilingual=False, lang_to_id=None, task_to_id=None)


def at(seconds):
    return FIRST_TIME + round(seconds / 0.02)


def test_languages_are_those_of_transformers():
    assert LANGUAGE_NAMES == LANGUAGES
    assert {name: find_language(name.upper()) for name in TO_LANGUAGE_CODE} == TO_LANGUAGE_CODE
    assert find_language(" en ") == "en" and find_language("klingon") is None


def test_prompts_name_language_task_and_time_stamps():
    assert RULES.prompt(language="de") == [START, DE, TRANSCRIBE, NO_TIMES]
    assert RULES.prompt(language="German", task="translate", with_times=True) == [
        START,
        DE,
        TRANSLATE,
    ]
    long = list(range(300))
    prompt = RULES.prompt(language="en", previous=long)
    assert prompt == [PREVIOUS, *long[-223:], START, EN, TRANSCRIBE, NO_TIMES]
    assert RULES.start_prompt() == [START]
    assert RULES.language_tokens() == {EN: "en", DE: "de"}
    assert RULES.no_speech_token == NO_SPEECH


def test_a_model_of_english_needs_no_language():
    assert ENGLISH.languages == ("en",) and not ENGLISH.is_multilingual
    assert ENGLISH.language_tokens() == {}
    assert ENGLISH.prompt(language=None) == [START, NO_TIMES]
    assert ENGLISH.prompt(language="english", with_times=True) == [START]


def test_a_model_of_one_other_language_need_not_be_told():
    rules = make_rules(lang_to_id={"<|xx|>": DE})
    assert rules.languages == ("xx",) and not rules.is_multilingual
    for language in (None, "xx", "XX"):
        assert rules.prompt(language=language) == [START, DE, TRANSCRIBE, NO_TIMES]


@pytest.mark.parametrize(
    ("rules", "asked", "message"),
    [
        (RULES, {"language": None}, "needs the language"),
        (RULES, {"language": "fr"}, "'fr' is not supported by this model; supported: de, en"),
        (RULES, {"language": "klingon"}, "is not supported by this model"),
        (ENGLISH, {"language": "de"}, "supported: en"),
        (ENGLISH, {"language": None, "task": "translate"}, "does not translate"),
    ],
)
def test_a_prompt_that_the_model_cannot_follow_is_refused(rules, asked, message):
    with pytest.raises(RequestError, match=message):
        rules.prompt(**asked)


def test_what_generation_config_lacks_is_in_the_vocabulary():
    config = {**CONFIG, "is_multilingual": True}
    rules = WhisperSpeech(config, {}, token_id)
    assert rules.prompt(language="de", with_times=True) == [START, DE, TRANSCRIBE]
    assert rules.languages == ("de", "en")
    assert WhisperSpeech(CONFIG, {}, token_id).languages == ("en",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"suppress_tokens": 5}, "suppress_tokens is 5; it must be a list"),
        ({"suppress_tokens": [10**6]}, "suppress_tokens is 1000000; it must be a token id below"),
        ({"lang_to_id": [1]}, "lang_to_id is .* an object"),
        ({"lang_to_id": {"<|en|>": -1}}, "lang_to_id is -1"),
        ({"task_to_id": {"transcribe": 1}}, "task_to_id is .* with translate"),
        ({"max_initial_timestamp_index": -1}, "max_initial_timestamp_index is -1"),
        ({"decoder_start_token_id": "x"}, "decoder_start_token_id is 'x'"),
    ],
)
def test_a_damaged_generation_config_is_refused(changes, message):
    with pytest.raises(ConfigError, match=f"generation_config.json: {message}"):
        make_rules(**changes)


def test_segments_lie_between_time_stamps():
    output = [at(0), 1, 2, at(1.5), at(2), 3, at(4), at(4), 5, 6, END]
    first, second, third = RULES.segments(output, 10.0)
    assert (first.start_s, first.end_s, first.token_ids) == (0.0, 1.5, (1, 2))
    assert (second.start_s, second.end_s, second.token_ids) == (2.0, 4.0, (3,))
    assert (third.start_s, third.end_s, third.token_ids) == (4.0, 10.0, (5, 6))
    assert [each.is_finished for each in (first, second, third)] == [True, True, False]
    assert [output[s.first : s.last] for s in (first, second, third)] == [
        [at(0), 1, 2, at(1.5)],
        [at(2), 3, at(4)],
        [at(4), 5, 6],
    ]


def test_text_without_time_stamps_is_one_segment():
    (only,) = RULES.segments([1, 2, END], 7.0)
    assert (only.start_s, only.end_s, only.token_ids) == (0.0, 7.0, (1, 2))
    assert RULES.segments([END], 7.0) == RULES.segments([at(0), at(2)], 7.0) == []


@loop_over("seed", range(30))
def test_finished_segments_and_their_times_are_those_of_transformers(seed):
    rng = random.Random(seed)
    output, now = [at(0)], 0.0
    for number in range(rng.randint(1, 4)):
        if number:
            output.append(at(now))
        output += rng.choices(range(90), k=rng.randint(1, 4))
        now += rng.randint(1, 300) * 0.02
        output.append(at(now))
    if rng.random() < 0.5:
        output += [at(now), *rng.choices(range(90), k=2)]
    expected, _ = WhisperGenerationMixin._retrieve_segment(
        seek_sequence=torch.tensor(output),
        seek_outputs=[{}],
        time_offset=[torch.zeros((), dtype=torch.float64)],
        timestamp_begin=FIRST_TIME,
        seek_num_frames=[3000],
        time_precision=0.02,
        time_precision_features=0.01,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.zeros(1, 3),
    )
    found = [each for each in RULES.segments(output, 30.0) if each.is_finished]
    assert [(each.start_s, each.end_s) for each in found] == [
        pytest.approx((float(each["start"]), float(each["end"]))) for each in expected
    ]
    assert [list(each.token_ids) for each in found] == [
        [token for token in each["tokens"].tolist() if token < FIRST_TIME] for each in expected
    ]


def test_rules_of_an_output_follow_from_its_prompt():
    rules = RULES.output_rules(RULES.prompt(language="en", with_times=True, previous=[5, START]))
    assert rules.written == () and rules.end == END
    assert rules.never == (1, 2, NO_SPEECH, NO_TIMES) and rules.not_first == (7, END)
    assert (rules.first_time, rules.end_of_times) == (FIRST_TIME, FIRST_TIME + 1501)
    assert rules.end_of_first_times == FIRST_TIME + 51
    plain = RULES.output_rules([*RULES.prompt(language="en"), 5, 6])
    assert plain.written == (5, 6) and plain.never == (1, 2, NO_SPEECH)
    assert plain.first_time is None


def test_a_prompt_without_a_task_has_no_rules():
    for prompt in ([], [5], [START], [START, EN], [START, NO_TIMES]):
        assert RULES.output_rules(prompt) is None
    assert ENGLISH.output_rules([START]).first_time == FIRST_TIME
    assert ENGLISH.output_rules([START, NO_TIMES]).first_time is None
    assert ENGLISH.output_rules([5]) is None
    # A prompt that has the tokens of a task is understood, as it is for other models.
    found = ENGLISH.output_rules([START, EN, TRANSCRIBE, NO_TIMES, 5])
    assert found.first_time is None and found.written == (5,)
