"""Test the speech routes: answer formats, streams, pieces and refused requests.

The engine is real, and its core returns the text of the test. Other tests use models that
transcribe.
"""

import asyncio
import json
import zlib
from typing import Any

import numpy as np
import openai
import pytest

from tests.entrypoints.openai.audio.speech_engine import (
    PIECE_S,
    RATE,
    FakeSpeech,
    SpeechEngine,
    spoken,
    use_rules,
    wav,
)
from tests.entrypoints.openai.scripted_engine import make_app, make_client, open_stream
from tests.sound_files import tone

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> FakeSpeech:
    found = FakeSpeech()
    use_rules(monkeypatch, found)
    return found


def post(client: Any, path: str = TRANSCRIPTIONS, data: bytes | None = None, **fields: Any) -> Any:
    file = wav(tone(1.0)) if data is None else data
    return client.post(path, files={"file": ("a.wav", file)}, data=fields)


def official(engine: SpeechEngine) -> openai.OpenAI:
    """Return the official client of a server with this engine."""
    return openai.OpenAI(
        base_url="http://testserver/v1", api_key="-", http_client=make_client(engine)
    )


def test_json_and_text() -> None:
    client = official(SpeechEngine(" Hello", " you there. "))
    got = client.audio.transcriptions.create(model="", file=wav(spoken(2)))
    assert got.text == "Hello you there."
    assert got.usage is not None and got.usage.to_dict() == {"type": "duration", "seconds": 4}
    file = ("a.wav", wav(spoken(2)))
    text = client.audio.transcriptions.create(model="", file=file, response_format="text")
    assert text == "Hello you there.\n"


def test_verbose_json_has_the_times_of_the_recording() -> None:
    engine = SpeechEngine(" Guten Tag.", " Ja ja ja ja ja ja ja ja.")
    got = official(engine).audio.transcriptions.create(
        model="",
        file=wav(spoken(2)),
        response_format="verbose_json",
        timestamp_granularities=["segment"],
        temperature=0.25,
    )
    assert (got.language, got.duration, got.words) == ("german", 3.6, None)
    assert got.text == "Guten Tag. Ja ja ja ja ja ja ja ja."
    first, second = got.segments or []
    assert (first.id, first.seek, first.start, first.text) == (0, 0, 0.5, " Guten Tag.")
    assert second.id == 1 and second.seek == round(first.end * 100)
    assert second.start == pytest.approx(first.end + 0.5) and second.end == 3.6
    assert first.end == pytest.approx(1.72, abs=0.08)  # the cut is in the pause
    assert first.tokens == engine.given_tokenizer.convert_tokens_to_ids([" Guten", " Tag."])
    data = second.text.encode()
    assert second.compression_ratio == pytest.approx(len(data) / len(zlib.compress(data)))
    assert first.temperature == 0.25
    assert first.avg_logprob < 0 and 0 < first.no_speech_prob < 1
    assert got.to_dict()["task"] == "transcribe"


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("srt", "1\n00:00:00,500 --> 00:00:01,000\nHello.\n\n"),
        ("vtt", "WEBVTT\n\n00:00:00.500 --> 00:00:01.000\nHello.\n\n"),
    ],
)
def test_subtitles(form: Any, expected: str) -> None:
    engine = SpeechEngine(" Hello.")
    got: Any = official(engine).audio.transcriptions.create(
        model="", file=wav(tone(1.0)), response_format=form, language="en"
    )
    assert got == expected
    # Log-probabilities take time and are not shown.
    assert [params.logprobs for _, params, _ in engine.seen] == [None]


def test_a_segment_without_text_is_no_subtitle() -> None:
    got: Any = official(SpeechEngine(" ", " Hello.")).audio.transcriptions.create(
        model="", file=wav(spoken(2)), response_format="srt", language="en"
    )
    assert got.startswith("1\n00:00:02,") and got.endswith("\nHello.\n\n") and got.count("-->") == 1


def test_translations_are_english() -> None:
    engine = SpeechEngine(" Hello.")
    client = official(engine)
    assert client.audio.translations.create(model="", file=wav(tone(1.0))).text == "Hello."
    got = client.audio.translations.create(
        model="", file=wav(tone(1.0)), response_format="verbose_json"
    )
    assert (got.language, got.text) == ("english", "Hello.")
    prompts = {name.split("-")[-1]: prompt["prompt_token_ids"] for prompt, _, name in engine.seen}
    assert prompts["0"] == FakeSpeech().prompt(language="de", task="translate", with_times=True)


