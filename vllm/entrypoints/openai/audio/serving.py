"""Serve POST /v1/audio/transcriptions and POST /v1/audio/translations."""

import math
import zlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from vllm.entrypoints.http import off_loop
from vllm.entrypoints.http.errors import openai_stream
from vllm.entrypoints.http.sse import event, run_until_disconnect
from vllm.entrypoints.openai.audio.form import FILE, read_form
from vllm.entrypoints.openai.audio.recording import ENGLISH, Recording, Segment
from vllm.entrypoints.openai.audio.subtitles import TimedText, srt, vtt
from vllm.entrypoints.openai.protocol.base import STREAMED, error_responses, random_id
from vllm.entrypoints.openai.protocol.transcription import (
    SpeechFields,
    TranscriptionRequest,
    TranscriptionResponse,
    TranscriptionResponseVerbose,
    TranslationRequest,
)
from vllm.entrypoints.openai.shared.chunks import json_response
from vllm.entrypoints.openai.shared.prompts import request_id_of, trace_headers_of
from vllm.entrypoints.shared.context import ServerContext, get_context
from vllm.errors import NotFoundError, RequestError
from vllm.multimodal.interface.languages import LANGUAGE_NAMES
from vllm.multimodal.interface.source import MediaSource
from vllm.multimodal.interface.speech import SpeechRules, Task

router = APIRouter(tags=["audio"])

_FRAMES_PER_SECOND = 100
"""Unit of `seek` in a segment: the step of the features of Whisper."""
_MAX_DIGITS = 3


def _form(kind: type[SpeechFields]) -> dict[str, Any]:
    """Return the OpenAPI description of a route whose body is a form."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    content = {"multipart/form-data": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


_RESPONSES: dict[int | str, dict[str, Any]] = {
    **error_responses(400, 404, 413, 500, 503),
    200: {"content": {**STREAMED[200]["content"], "text/plain": {}}},
}


@router.post(
    "/v1/audio/transcriptions",
    response_model=TranscriptionResponseVerbose | TranscriptionResponse,
    responses=_RESPONSES,
    openapi_extra=_form(TranscriptionRequest),
)
async def create_transcription(request: Request) -> Response:
    """Transcribe an audio file."""
    return await _answer(request, TranscriptionRequest, "transcribe")


@router.post(
    "/v1/audio/translations",
    response_model=TranscriptionResponseVerbose | TranscriptionResponse,
    responses=_RESPONSES,
    openapi_extra=_form(TranslationRequest),
)
async def create_translation(request: Request) -> Response:
    """Transcribe an audio file and translate it to English."""
    return await _answer(request, TranslationRequest, "translate")


@router.post("/v1/audio/speech", status_code=404)
async def refuse_speech() -> Response:
    """Refuse the request, because no supported model generates speech."""
    raise NotFoundError(
        "this server cannot generate speech: it can only transcribe or translate recordings"
    )


def require_speech(context: ServerContext) -> SpeechRules:
    """Return the speech rules of the served model.

    Raises:
        RequestError: the model does not transcribe; the message names the right methods.
    """
    if context.speech is None:
        raise RequestError(
            "this model does not transcribe sound. Start the server with one that does, such as "
            "Whisper; or use POST /v1/chat/completions, if the model reads sound"
        )
    return context.speech


async def _answer(request: Request, kind: type[SpeechFields], task: Task) -> Response:
    context = get_context(request)
    rules = require_speech(context)
    data = await request.body()
    off_loop.mark_request(len(data))
    content_type = request.headers.get("content-type", "")
    body = await off_loop.run(partial(read_form, kind, data, content_type))
    del data
    context.check_model(body.model)
    recording = await run_until_disconnect(request, _prepare(request, rules, body, task))
    if body.stream:
        return openai_stream(_stream(recording))
    return await run_until_disconnect(request, _complete(recording, body, task))


async def _prepare(
    request: Request, rules: SpeechRules, body: SpeechFields, task: Task
) -> Recording:
    context = get_context(request)
    source = MediaSource(modality="audio", where=FILE, data=body.file.data)
    samples = await context.engine.read_sound(source, rules.sampling_rate)
    response_id = f"trsc-{request_id_of(request, random_id())}"
    headers = trace_headers_of(request)
    make = partial(Recording, context, rules, body, task, samples, response_id, headers)
    # Off the event loop: a small compressed file may have many samples.
    recording = await off_loop.run(make, is_large=True)
    await recording.prepare()
    return recording


# ---- answers ----------------------------------------------------------------------------------


async def _complete(recording: Recording, body: SpeechFields, task: Task) -> Response:
    if not body.has_times:
        text = await recording.text()
        if body.response_format == "text":
            return PlainTextResponse(text + "\n")
        return json_response({"text": text, "usage": _usage(recording)})
    segments = await recording.segments()
    if body.has_confidence:
        return json_response(_verbose(recording, segments, body, task))
    # A subtitle without text would end at its empty line.
    spoken = [each for each in segments if each.text.strip()]
    texts = [TimedText(each.start_s, each.end_s, each.text) for each in spoken]
    return PlainTextResponse(srt(texts) if body.response_format == "srt" else vtt(texts))


def _verbose(
    recording: Recording, segments: Sequence[Segment], body: SpeechFields, task: Task
) -> dict[str, Any]:
    language = ENGLISH if task == "translate" else recording.language
    return {
        "task": task,
        "language": LANGUAGE_NAMES.get(language, language),
        "duration": round(recording.seconds, _MAX_DIGITS),
        "text": "".join(each.text for each in segments).strip(),
        "segments": [
            {
                "id": index,
                "seek": round(recording.start_of(each.piece) * _FRAMES_PER_SECOND),
                "start": round(each.start_s, _MAX_DIGITS),
                "end": round(each.end_s, _MAX_DIGITS),
                "text": each.text,
                "tokens": list(each.token_ids),
                "temperature": body.temperature,
                "avg_logprob": each.avg_logprob,
                "compression_ratio": compression_ratio(each.text),
                "no_speech_prob": each.no_speech_prob,
            }
            for index, each in enumerate(segments)
        ],
        "usage": _usage(recording),
    }


def compression_ratio(text: str) -> float:
    """Return the size of a text divided by its compressed (zlib) size. Repetitive text has a large
    ratio.
    """
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def _usage(recording: Recording) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(recording.seconds)}


async def _stream(recording: Recording) -> AsyncGenerator[bytes, None]:
    """Yield the events of the response."""
    text = StrippedText()
    async with aclosing(recording.texts()) as parts:
        async for part in parts:
            if delta := text.add(part):
                yield event({"type": "transcript.text.delta", "delta": delta})
    num_input, num_output = recording.num_prompt_tokens, recording.num_output_tokens
    usage = {
        "type": "tokens",
        "input_tokens": num_input,
        "output_tokens": num_output,
        "total_tokens": num_input + num_output,
    }
    yield event({"type": "transcript.text.done", "text": text.whole, "usage": usage})


class StrippedText:
    """Joins the parts of a text, without white space at the beginning and end of the whole.

    Attributes:
        whole: the text that was returned so far.
    """

    def __init__(self) -> None:
        self.whole = ""
        self._space = ""

    def add(self, part: str) -> str:
        """Add a part, and return the text that can be shown now. White space is held back until
        text follows it.
        """
        part = self._space + part
        if not self.whole:
            part = part.lstrip()
        shown = part.rstrip()
        self._space = part[len(shown) :]
        self.whole += shown
        return shown
