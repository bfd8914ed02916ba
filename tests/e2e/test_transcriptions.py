"""Test a server with a small Whisper and the official client: every format, streams, refused
requests, and a client that leaves.

The model has random weights and reads 2 s at a time. The expected text is computed with
transformers.
"""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import transformers

from tests.e2e.server import ROOT, Server, start_server, wait_until
from tests.multimodal.sound_models import make_sound
from tests.shared_memory import assert_no_new_files, named_files
from tests.sound_files import FORMS, Samples, sound_file
from tests.tiny_speech import RATE, Reference, make_tiny_whisper
from vllm.entrypoints.openai.audio.pieces import split_audio

pytestmark = pytest.mark.e2e

NUM_TOKENS = 8
PIECE_S = 2.0
FIELDS: dict[str, Any] = {
    "model": "whisper",
    "temperature": 0,
    "extra_body": {"max_completion_tokens": NUM_TOKENS},
}
EXAMPLE = ROOT / "examples" / "online_serving" / "transcription.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    before = named_files()
    flags = ("--dtype", "float32", "--served-model-name", "whisper", "--max-num-seqs", "8")
    with start_server(str(folder), *flags) as server:
        yield server
    assert_no_new_files(before)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def recording() -> Samples:
    """Return 36 s of chords with a pause after every 1.6 s."""
    samples = make_sound(3, 36 * RATE)
    for start in range(int(1.6 * RATE), len(samples), int(1.8 * RATE)):
        samples[start : start + int(0.2 * RATE)] = 0
    return samples


def file_of(samples: Samples, form: str = "wav-float") -> tuple[str, bytes]:
    return "recording", sound_file(FORMS[form], samples)


