"""Define the bodies of POST /v1/audio/transcriptions and /v1/audio/translations."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from vllm.entrypoints.openai.protocol.base import (
    Int64,
    ListOf,
    ResponseModel,
    UsageInfo,
    field_error,
    now,
    random_id,
)
from vllm.entrypoints.openai.protocol.chat import DeltaMessage
from vllm.entrypoints.openai.protocol.sampling import NumberFields

AudioResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]

_FILE = Annotated[Any, WithJsonSchema({"type": "string", "format": "binary"})]
_STREAMED_FORMATS = ("json", "text")
_ONE_SPEAKER = "this server does not tell speakers apart"
_IN_PROMPT = "write these words in prompt"
_ONE_TEXT = "a recording has one text, made without beam search"
_WITHOUT_EFFECT = {
    "known_speaker_names": _ONE_SPEAKER,
    "known_speaker_references": _ONE_SPEAKER,
    "keywords": _IN_PROMPT,
    "hotwords": _IN_PROMPT,
    "languages": "send one language in language, or none to detect it",
    "to_language": "/v1/audio/translations writes English",
    "n": _ONE_TEXT,
    "best_of": _ONE_TEXT,
    "beam_size": _ONE_TEXT,
    "use_beam_search": _ONE_TEXT,
    "max_tokens": "send max_completion_tokens",
}
"""Fields of other servers that would change the text -> why they are refused."""
_OFF = ("", "0", "1", "false")
"""Values of such a field, in lower case, that change nothing."""


class SpeechFields(NumberFields):
    """The fields that transcriptions and translations have in common."""

    file: _FILE = Field(description="The sound, as an uploaded file.")
    model: str | None = None
    language: str | None = None
    prompt: str = ""
    response_format: AudioResponseFormat = "json"
    stream: bool | None = False
    stream_include_usage: bool | None = False
    stream_continuous_usage_stats: bool | None = False
    temperature: float = 0.0
    max_completion_tokens: Annotated[Int64, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _check_without_effect(self) -> "SpeechFields":
        for name, value in (self.model_extra or {}).items():
            if name in _WITHOUT_EFFECT and not _is_off(value):
                raise field_error(name, f"must be left out: {_WITHOUT_EFFECT[name]}")
        return self

    @model_validator(mode="after")
    def _check_stream(self) -> "SpeechFields":
        for name in ("stream_include_usage", "stream_continuous_usage_stats"):
            if getattr(self, name) and not self.stream:
                raise field_error(name, "needs stream=true: add it, or leave this out")
        if self.stream and self.response_format not in _STREAMED_FORMATS:
            raise field_error(
                "response_format",
                f"must be json or text with stream=true, got {self.response_format}",
            )
        return self

    @property
    def has_times(self) -> bool:
        """Whether the answer contains the times of words or segments."""
        return self.response_format not in _STREAMED_FORMATS

    @property
    def has_confidence(self) -> bool:
        """Whether the answer contains how certain the model is of each segment."""
        return self.response_format == "verbose_json"


def _is_off(value: Any) -> bool:
    return isinstance(value, str) and value.lower() in _OFF


class TranscriptionRequest(SpeechFields):
    """Audio to transcribe in the spoken language."""

    model_config = ConfigDict(populate_by_name=True)

    timestamp_granularities: ListOf[Literal["word", "segment"]] = Field(
        default_factory=list, alias="timestamp_granularities[]"
    )
    include: ListOf[str] = Field(default_factory=list, alias="include[]")
    chunking_strategy: str | None = None

    @field_validator("chunking_strategy", mode="before")
    @classmethod
    def _check_strategy(cls, value: Any) -> Any:
        if value not in (None, "", "auto"):
            raise ValueError("must be auto: the server chooses where to split a recording")
        return value

    @model_validator(mode="after")
    def _check_lists(self) -> "TranscriptionRequest":
        if self.include:
            raise field_error("include", "is not supported: leave it out")
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise field_error(
                "timestamp_granularities", "needs response_format=verbose_json: add it"
            )
        if "word" in self.timestamp_granularities:
            raise field_error(
                "timestamp_granularities",
                "must be segment: times of single words are not supported",
            )
        return self


class TranslationRequest(SpeechFields):
    """Audio to transcribe and translate to English. `language` is the spoken language."""


class DurationUsage(ResponseModel):
    """Length of the audio that was read."""

    type: Literal["duration"] = "duration"
    seconds: int
    """Seconds of the audio, rounded up."""


class TranscriptionResponse(ResponseModel):
    """The text of the audio."""

    text: str
    usage: DurationUsage | None = None


class TranscriptionWord(ResponseModel):
    """A word, and its times in seconds from the start."""

    end: float
    start: float
    word: str


class TranscriptionSegment(ResponseModel):
    """A segment of the text, its times, and the confidence of the model."""

    id: int
    avg_logprob: float
    compression_ratio: float
    end: float
    no_speech_prob: float
    seek: int
    start: float
    temperature: float
    text: str
    tokens: list[int]


class TranscriptionResponseVerbose(TranscriptionResponse):
    """The text of the audio, with its segments."""

    task: Literal["transcribe", "translate"] = "transcribe"
    duration: float
    """Seconds of the audio."""
    language: str
    """English name of the language of the sound; of a translation always english."""
    segments: list[TranscriptionSegment] | None = None
    words: list[TranscriptionWord] | None = None


class TranscriptionResponseStreamChoice(ResponseModel):
    """The new part of the text."""

    delta: DeltaMessage
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class TranscriptionStreamResponse(ResponseModel):
    """One chunk of a stream."""

    id: str = Field(default_factory=lambda: f"trsc-{random_id()}")
    object: Literal["transcription.chunk"] = "transcription.chunk"
    created: int = Field(default_factory=now)
    model: str
    choices: list[TranscriptionResponseStreamChoice]
    usage: UsageInfo | None = None
