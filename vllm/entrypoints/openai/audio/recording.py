"""Transcribe one recording: its pieces run at the same time, in bounded number, and their texts are
put in order again.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from math import exp
from typing import Any

from vllm.engine.output.detokenizer import Detokenizer
from vllm.entrypoints.http.errors import GenerationError, refuse_failed
from vllm.entrypoints.openai.audio.pieces import Piece, Samples, is_silent, split_audio
from vllm.entrypoints.openai.protocol.sampling import sampling_numbers
from vllm.entrypoints.openai.protocol.transcription import SpeechFields
from vllm.entrypoints.openai.shared.merge import merge
from vllm.entrypoints.openai.shared.prompts import engine_key, max_running, output_budget
from vllm.entrypoints.shared.context import ServerContext
from vllm.errors import RequestError
from vllm.inputs import TokensPrompt
from vllm.multimodal.interface.source import MediaSource
from vllm.multimodal.interface.speech import SpeechRules, Task
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

ENGLISH = "en"
_TOKEN_CHARS = 128
"""No text that a model reads before a recording has more characters for each token."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of the text, with its times in the recording and the confidence of the model."""

    piece: Piece
    start_s: float
    end_s: float
    text: str
    token_ids: Sequence[int]
    avg_logprob: float
    """0 unless the answer has it."""
    no_speech_prob: float
    """0 unless the answer has it."""


@dataclass(frozen=True, slots=True)
class _Result:
    """The output of the model for a piece."""

    output: CompletionOutput
    no_speech_prob: float


