"""An engine that transcribes each piece of a recording as the test says, and sound files for it."""

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from tests.engine.tokenizers_for_tests import byte_level
from tests.entrypoints.openai.scripted_engine import ScriptedEngine
from tests.sound_files import FORMS, Samples, sound_file, tone
from vllm.engine.input.media_input import MediaInput
from vllm.messages import EngineRequest
from vllm.multimodal.audio.sound import read_sound
from vllm.multimodal.interface.source import MediaSource
from vllm.multimodal.interface.speech import OutputRules, SpeechRules, SpokenSegment, Task
from vllm.outputs import RequestOutput

RATE = 16_000
PIECE_S = 2.0
_KIND = re.compile(r"-(\d+)(?:-(language|silence))?-\d+$")
_LANGUAGES = {21: "en", 22: "de"}
_NO_SPEECH = 23
_START, _TRANSLATE, _WITH_TIMES = 24, 25, 26
_END = byte_level().eos_token_id


class FakeSpeech(SpeechRules):
    """Rules of speech with pieces of two seconds. All words of a piece are one segment, from 0.5 s
    to the end of the piece.
    """

    seconds_per_piece = PIECE_S
    sampling_rate = RATE
    max_previous_tokens = 8
    no_speech_token = _NO_SPEECH

    def __init__(self, languages: tuple[str, ...] = ("de", "en")) -> None:
        self.languages = languages

    def prompt(
        self,
        *,
        language: str | None,
        task: Task = "transcribe",
        with_times: bool = False,
        previous: Sequence[int] = (),
    ) -> list[int]:
        codes = {code: token for token, code in _LANGUAGES.items()}
        found = [*previous[-self.max_previous_tokens :], _START]
        found += [codes[language]] if language else []
        return [*found, *[_TRANSLATE] * (task == "translate"), *[_WITH_TIMES] * with_times]

    def start_prompt(self) -> list[int]:
        return [_START]

    def language_tokens(self) -> Mapping[int, str]:
        return _LANGUAGES if self.is_multilingual else {}

    def segments(self, token_ids: Sequence[int], piece_s: float) -> list[SpokenSegment]:
        words = tuple(token for token in token_ids if token != _END)
        if not words:
            return []
        return [SpokenSegment(0.5, piece_s, 0, len(words), words, is_finished=True)]

    def output_rules(self, prompt_token_ids: Sequence[int]) -> OutputRules | None:
        return None


class SpeechEngine(ScriptedEngine):
    """Generates the given texts, one for each piece, with one token per word.

    Args:
        texts: texts of the pieces, in order.
        rules: rules of speech; None: the model makes no transcriptions.

    Attributes:
        language: language that is detected.
        sounds: samples by the id of the request in the engine, without its random part.
        sources: files that were read.
        most_open: largest number of requests that ran at the same time.
    """

    def __init__(self, *texts: str, rules: FakeSpeech | None = None, **more: Any) -> None:
        self.texts = [re.findall(r"\s*\S+|\s+", text) for text in texts]
        super().__init__(*dict.fromkeys(word for text in self.texts for word in text), **more)
        self.rules = rules
        self.language = "de"
        self.sounds: dict[str, Samples] = {}
        self.sources: list[MediaSource] = []
        self.most_open = 0
        self._num_open = 0

    def _script(self, request: EngineRequest) -> list[int]:
        found = _KIND.search(request.request_id)
        assert found is not None
        if found[2] == "language":
            return [next(token for token, code in _LANGUAGES.items() if code == self.language)]
        if found[2] == "silence":
            return [_NO_SPEECH]
        tokens = self.given_tokenizer.convert_tokens_to_ids(self.texts[int(found[1])])
        return [*tokens, self.given_tokenizer.eos_token_id]

    async def generate(
        self, prompt: Any, *args: Any, **more: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        (sound,) = prompt["multi_modal_data"]["audio"]
        assert sound.sampling_rate == RATE
        self.sounds[re.sub(r"^.*?-\w{8}-(?=\d)", "", args[1])] = sound.samples
        self._num_open += 1
        self.most_open = max(self.most_open, self._num_open)
        plain = {"prompt_token_ids": prompt["prompt_token_ids"]}
        try:
            async with aclosing(super().generate(plain, *args, **more)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._num_open -= 1

    async def read_sound(self, source: MediaSource, sampling_rate: int) -> Samples:
        self.sources.append(source)
        return read_sound(source, sampling_rate=sampling_rate, max_seconds=600)


def use_rules(monkeypatch: pytest.MonkeyPatch, rules: SpeechRules | None) -> None:
    """Let all models have these rules of speech."""
    monkeypatch.setattr(MediaInput, "speech", lambda self, tokenizer: rules)


def spoken(num_pieces: int) -> Samples:
    """Return a recording that is split into this many pieces of 1.8 s, with a pause at each
    expected cut.
    """
    part = np.concatenate([tone(1.65), np.zeros(int(0.15 * RATE), np.float32)])
    return np.concatenate([part] * num_pieces)


def wav(samples: Samples) -> bytes:
    """Return a WAV file."""
    return sound_file(FORMS["wav"], samples)
