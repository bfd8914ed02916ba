"""Test sounds in conversations: all ways to give a sound result in the same tokens and outputs."""

import base64
import json
from itertools import groupby

import pytest
import transformers

from tests.multimodal.sound_models import make_sound
from tests.tiny_audio import FAMILIES, RATE, expected_outputs, make_tiny_audio
from tests.transformers_utils.test_tekken import CONTROL, NUM_SPECIAL, WORDS, write_tekken
from vllm import LLM, SamplingParams
from vllm.errors import RequestError

pytest.importorskip("av", reason="sounds need PyAV")
from tests.sound_files import FORMS, sound_file

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ENGINE = {"dtype": "float32", "max_model_len": 384, "num_gpu_blocks_override": 160}
SOUNDS = [make_sound(1, 20000), make_sound(2, 9000)]
FILES = [sound_file(FORMS["wav-float"], sound) for sound in SOUNDS]


def user(*parts):
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


def input_audio(file):
    data = base64.b64encode(file).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def check(folder, llm, conversations):
    """Compare outputs with transformers.

    Args:
        folder: folder of the model.
        llm: engine with the model.
        conversations: each with its text, in which every sound has one token, and its sounds.
    """
    found = llm.chat([messages for messages, _, _ in conversations], GREEDY)
    tokenizer = llm.get_tokenizer()
    for output, (_, text, sounds) in zip(found, conversations, strict=True):
        ids = list(output.prompt_token_ids)
        wanted = tokenizer(text, add_special_tokens=False).input_ids
        assert [token for token, _ in groupby(ids)] == [token for token, _ in groupby(wanted)]
        (expected,) = expected_outputs(folder, [(ids, sounds)], GREEDY.max_tokens)
        assert list(output.outputs[0].token_ids) == expected.token_ids


def test_every_way_to_give_a_sound_is_the_same(tmp_path):
    folder = make_tiny_audio("qwen2_audio", tmp_path)
    template = transformers.Qwen2AudioProcessor.default_chat_template.fget(None)
    (folder / "chat_template.jinja").write_text(template)
    (folder / "1.wav").write_bytes(FILES[0])
    data = base64.b64encode(FILES[0]).decode()
    llm = LLM(str(folder), **ENGINE, allowed_local_media_path=str(folder))
    ways = [
        input_audio(FILES[0]),
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
        {"type": "audio_url", "audio_url": {"url": (folder / "1.wav").as_uri()}},
        {"type": "audio", "path": str(folder / "1.wav")},
        {"type": "audio", "audio": (SOUNDS[0], RATE)},
    ]
    question = "what <|AUDIO|> is it?"
    first, *others = llm.chat([user(way, question) for way in ways], GREEDY)
    for each in others:
        assert each.prompt_token_ids == first.prompt_token_ids
        assert each.outputs[0].token_ids == first.outputs[0].token_ids
    token = llm.get_tokenizer().convert_tokens_to_ids("<|AUDIO|>")
    *_, neither = llm.chat([user(question)], GREEDY)
    counts = [list(each.prompt_token_ids).count(token) for each in (neither, first)]
    assert counts == [0, 31], "the text of the user is no sound"


def test_the_template_of_qwen2_audio_numbers_sounds(tmp_path):
    folder = make_tiny_audio("qwen2_audio", tmp_path)
    template = transformers.Qwen2AudioProcessor.default_chat_template.fget(None)
    (folder / "chat_template.jinja").write_text(template)
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    start, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    one = "Audio {}: <|audio_bos|><|AUDIO|><|audio_eos|>\n"
    conversations = [
        (user(input_audio(FILES[0]), "Why?"), one.format(1) + "Why?", SOUNDS[:1]),
        (
            user("Compare", input_audio(FILES[0]), "and", input_audio(FILES[1])),
            "Compare" + one.format(1) + "and" + one.format(2),
            SOUNDS,
        ),
        (user("Hi"), "Hi", []),
    ]
    check(
        folder,
        LLM(str(folder), **ENGINE),
        [(messages, system + start + text + end, s) for messages, text, s in conversations],
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_of_strings_gets_the_text_of_a_sound(family, tmp_path):
    folder = make_tiny_audio(family, tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    )
    text = f"user: {FAMILIES[family].in_text}\nWhy?\n"
    conversation = (user(input_audio(FILES[0]), "Why?"), text, SOUNDS[:1])
    check(folder, LLM(str(folder), **ENGINE), [conversation])


def test_voxtral_with_the_tokenizer_of_mistral_ai(tmp_path):
    size = 256 + len(WORDS) + NUM_SPECIAL
    folder = make_tiny_audio("voxtral", tmp_path, vocab_size=size)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    others = [f"<SPECIAL_{rank}>" for rank in range(len(CONTROL), 24)]
    special = [*CONTROL, *others, "[AUDIO]", "[BEGIN_AUDIO]"]
    listed = [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(special)
    ]
    write_tekken(folder, "v7", special_tokens=listed)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"audio_token_id": 24}))
    sound = "[BEGIN_AUDIO][AUDIO]"
    check(
        folder,
        LLM(str(folder), **ENGINE),
        [
            (user(input_audio(FILES[0]), "Why?"), f"<s>[INST]{sound}Why?[/INST]", SOUNDS[:1]),
            (
                user(input_audio(FILES[1]), input_audio(FILES[0])),
                f"<s>[INST]{sound}{sound}[/INST]",
                [SOUNDS[1], SOUNDS[0]],
            ),
        ],
    )


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (input_audio(b"no sound"), r"messages\[0\].content\[0\].*: "),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}, "input_audio"),
        (input_audio(sound_file(FORMS["wav"], make_sound(1, 40000))), "a shorter one"),
    ],
)
def test_what_is_no_sound_or_too_long_is_refused(part, message, tmp_path):
    llm = LLM(str(make_tiny_audio("qwen2_audio", tmp_path)), **ENGINE)
    with pytest.raises(RequestError, match=message) as caught:
        llm.chat([user(part, "Why?")], GREEDY)
    assert "\n" not in str(caught.value)