class Recording:
    """Transcribes a recording with the engine.

    Args:
        context: context of the server; its engine is ready.
        rules: speech rules of the model.
        body: body of the request.
        task: task of the model: transcribe or translate.
        samples: [n] samples at the sampling rate of the model, n > 0.
        response_id: beginning of the request ids in the engine.
        trace_headers: trace headers of the request.

    Attributes:
        language: code of the spoken language, after `prepare`.
        num_prompt_tokens: prompt tokens of all pieces that have begun.
        num_output_tokens: output tokens of all pieces so far.
    """

    def __init__(
        self,
        context: ServerContext,
        rules: SpeechRules,
        body: SpeechFields,
        task: Task,
        samples: Samples,
        response_id: str,
        trace_headers: Mapping[str, str] | None,
    ) -> None:
        self.language: str = ENGLISH
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self._context = context
        self._engine = context.engine
        self._rules = rules
        self._body = body
        self._task = task
        self._samples = samples
        self._engine_key = engine_key(response_id)
        self._trace_headers = trace_headers
        pieces = split_audio(samples, rules.sampling_rate, rules.seconds_per_piece)
        self._pieces = [each for each in pieces if not is_silent(samples[each.start : each.end])]
        self._prompt: list[int] = []
        self._params = SamplingParams()

    @property
    def seconds(self) -> float:
        """Length of the recording in seconds."""
        return len(self._samples) / self._rules.sampling_rate

    def start_of(self, piece: Piece) -> float:
        """Return the time at which a piece begins, in seconds."""
        return piece.start / self._rules.sampling_rate

    async def prepare(self) -> None:
        """Detect the language, and create the prompt and the parameters of all pieces.

        Raises:
            RequestError: the model does not know the language or the task, or a value is out of
                range.
        """
        rules, body = self._rules, self._body
        previous: list[int] = []
        if body.prompt.strip():
            previous = await self._tokens_before(body.prompt.strip())
        language: str | None = None
        if body.language:
            language = self.language = rules.language_code(body.language.strip())
        is_detected = language is None and bool(rules.language_tokens())
        make_prompt = partial(
            rules.prompt, task=self._task, with_times=body.has_times, previous=previous
        )
        # Make the prompt now, so that errors are found before the first piece runs. If the language
        # is detected later, the length stays the same: prompts of all languages have equal length.
        self._prompt = make_prompt(language=rules.languages[0] if is_detected else language)
        self._params = self._make_params(len(self._prompt))
        if is_detected and self._pieces:
            self.language = await self._detect_language()
            self._prompt = make_prompt(language=self.language)

    async def texts(self) -> AsyncGenerator[str, None]:
        """Yield the text while it is generated, piece by piece in order."""
        held: list[list[str]] = [[] for _ in self._pieces]
        writers = [self._make_writer() for _ in self._pieces]
        is_done = [False] * len(self._pieces)
        current = 0
        sources = [self._generate(i, RequestOutputKind.DELTA) for i in range(len(self._pieces))]
        async with aclosing(merge(sources, max_running(self._context))) as outputs:
            async for index, output in outputs:
                writer, is_done[index] = writers[index], output.finished
                held[index].append(writer.push(self._words(output.outputs[0].token_ids)))
                if output.finished:
                    held[index].append(writer.flush())
                while current < len(held):
                    for text in held[current]:
                        yield text
                    held[current].clear()
                    if not is_done[current]:
                        break
                    current += 1

    async def text(self) -> str:
        """Return the whole text."""
        written = ""
        for result in await self._results():
            writer = self._make_writer()
            written += writer.push(self._words(result.output.token_ids)) + writer.flush()
        return written.strip()

    async def segments(self) -> list[Segment]:
        """Return the segments of the text with their times."""
        results = await self._results()
        rate = self._rules.sampling_rate
        found = []
        for piece, result in zip(self._pieces, results, strict=True):
            writer, start_s = self._make_writer(), piece.start / rate
            spoken = self._rules.segments(result.output.token_ids, (piece.end - piece.start) / rate)
            for each in spoken:
                text = writer.push(each.token_ids)
                found.append(
                    Segment(
                        piece,
                        start_s + each.start_s,
                        start_s + each.end_s,
                        text + writer.flush() if each is spoken[-1] else text,
                        each.token_ids,
                        _mean_logprob(result.output, each.first, each.last),
                        result.no_speech_prob,
                    )
                )
        return found

    # ---- the engine -----------------------------------------------------------------------

    async def _results(self) -> list[_Result]:
        found: dict[int, _Result] = {}
        sources = [self._result(i) for i in range(len(self._pieces))]
        async with aclosing(merge(sources, max_running(self._context))) as results:
            async for index, result in results:
                found[index] = result
        return [found[index] for index in range(len(self._pieces))]

    async def _result(self, index: int) -> AsyncGenerator[_Result, None]:
        async with aclosing(self._generate(index, RequestOutputKind.FINAL_ONLY)) as outputs:
            output = (await anext(outputs)).outputs[0]
        token, silence = self._rules.no_speech_token, 0.0
        if self._body.has_confidence and token is not None:
            said = await self._one_token(index, [token], "silence")
            silence = exp(_mean_logprob(said, 0, 1))
        yield _Result(output, silence)

    async def _generate(
        self, index: int, kind: RequestOutputKind
    ) -> AsyncGenerator[RequestOutput, None]:
        params = self._params.clone()
        params.output_kind = kind
        self.num_prompt_tokens += len(self._prompt)
        outputs = self._start(index, self._prompt, params, "")
        async with aclosing(outputs):
            async for output in outputs:
                refuse_failed(output.outputs[0])
                # The text of an aborted output is incomplete.
                if output.outputs[0].finish_reason == "abort":
                    raise GenerationError(
                        "a part of the recording was aborted, so its text is not complete. Send "
                        "the recording again"
                    )
                self.num_output_tokens += len(output.outputs[0].token_ids)
                yield output

    async def _detect_language(self) -> str:
        """Return the code of the language of the first piece that is not silent."""
        codes = self._rules.language_tokens()
        said = await self._one_token(0, list(codes), "language")
        return codes[said.token_ids[0]]

    async def _one_token(self, index: int, allowed: list[int], what: str) -> CompletionOutput:
        """Return the most likely of the allowed tokens after the beginning of a prompt."""
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            allowed_token_ids=allowed,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        outputs = self._start(index, self._rules.start_prompt(), params, f"-{what}")
        async with aclosing(outputs):
            output = (await anext(outputs)).outputs[0]
        refuse_failed(output)
        return output

    def _start(
        self, index: int, token_ids: list[int], params: SamplingParams, suffix: str
    ) -> AsyncGenerator[RequestOutput, None]:
        piece, rate = self._pieces[index], self._rules.sampling_rate
        sound = MediaSource(
            modality="audio",
            where="file",
            samples=self._samples[piece.start : piece.end],
            sampling_rate=rate,
        )
        prompt: TokensPrompt = {
            "prompt_token_ids": token_ids,
            "multi_modal_data": {"audio": [sound]},
        }
        return self._engine.generate(
            prompt,
            params,
            f"{self._engine_key}-{index}{suffix}",
            lora_request=self._context.adapter(self._body.model),
            trace_headers=self._trace_headers,
        )

    def _make_params(self, num_prompt_tokens: int) -> SamplingParams:
        body, defaults = self._body, self._engine.generation_defaults
        return SamplingParams.from_optional(
            **sampling_numbers(body, defaults),
            max_tokens=output_budget(
                self._context.config, defaults, num_prompt_tokens, body.max_completion_tokens
            ),
            logprobs=0 if body.has_confidence else None,
            detokenize=False,
        )

    # ---- text -----------------------------------------------------------------------------

    async def _tokens_before(self, text: str) -> list[int]:
        """Return the tokens of a text before the recording, in which names of special tokens are
        ordinary words.
        """
        if not self._rules.max_previous_tokens:
            raise RequestError(
                "prompt: this model does not accept text before the sound. Leave prompt out",
                param="prompt",
            )

        end = text[-_TOKEN_CHARS * self._rules.max_previous_tokens :]

        def encode(processor: Any) -> list[int]:
            given = processor.tokenizer(
                f" {end}", add_special_tokens=False, split_special_tokens=True
            )
            return self._words(given["input_ids"])

        return await self._engine.run_in_background(encode)

    def _make_writer(self) -> Detokenizer:
        return self._engine.output_processor.make_detokenizer(self._prompt)

    def _words(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that are text, without time tokens, which a model may write without
        being asked.
        """
        spoken = self._rules.segments(token_ids, self._rules.seconds_per_piece)
        return [token for each in spoken for token in each.token_ids]


def _mean_logprob(output: CompletionOutput, first: int, last: int) -> float:
    """Return the mean log-probability of the tokens of an output from `first` to `last`; 0 if it
    was not asked for.
    """
    if output.logprobs is None:
        return 0.0
    positions, tokens = output.logprobs[first:last], output.token_ids[first:last]
    values = [each[token].logprob for each, token in zip(positions, tokens, strict=True)]
    return sum(values) / len(values) if values else 0.0