def test_a_stream_has_the_same_text_in_order() -> None:
    texts = (" One two", " three", "", " four five ")
    plain = official(SpeechEngine(*texts)).audio.transcriptions.create(
        model="", file=wav(spoken(4))
    )
    engine = SpeechEngine(*texts)
    stream = official(engine).audio.transcriptions.create(
        model="", file=wav(spoken(4)), stream=True
    )
    *deltas, done = [each.to_dict() for each in stream]
    assert plain.text == "One two three four five" == done["text"]
    assert [each["type"] for each in deltas] == ["transcript.text.delta"] * 5
    assert "".join(str(each["delta"]) for each in deltas) == done["text"]
    num_prompt = 4 * len(FakeSpeech().prompt(language="de"))
    assert done["type"] == "transcript.text.done"
    assert done["usage"] == {
        "type": "tokens",
        "input_tokens": num_prompt,
        "output_tokens": 10,
        "total_tokens": num_prompt + 10,
    }


def test_pieces_cover_the_recording_and_only_a_few_run_at_a_time() -> None:
    engine = SpeechEngine(*[f" {i}" for i in range(40)])
    samples = spoken(40)
    got = official(engine).audio.transcriptions.create(model="", file=wav(samples), language="en")
    assert got.text == " ".join(map(str, range(40)))
    assert 1 < engine.most_open <= 10  # the engine accepts 8 requests at a time
    sounds = [engine.sounds[str(i)] for i in range(40)]
    assert max(map(len, sounds)) <= PIECE_S * RATE
    assert np.abs(np.concatenate(sounds) - samples).max() < 1e-4


def test_the_language_is_detected_once_in_the_first_piece_that_is_not_silent() -> None:
    engine = SpeechEngine(" a", " b", " c")
    samples = np.concatenate([np.zeros(int(3.6 * RATE), np.float32), spoken(3)])
    got = official(engine).audio.transcriptions.create(
        model="", file=wav(samples), response_format="verbose_json"
    )
    assert got.text == "a b c" and got.language == "german"
    assert [name for name in engine.sounds if "language" in name] == ["0-language"]
    assert np.abs(engine.sounds["0-language"]).max() > 0.1
    segments = got.segments or []
    assert segments[0].start > 2 and segments[-1].end == got.duration == 9.0


@pytest.mark.parametrize(
    ("language", "expected"), [("en", "english"), ("German", "german"), ("", "german")]
)
def test_a_given_language_is_not_detected(language: str, expected: str) -> None:
    engine = SpeechEngine(" a")
    got = post(make_client(engine), language=language, response_format="verbose_json")
    assert got.json()["language"] == expected
    assert ("0-language" in engine.sounds) == (not language)


def test_of_silence_nothing_is_written() -> None:
    engine = SpeechEngine(" Thank you.")
    client = make_client(engine)
    silence = wav(np.zeros(5 * RATE, np.float32))
    for form, expected in (("text", "\n"), ("srt", ""), ("vtt", "WEBVTT\n\n")):
        assert post(client, data=silence, response_format=form).text == expected
    got = post(client, data=silence, response_format="verbose_json").json()
    assert (got["text"], got["segments"], got["duration"]) == ("", [], 5.0)
    events = post(client, data=silence, stream="true").text
    assert '"text":""' in events and "delta" not in events
    assert engine.seen == []


def test_fields_of_sampling_reach_every_piece() -> None:
    engine = SpeechEngine(" a", " b", generation_defaults={"top_k": 7})
    fields = {"temperature": "0.5", "top_p": "0.9", "seed": "3", "max_completion_tokens": "2"}
    more = {"repetition_penalty": "1.2", "language": "en", "prompt": "Glossary: <s> x"}
    assert post(make_client(engine), data=wav(spoken(2)), **fields, **more).status_code == 200
    assert len(engine.seen) == 2
    for prompt, params, _ in engine.seen:
        assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)
        assert (params.seed, params.max_tokens, params.repetition_penalty) == (3, 2, 1.2)
        tokens = prompt["prompt_token_ids"]
        # The text of the user is no special token.
        assert engine.given_tokenizer.bos_token_id not in tokens
        assert tokens[-2:] == FakeSpeech().prompt(language="en")


@pytest.mark.parametrize("form", ["text", "verbose_json"])
def test_a_client_that_leaves_stops_all_pieces(form: str) -> None:
    async def run() -> None:
        engine = SpeechEngine(" a b", " c d", " e f")
        engine.hold()
        data, headers = _encode(wav(spoken(3)), response_format=form, language="en")
        app = make_app(engine)
        async with (
            app.router.lifespan_context(app),
            open_stream(app, TRANSCRIPTIONS, data, content_type=headers),
        ):
            await asyncio.wait_for(_running(engine, 3), 120)
        await engine.settle()
        assert len(engine.aborted) == 3 and not engine.core.running

    asyncio.run(run())