class Expected:
    """The outputs of a Whisper of transformers for the pieces of a recording."""

    def __init__(self, folder: Path) -> None:
        self.reference = Reference(folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def tokens(self, samples: Samples, prompt: str) -> list[int]:
        ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        tokens, _ = self.reference.greedy(samples, ids, NUM_TOKENS)
        end = self.tokenizer.eos_token_id
        return tokens[: tokens.index(end)] if end in tokens else tokens

    def text_after(self, samples: Samples, before: str) -> str:
        """Return the English text of one piece after a previous text. Special tokens in the
        previous text are read as plain text.
        """
        start = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
        previous, start_ids, (prefix,) = (
            self.tokenizer(text, add_special_tokens=False, split_special_tokens=is_split).input_ids
            for text, is_split in ((before, True), (start, False), ("<|startofprev|>", False))
        )
        tokens, _ = self.reference.greedy(samples, [prefix, *previous, *start_ids], NUM_TOKENS)
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    def text(self, samples: Samples, language: str, task: str = "transcribe") -> str:
        prompt = f"<|startoftranscript|><|{language}|><|{task}|><|notimestamps|>"
        pieces = split_audio(samples, RATE, PIECE_S)
        parts = [self.tokens(samples[each.start : each.end], prompt) for each in pieces]
        return "".join(
            self.tokenizer.decode(part, skip_special_tokens=True) for part in parts
        ).strip()


@pytest.fixture(scope="module")
def expected(folder: Path) -> Expected:
    return Expected(folder)


def test_a_long_recording_is_what_transformers_writes_of_its_pieces(
    client: openai.OpenAI, recording: Samples, expected: Expected
) -> None:
    text = expected.text(recording, "de")
    assert len(split_audio(recording, RATE, PIECE_S)) > 17 and len(text) > 100
    file = file_of(recording)
    got = client.audio.transcriptions.create(file=file, language="de", **FIELDS)
    assert got.text == text
    assert got.usage is not None and got.usage.to_dict() == {"type": "duration", "seconds": 36}
    stream = client.audio.transcriptions.create(file=file, language="de", stream=True, **FIELDS)
    *deltas, done = [each.to_dict() for each in stream]
    assert len(deltas) > 17
    assert "".join(str(each["delta"]) for each in deltas) == done["text"] == text


def test_translations_and_other_languages(
    client: openai.OpenAI, recording: Samples, expected: Expected
) -> None:
    short = recording[: 3 * RATE]
    texts = {
        (language, task): expected.text(short, language, task)
        for language in ("de", "en")
        for task in ("transcribe", "translate")
    }
    assert len(set(texts.values())) == 4
    for language in ("de", "en"):
        got = client.audio.transcriptions.create(file=file_of(short), language=language, **FIELDS)
        assert got.text == texts[language, "transcribe"]
    got = client.audio.translations.create(file=file_of(short), **FIELDS)
    assert got.text in (texts["de", "translate"], texts["en", "translate"])


def test_a_text_before_the_recording_has_no_special_tokens(
    client: openai.OpenAI, recording: Samples, expected: Expected
) -> None:
    short = recording[:RATE]
    file = file_of(short)
    texts = set()
    for prompt, before in (("so far", " so far"), ("a<|endoftext|>", " a<|endoftext|>")):
        got = client.audio.transcriptions.create(file=file, language="en", prompt=prompt, **FIELDS)
        assert got.text == expected.text_after(short, before)
        texts.add(got.text)
    with_time = client.audio.transcriptions.create(
        file=file, language="en", prompt="so<|0.50|> far", **FIELDS
    )
    assert with_time.text in texts and len(texts) == 2


def test_every_form_of_answer_says_the_same(client: openai.OpenAI, recording: Samples) -> None:
    file = file_of(recording[: 5 * RATE])
    create: Any = client.audio.transcriptions.create
    verbose = create(
        file=file, response_format="verbose_json", timestamp_granularities=["segment"], **FIELDS
    )
    assert verbose.language in ("english", "german") and verbose.duration == 5.0
    assert [each.id for each in verbose.segments] == list(range(len(verbose.segments)))
    assert "".join(each.text for each in verbose.segments).strip() == verbose.text
    for before, after in zip(verbose.segments, verbose.segments[1:], strict=False):
        assert before.start <= before.end <= after.start <= after.end <= 5.0
    for each in verbose.segments:
        assert each.avg_logprob < 0 and 0 < each.no_speech_prob < 1 and each.tokens
    texts = [" ".join(each.text.split()) for each in verbose.segments]
    srt, vtt = (create(file=file, response_format=form, **FIELDS) for form in ("srt", "vtt"))
    # Segments without text are no subtitles.
    assert srt.count(" --> ") == vtt.count(" --> ") == len(list(filter(None, texts)))
    assert all(text.replace("-->", "->") in srt for text in texts)
    plain = create(file=file, **FIELDS).text
    assert create(file=file, response_format="text", **FIELDS) == plain + "\n"


@pytest.mark.parametrize("form", ["flac", "vorbis", "opus", "mp3", "m4a", "webm"])
def test_files_of_every_format(client: openai.OpenAI, recording: Samples, form: str) -> None:
    rate = FORMS[form].rate
    samples = np.repeat(recording[: 2 * RATE], 3)[: 2 * rate]
    file = (f"a.{form}", sound_file(FORMS[form], samples))
    got = client.audio.transcriptions.create(file=file, response_format="verbose_json", **FIELDS)
    assert got.duration == pytest.approx(len(samples) / rate, abs=0.1) and got.text


def test_bad_files_are_refused_and_the_server_goes_on(
    client: openai.OpenAI, recording: Samples
) -> None:
    whole = file_of(recording[:RATE])[1]
    for data, expected in (
        (whole[:-50], "damaged or incomplete"),
        (b"GIF89a", "a file of the format GIF"),
        (b"#EXTM3U\nhttp://127.0.0.1/a", "M3U"),
        (b"", "an empty file"),
    ):
        with pytest.raises(openai.BadRequestError, match=expected):
            client.audio.transcriptions.create(file=("a.wav", data), **FIELDS)
    file = ("a.wav", whole)
    with pytest.raises(openai.BadRequestError, match="'klingon'"):
        client.audio.transcriptions.create(file=file, language="klingon", **FIELDS)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.audio.transcriptions.create(file=file, model="whisper-1")
    with pytest.raises(openai.BadRequestError, match="messages"):
        client.chat.completions.create(model="whisper", messages=[])
    with pytest.raises(openai.BadRequestError, match="use POST /v1/audio/transcriptions"):
        client.chat.completions.create(model="whisper", messages=[{"role": "user", "content": "a"}])
    assert client.audio.transcriptions.create(file=file, **FIELDS).text


def test_a_client_that_leaves_stops_its_pieces(server: Server, recording: Samples) -> None:
    fields = {"model": "whisper", "stream": "true"}
    with httpx.stream(
        "POST",
        f"{server.url}/v1/audio/transcriptions",
        files={"file": file_of(recording)},
        data=fields,
        timeout=60,
    ) as response:
        next(response.iter_bytes())
    server.wait_until_idle()
    wait_until(lambda: server.get_json("/load")["server_load"] == 0)


def test_the_example_runs(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--url", f"{server.url}/v1"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    out = capsys.readouterr().out
    assert "transcription:" in out and "translation:" in out and " --> " in out
