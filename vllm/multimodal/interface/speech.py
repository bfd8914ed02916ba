"""The interface for transcription: prompts, languages and time stamps of a family of models.

A sound is cut into pieces that the model reads one by one. For each piece the caller generates from
`SpeechRules.prompt` with the piece as `multi_modal_data={"audio": ...}`, and gives the tokens of
the output to `SpeechRules.segments`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from vllm.errors import RequestError
from vllm.messages import OutputRules
from vllm.multimodal.interface.languages import find_language

Task = Literal["transcribe", "translate"]
"""Write what is said in its own language, or in English."""


@dataclass(frozen=True, slots=True)
class SpokenSegment:
    """Text between two time stamps."""

    start_s: float
    """Seconds from the beginning of the piece."""
    end_s: float
    first: int
    """Index in the output of its first token; time stamps count."""
    last: int
    """Index after the last token of the piece. The mean of the log-probabilities of these tokens is
    its avg_logprob."""
    token_ids: tuple[int, ...]
    """Tokens of the text, without time stamps."""
    is_finished: bool
    """Whether the model has written the end of the piece. Otherwise the piece may end within the
    words."""


class SpeechRules(ABC):
    """The rules for prompts and outputs of one model that transcribes.

    Attributes:
        seconds_per_piece: longest sound of a prompt.
        sampling_rate: samples per second that the model reads; other rates are resampled.
        languages: codes of the languages that it transcribes; only "en" if it knows no other.
        max_previous_tokens: how many tokens of earlier text `prompt` keeps.
        no_speech_token: token id; its probability as the next token after `start_prompt` is the
            probability that nobody speaks. None: the model does not provide it.
    """

    seconds_per_piece: float
    sampling_rate: int
    languages: tuple[str, ...]
    max_previous_tokens: int = 0
    no_speech_token: int | None = None

    @property
    def is_multilingual(self) -> bool:
        """Whether the model knows several languages, so that it can translate and detect them."""
        return len(self.languages) > 1

    def language_code(self, language: str) -> str:
        """Return the code of a language, given its code or English name.

        Raises:
            RequestError: the model does not know it.
        """
        asked = language.strip().lower()
        code = asked if asked in self.languages else find_language(asked)
        if code is None or code not in self.languages:
            accepted = ", ".join(sorted(self.languages))
            raise RequestError(
                f"language {language!r:.80} is not supported by this model; supported: {accepted}",
                param="language",
            )
        return code

    @abstractmethod
    def prompt(
        self,
        *,
        language: str | None,
        task: Task = "transcribe",
        with_times: bool = False,
        previous: Sequence[int] = (),
    ) -> list[int]:
        """Return the tokens of a prompt for one piece of sound.

        Args:
            language: code of the spoken language. None is accepted by a model that is not
                multilingual, or that needs no language.
            task: task of the model.
            with_times: the output has time stamps.
            previous: tokens of text before this piece, or of words to expect; the last
                `max_previous_tokens` are used.

        Raises:
            RequestError: the model does not know the language or the task.
        """

    @abstractmethod
    def start_prompt(self) -> list[int]:
        """Return the prompt after which the model generates the language, or "no speech"."""

    @abstractmethod
    def language_tokens(self) -> Mapping[int, str]:
        """Return token -> language code, if the model detects languages; else {}.

        To detect a language, generate one token after `start_prompt` with these as
        `allowed_token_ids`.
        """

    @abstractmethod
    def segments(self, token_ids: Sequence[int], piece_s: float) -> list[SpokenSegment]:
        """Split an output into segments by its time stamps.

        The last segment is included even if its end is missing.

        Args:
            token_ids: token ids of the output; may contain time stamps and end tokens.
            piece_s: seconds of sound in the piece, without padding.
        """

    @abstractmethod
    def output_rules(self, prompt_token_ids: Sequence[int]) -> OutputRules | None:
        """Return the rules that the output after a prompt must follow; None: there are none."""
