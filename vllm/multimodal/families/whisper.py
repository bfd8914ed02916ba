"""Whisper (Radford et al.
2022, arXiv 2212.04356): sounds of 30 seconds, and transcription rules.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from vllm.errors import ConfigError, RequestError
from vllm.messages import OutputRules
from vllm.multimodal.audio.settings import SAMPLING_RATE
from vllm.multimodal.audio.sound_family import SoundFamily
from vllm.multimodal.audio.whisper_config import WhisperEncoderConfig, read_whisper_config
from vllm.multimodal.interface.checks import config_whole, is_whole
from vllm.multimodal.interface.family import EncoderInput, Expansion, TokenLookup
from vllm.multimodal.interface.languages import LANGUAGE_NAMES
from vllm.multimodal.interface.speech import SpeechRules, SpokenSegment, Task

_MULTILINGUAL_VOCABULARY = 51_865
"""Size of the smallest vocabulary with the tokens of languages."""
_ENGLISH = "en"
_FILE = "generation_config.json"


class WhisperSpeech(SpeechRules):
    """Prompts, time stamps and suppressed tokens of one Whisper model.

    Args:
        config: config.json.
        generation: generation_config.json. Missing tokens are looked up in the vocabulary.
        token_id: looks up tokens.
        seconds: length of sound that the encoder reads.

    Raises:
        ConfigError: a value cannot be used, or the vocabulary has no such token.
    """

    sampling_rate = SAMPLING_RATE

    def __init__(
        self,
        config: Mapping[str, Any],
        generation: Mapping[str, Any],
        token_id: TokenLookup,
        seconds: int = 30,
    ) -> None:
        self.seconds_per_piece = float(seconds)
        given = (*config.items(), *generation.items())
        self._values = {key: value for key, value in given if value is not None}
        self._token_id = token_id
        self._vocab_size = config_whole(config, "vocab_size", 51_865, 2**24)
        self._start = self._token("decoder_start_token_id", "<|startoftranscript|>")
        self._end = self._token("eos_token_id", "<|endoftext|>")
        self._no_times = self._token("no_timestamps_token_id", "<|notimestamps|>")
        self.no_speech_token = self._no_times - 1
        num_steps = config_whole(config, "max_source_positions", 1500, 2**16)
        self._step_s = seconds / num_steps
        first = self._no_times + 1
        self._times = range(first, min(first + num_steps + 1, self._vocab_size))
        self.max_previous_tokens = config_whole(config, "max_target_positions", 448, 2**16) // 2 - 1
        self._languages = self._read_languages()
        self.languages = tuple(self._languages) or (_ENGLISH,)
        self._tasks = self._read_tasks() if self._languages else {}
        self._suppressed = self._tokens("suppress_tokens")
        self._not_first = self._tokens("begin_suppress_tokens")
        self._first_times = self._read_first_times()

    def prompt(
        self,
        *,
        language: str | None,
        task: Task = "transcribe",
        with_times: bool = False,
        previous: Sequence[int] = (),
    ) -> list[int]:
        found: list[int] = []
        if previous:
            before = self._token("prev_sot_token_id", "<|startofprev|>")
            found = [before, *previous[-self.max_previous_tokens :]]
        found.append(self._start)
        if self._languages:
            if not self.is_multilingual:
                language = language or self.languages[0]
            if language is None:
                raise RequestError(
                    "language: this model needs the language of the sound. Give it or detect it",
                    param="language",
                )
            found += [self._languages[self.language_code(language)], self._tasks[task]]
        else:
            if language is not None:
                self.language_code(language)
            if task != "transcribe":
                raise RequestError(
                    "this model is for English only and does not translate. Ask for a "
                    "transcription",
                    param="task",
                )
        return found if with_times else [*found, self._no_times]

    def start_prompt(self) -> list[int]:
        return [self._start]

    def language_tokens(self) -> Mapping[int, str]:
        return {token: code for code, token in self._languages.items()}

    def segments(self, token_ids: Sequence[int], piece_s: float) -> list[SpokenSegment]:
        found: list[SpokenSegment] = []
        start_s, first = 0.0, 0
        text: list[int] = []
        last = len(token_ids)
        for index, token in enumerate(token_ids):
            if token == self._end:
                last = index
                break
            if token not in self._times:
                text.append(token)
                continue
            time_s = min((token - self._times.start) * self._step_s, piece_s)
            if text:
                found.append(
                    SpokenSegment(start_s, time_s, first, index + 1, tuple(text), is_finished=True)
                )
                text, first = [], index + 1
            start_s = time_s
        if text:
            found.append(
                SpokenSegment(start_s, piece_s, first, last, tuple(text), is_finished=False)
            )
        return found

    def output_rules(self, prompt_token_ids: Sequence[int]) -> OutputRules | None:
        """Return the rules of an output if the prompt contains language and task; else None.

        Without these tokens in the prompt, the model generates them itself.
        """
        if self._start not in prompt_token_ids:
            return None
        from_end = list(reversed(prompt_token_ids)).index(self._start)
        after = list(prompt_token_ids[len(prompt_token_ids) - from_end :])
        is_output = [token <= self._end or token in self._times for token in after]
        size = is_output.index(True) if True in is_output else len(after)
        if self._tasks and not set(self._tasks.values()) & set(after[:size]):
            return None
        has_times = self._no_times not in after[:size]
        return OutputRules(
            written=tuple(after[size:]),
            never=(*self._suppressed, self._no_times) if has_times else self._suppressed,
            not_first=self._not_first,
            end=self._end,
            first_time=self._times.start if has_times else None,
            end_of_times=self._times.stop,
            end_of_first_times=self._first_times.stop,
        )

    def _read_first_times(self) -> range:
        limit = self._values.get("max_initial_timestamp_index")
        if limit is None:
            return self._times
        if not is_whole(limit, 2**16, smallest=0):
            raise _wrong("max_initial_timestamp_index", limit, "an integer from 0")
        return self._times[: limit + 1]

    def _token(self, key: str, text: str) -> int:
        """Return a token id from generation_config.json, config.json, or else the vocabulary."""
        given = self._values.get(key)
        value: Any = given[0] if isinstance(given, list) and given else given
        if value is None:
            return self._token_id(text)
        self._check(key, value)
        assert isinstance(value, int)
        return value

    def _tokens(self, key: str) -> tuple[int, ...]:
        value = self._values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise _wrong(key, value, "a list of token ids")
        for token in value:
            self._check(key, token)
        return tuple(value)

    def _check(self, key: str, token: Any) -> None:
        if not is_whole(token, self._vocab_size - 1, smallest=0):
            raise _wrong(key, token, f"a token id below {self._vocab_size}, the vocab_size")

    def _read_languages(self) -> dict[str, int]:
        """Return language code -> token; empty for a model that knows only English."""
        is_multilingual = self._values.get("is_multilingual")
        if is_multilingual is None:
            is_multilingual = self._vocab_size >= _MULTILINGUAL_VOCABULARY
        if not is_multilingual:
            return {}
        given = self._values.get("lang_to_id")
        if given is None:
            return self._known({code: f"<|{code}|>" for code in LANGUAGE_NAMES})
        return self._read_table("lang_to_id", given)

    def _read_tasks(self) -> dict[str, int]:
        given = self._values.get("task_to_id")
        tasks = ("transcribe", "translate")
        if given is None:
            return {task: self._token_id(f"<|{task}|>") for task in tasks}
        found = self._read_table("task_to_id", given)
        if missing := [task for task in tasks if task not in found]:
            raise _wrong("task_to_id", given, f"an object with {' and '.join(missing)}")
        return found

    def _read_table(self, key: str, given: Any) -> dict[str, int]:
        if not isinstance(given, Mapping):
            raise _wrong(key, given, "an object of token ids")
        for token in given.values():
            self._check(key, token)
        return {text.removeprefix("<|").removesuffix("|>"): token for text, token in given.items()}

    def _known(self, texts: Mapping[str, str]) -> dict[str, int]:
        """Return the tokens of the texts that are in the vocabulary."""
        found = {}
        for code, text in texts.items():
            try:
                found[code] = self._token_id(text)
            except ConfigError:  # the vocabulary only has the languages that the model supports
                continue
        return found


class WhisperFamily(SoundFamily):
    """Sounds of up to 30 s for each prompt, padded with silence.

    They have no tokens in the prompt: layers of the decoder read their hidden states. The tensor is
    `features` [num_mel_bins, frames].
    """

    placeholder = ""
    text_of_image = ""
    required: ClassVar[str | None] = "audio"

    @staticmethod
    def read_encoder(config: Mapping[str, Any]) -> WhisperEncoderConfig:
        return read_whisper_config(config)

    def process_audio(self, samples: npt.NDArray[np.float32]) -> EncoderInput:
        if len(samples) > self.sizes.chunk_samples:
            raise RequestError(
                f"the sound has {len(samples) / self.sampling_rate:.4g} s, but a prompt of this "
                f"model may have at most {self.sizes.chunk_length} s. Send a prompt for each "
                "part, or the whole sound to /v1/audio/transcriptions of a server"
            )
        return super().process_audio(samples)

    def encoder_input(self, features: npt.NDArray[np.float32], num_samples: int) -> EncoderInput:
        return EncoderInput({"features": features}, ())

    def expand(self, grid: tuple[int, ...], token_id: TokenLookup) -> Expansion:
        return Expansion([], [], num_states=self.encoder.max_source_positions)

    def speech(self, generation: Mapping[str, Any], token_id: TokenLookup) -> WhisperSpeech:
        return WhisperSpeech(self.config, generation, token_id, self.sizes.chunk_length)


def _wrong(key: str, value: Any, accepted: str) -> ConfigError:
    return ConfigError(f"{_FILE}: {key} is {value!r}; it must be {accepted}")


Family = WhisperFamily