async def _running(engine: SpeechEngine, count: int) -> None:
    while len(engine.core.running) < count:
        await asyncio.sleep(0)


def _encode(file: bytes, **fields: str) -> tuple[bytes, bytes]:
    """Return a form as the body of a request, and its content type."""
    request = make_client(SpeechEngine()).build_request(
        "POST", TRANSCRIPTIONS, files={"file": ("a.wav", file)}, data=fields
    )
    return request.read(), request.headers["content-type"].encode()


def test_a_stream_that_a_client_leaves_stops_all_pieces() -> None:
    async def run() -> None:
        engine = SpeechEngine(" a b", " c d", " e f")
        engine.hold()
        data, content_type = _encode(wav(spoken(3)), stream="true", language="en")
        app = make_app(engine)
        async with (
            app.router.lifespan_context(app),
            open_stream(app, TRANSCRIPTIONS, data, content_type=content_type) as stream,
        ):
            await stream.read_until(b'"delta":"a"')
            await asyncio.wait_for(_running(engine, 3), 120)
        await engine.settle()
        assert len(engine.aborted) == 3 and not engine.core.running

    asyncio.run(run())


def test_the_text_of_a_piece_that_was_aborted_is_not_taken_for_the_whole() -> None:
    async def run() -> None:
        engine = SpeechEngine(" a b", " c d")
        engine.hold()
        data, content_type = _encode(wav(spoken(2)), language="en")
        app = make_app(engine)
        async with (
            app.router.lifespan_context(app),
            open_stream(app, TRANSCRIPTIONS, data, content_type=content_type) as stream,
        ):
            await asyncio.wait_for(_running(engine, 2), 120)
            await engine.abort(engine.seen[0][2])
            assert b"was aborted" in await stream.read_until(b"}}")
        await engine.settle()
        assert not engine.core.running

    asyncio.run(run())


def test_a_piece_that_fails_ends_the_request_and_the_other_pieces() -> None:
    engine = SpeechEngine(" a b", " c d")
    engine.core.error_after = (1, "the card is hot")
    client = make_client(engine)
    got = post(client, data=wav(spoken(2)), language="en")
    assert got.status_code == 500 and "the card is hot" in got.json()["error"]["message"]
    events = post(client, data=wav(spoken(2)), language="en", stream="true").text
    assert "the card is hot" in events and events.endswith("data: [DONE]\n\n")
    assert not engine.core.running


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": "diarized_json"}, "response_format", "must be 'json', 'text'"),
    ({"response_format": "srt", "stream": "true"}, "response_format", "must be json or text"),
    ({"temperature": "hot"}, "temperature", "must be a number"),
    ({"temperature": "-1"}, "temperature", "at least 0"),
    ({"temperature": "nan"}, "temperature", "finite"),
    ({"language": "klingon"}, "language", "is not supported by this model"),
    ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "verbose_json"),
    (
        {"timestamp_granularities[]": ["segment", "word"], "response_format": "verbose_json"},
        "timestamp_granularities",
        "must be segment: times of single words are not supported",
    ),
    ({"timestamp_granularities[0]": "word"}, "timestamp_granularities", "verbose_json"),
    ({"timestamp_granularities[]": "line"}, "timestamp_granularities[]", "'word' or 'segment'"),
    ({"include[]": "logprobs"}, "include", "not supported"),
    ({"chunking_strategy[type]": "server_vad"}, "chunking_strategy", "must be auto"),
    (
        {"chunking_strategy[type]": "server_vad", "chunking_strategy[threshold]": "0.5"},
        "chunking_strategy",
        "must be auto",
    ),
    ({"known_speaker_names[]": ["a", "b"]}, "known_speaker_names", "tell speakers apart"),
    ({"to_language": "de"}, "to_language", "writes English"),
    ({"n": "2"}, "n", "a recording has one text"),
    ({"beam_size": ["2", "3"]}, "beam_size", "a recording has one text"),
    ({"max_tokens": "9"}, "max_tokens", "send max_completion_tokens"),
    ({"stream": "perhaps"}, "stream", "true or false"),
    ({"stream_include_usage": "true"}, "stream_include_usage", "needs stream=true"),
    ({"max_completion_tokens": "0"}, "max_completion_tokens", "at least 1"),
    ({"max_completion_tokens": "10000"}, "max_tokens", "maximum context length"),
    ({"top_p": "7"}, "top_p", "1"),
    ({"seed": "1.5"}, "seed", "must be an integer"),
    ({"prompt": ["a", "b"]}, "prompt", "must be sent once, got 2"),
]


