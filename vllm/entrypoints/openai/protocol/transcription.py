"""POST /v1/audio/transcriptions, for programs that import them. Audio models are not supported."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from vllm.entrypoints.openai.protocol.base import (
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


class TranscriptionRequest(NumberFields):
    """Audio to transcribe."""

    model_config = ConfigDict(populate_by_name=True)

    file: Annotated[Any, Field(description="The sound, as an uploaded file.")]
    model: str | None = None
    language: str | None = None
    prompt: str = ""
    response_format: AudioResponseFormat = "json"
    timestamp_granularities: ListOf[Literal["word", "segment"]] = Field(
        default_factory=list, alias="timestamp_granularities[]"
    )
    stream: bool | None = False
    stream_include_usage: bool | None = False
    stream_continuous_usage_stats: bool | None = False
    temperature: float = 0.0

    @model_validator(mode="after")
    def _check_stream(self) -> "TranscriptionRequest":
        for name in ("stream_include_usage", "stream_continuous_usage_stats"):
            if getattr(self, name) and not self.stream:
                raise field_error(name, "only with stream=true")
        return self


class TranscriptionResponse(ResponseModel):
    """The text of the audio."""

    text: str


class TranscriptionWord(ResponseModel):
    """A word, and when it was said: seconds from the start."""

    end: float
    start: float
    word: str


class TranscriptionSegment(ResponseModel):
    """A part of the text, when it was said, and how sure the model is of it."""

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
    """The text of the audio with its segments."""

    duration: str
    language: str
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