def test_wrong_fields_are_refused_in_a_sentence() -> None:
    engine = SpeechEngine(" a")
    client = make_client(engine)
    for fields, param, expected in REFUSED:
        got = post(client, **fields)
        error = got.json()["error"]
        assert (got.status_code, error["param"]) == (400, param), (fields, error)
        assert expected in error["message"] and "\n" not in error["message"]
    assert engine.core.added == {}


def test_wrong_files_are_refused_in_a_sentence() -> None:
    client = make_client(SpeechEngine(" a"))
    whole = wav(tone(1.0))
    for data, expected in (
        (b"", "an empty file"),
        (b"\x89PNG\r\n\x1a\n" + bytes(99), "a file of the format PNG"),
        (whole[:-100], "damaged or incomplete"),
        (b"hello", "an unknown format"),
    ):
        got = post(client, data=data)
        assert (got.status_code, got.json()["error"]["param"]) == (400, "file"), got.text
        assert expected in got.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "content_type", "expected"),
    [
        (b"{}", "application/json", "must be multipart/form-data"),
        (b"--x", "multipart/form-data", "with a boundary"),
        (b"junk", "multipart/form-data; boundary=x", "the form cannot be read"),
        (
            b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\n1",
            "multipart/form-data; boundary=x",
            "incomplete",
        ),
        (
            b"--x\r\nContent-Disposition: form-data; name=file\r\n\r\nabc\r\n--x--\r\n",
            "multipart/form-data; boundary=x",
            "file must be an uploaded file, got a string",
        ),
        (
            b"--x\r\nContent-Disposition: form-data; name=language; filename=a\r\n\r\nen\r\n"
            b"--x--\r\n",
            "multipart/form-data; boundary=x",
            "language must be a string, got an uploaded file",
        ),
        (
            b"--x\r\nContent-Disposition: form-data; name=a\r\nContent-Transfer-Encoding: z\r\n\r\n"
            b"a\r\n--x--\r\n",
            "multipart/form-data; boundary=x",
            "Unknown Content-Transfer-Encoding",
        ),
        (
            b"--x\r\nContent-Disposition: form-data; name=model\r\n\r\n\xff\r\n--x--\r\n",
            "multipart/form-data; boundary=x",
            "UTF-8",
        ),
        (
            b"--x\r\nContent-Disposition: form-data; name=model\r\n\r\n\r\n" * 65 + b"--x--\r\n",
            "multipart/form-data; boundary=x",
            "at most 64 parts",
        ),
        (
            b"--x\r\nContent-Disposition: form-data; name=prompt\r\n\r\n"
            + b"a" * 2**20
            + b"a\r\n--x--\r\n",
            "multipart/form-data; boundary=x",
            "at most 1048576 bytes",
        ),
    ],
)
def test_what_is_no_form_is_refused(content: bytes, content_type: str, expected: str) -> None:
    client = make_client(SpeechEngine(" a"))
    got = client.post(TRANSCRIPTIONS, content=content, headers={"content-type": content_type})
    assert got.status_code == 400 and expected in got.json()["error"]["message"], got.text


def test_without_a_file_or_with_another_model() -> None:
    client = make_client(SpeechEngine(" a"))
    got = client.post(TRANSCRIPTIONS, files={"model": (None, "x")})
    assert got.json()["error"]["message"] == "file must be an uploaded file, got no such part"
    got = post(client, model="gpt-4o-transcribe")
    assert (got.status_code, got.json()["error"]["code"]) == (404, "model_not_found")


def test_a_file_has_a_limit_of_bytes() -> None:
    got = post(make_client(SpeechEngine(" a")), data=bytes(27 * 2**20))
    assert got.status_code == 413
    assert "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB" in got.json()["error"]["message"]


@pytest.mark.parametrize("path", [TRANSCRIPTIONS, TRANSLATIONS])
def test_a_model_without_speech_says_so(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_rules(monkeypatch, None)
    got = post(make_client(SpeechEngine(" a")), path)
    assert got.status_code == 400
    assert "does not transcribe sound" in got.json()["error"]["message"]


def test_a_model_of_one_language_needs_none(rules: FakeSpeech) -> None:
    rules.languages = ("en",)
    engine = SpeechEngine(" a")
    got = post(make_client(engine), response_format="verbose_json")
    assert got.json()["language"] == "english"
    assert "0-language" not in engine.sounds


def test_the_description_has_the_fields_of_the_forms() -> None:
    described = make_client(SpeechEngine()).get("/openapi.json").json()
    for path in (TRANSCRIPTIONS, TRANSLATIONS):
        body = described["paths"][path]["post"]["requestBody"]["content"]
        fields = body["multipart/form-data"]["schema"]["properties"]
        assert fields["file"]["format"] == "binary"
        assert {"model", "language", "temperature", "stream"} <= fields.keys()
    json.dumps(described)
