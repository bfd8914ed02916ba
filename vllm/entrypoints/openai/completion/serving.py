"""Serve POST /v1/completions."""

import asyncio
import copy
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.engine.input.input_processor import LONG_TEXT_CHARS
from vllm.entrypoints.http import off_loop
from vllm.entrypoints.http.body_route import BodyRoute
from vllm.entrypoints.http.errors import openai_stream, refuse_failed
from vllm.entrypoints.http.sse import run_until_disconnect
from vllm.entrypoints.openai.completion.choice import CompletionPrompt, CompletionText
from vllm.entrypoints.openai.protocol.base import STREAMED, error_responses, now
from vllm.entrypoints.openai.protocol.completion import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.protocol.sampling import (
    beam_search_params,
    check_sampling_fields,
    guided_decoding,
    sampling_params,
)
from vllm.entrypoints.openai.shared import beam_requests
from vllm.entrypoints.openai.shared.chunks import (
    ChunkWriter,
    includes_usage,
    json_response,
    usage_of,
)
from vllm.entrypoints.openai.shared.logprob_formats import MANY_POSITIONS, prompt_logprobs
from vllm.entrypoints.openai.shared.merge import merge
from vllm.entrypoints.openai.shared.prompts import (
    engine_key,
    max_running,
    output_budget,
    read_embeds,
    request_id_of,
    tokenize,
    trace_headers_of,
)
from vllm.entrypoints.shared.context import ServerContext, get_context
from vllm.errors import RequestError
from vllm.inputs import TokensPrompt
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.transformers_utils.fill_in_middle import FillInMiddle

router = APIRouter(route_class=BodyRoute)


@router.post(
    "/v1/completions",
    response_model=CompletionResponse,
    responses=STREAMED | error_responses(400, 404, 500, 503),
)
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continue one or several prompts."""
    context = get_context(request)
    request_id = "cmpl-" + request_id_of(request, body.request_id)
    work = _Completion.prepare(context, body, request_id, trace_headers_of(request))
    completion = await run_until_disconnect(request, work)
    if body.use_beam_search:
        return json_response(await run_until_disconnect(request, completion.search_beams()))
    await off_loop.run(completion.make_params)
    if body.stream:
        return openai_stream(completion.stream())
    return await run_until_disconnect(request, completion.complete())


class _Completion:
    """A completion request, with its prompts and their outputs."""

    def __init__(
        self,
        context: ServerContext,
        body: CompletionRequest,
        request_id: str,
        prompts: list[CompletionPrompt],
        trace_headers: Any,
    ) -> None:
        self.model = context.check_model(body.model)
        self._context = context
        self._engine = context.engine
        self._body = body
        self._request_id = request_id
        self._engine_key = engine_key(request_id)
        self._prompts = prompts
        self._trace_headers = trace_headers
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._num_output_tokens = 0
        self._num_cached_tokens = [0] * len(prompts)
        self._all_params: list[SamplingParams] = []
        self._fill = FillInMiddle.of(context.engine.tokenizer) if body.suffix else None

    @classmethod
    async def prepare(
        cls, context: ServerContext, body: CompletionRequest, request_id: str, trace_headers: Any
    ) -> "_Completion":
        """Check the request, and tokenise its prompts.

        Raises:
            RequestError: the request is not valid.
        """
        context.check_model(body.model)
        check_sampling_fields(body)
        given, embeds = body.prompts(), body.embeds()
        if not given and not embeds:
            raise RequestError(
                "prompt: the list is empty; send at least one prompt", param="prompt"
            )
        if body.suffix:
            fill = FillInMiddle.of(context.engine.tokenizer)
            given = [fill.prompt(cast(str, prompt), body.suffix) for prompt in given]
        is_long = sum(len(prompt) for prompt in given) > LONG_TEXT_CHARS
        prompts = [
            CompletionPrompt(
                context,
                body,
                await read_embeds(
                    context.engine,
                    each,
                    truncate=body.truncate_prompt_tokens,
                    cache_salt=body.cache_salt,
                ),
            )
            for each in embeds
        ]
        for prompt in given:
            await asyncio.sleep(0)  # let other tasks run between two prompts
            tokenized = await tokenize(
                context.engine,
                {"prompt": prompt, "add_special_tokens": body.add_special_tokens}
                if isinstance(prompt, str)
                else prompt,
                truncate=body.truncate_prompt_tokens,
                cache_salt=body.cache_salt,
                is_long=is_long,
                max_tokens=context.config.scheduler.max_model_len - 1,
            )
            prompts.append(CompletionPrompt(context, body, tokenized))
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        body.check_prompt_logprobs(num_prompt_tokens, context.args)
        return cls(context, body, request_id, prompts, trace_headers)

    # ---- all at once ----------------------------------------------------------------------

    async def complete(self) -> Response:
        """Return the complete response."""
        outputs: list[RequestOutput | None] = [None] * len(self._prompts)
        async with aclosing(self._run(RequestOutputKind.FINAL_ONLY)) as finished:
            async for index, output in finished:
                outputs[index] = output
        results = [output for output in outputs if output is not None]
        assert len(results) == len(outputs)
        num_positions = sum(
            len(positions or ())
            for prompt, result in zip(self._prompts, results, strict=True)
            for positions in (prompt.logprobs, *(sample.logprobs for sample in result.outputs))
        )
        write = partial(self._write, results)
        return await off_loop.run(write, is_large=num_positions >= MANY_POSITIONS)

    def _write(self, results: list[RequestOutput]) -> Response:
        choices: list[dict[str, Any]] = []
        for prompt, result in zip(self._prompts, results, strict=True):
            self._count(result.outputs)
            self._num_output_tokens += result.num_dropped_tokens
            for sample in result.outputs:
                choices.append(self._choice(len(choices), prompt, sample))
        return json_response({**self._head(), "choices": choices, "usage": self._usage()})

    async def search_beams(self) -> dict[str, Any]:
        """Run a beam search, and return the body of the response, in which each choice is a
        beam.
        """
        body, defaults = self._body, self._engine.generation_defaults
        choices: list[dict[str, Any]] = []
        for index, prompt in enumerate(self._prompts):
            beams = await beam_requests.search(
                self._context,
                cast(TokensPrompt, prompt.for_engine),
                beam_search_params(body, defaults, self._max_tokens(prompt)),
                self._engine_id(index),
                self._context.adapter(self.model),
                priority=body.priority or 0,
            )
            for beam in beams:
                self._num_output_tokens += len(beam.logprobs)
                choices.append(
                    {
                        "index": len(choices),
                        "text": (prompt.text if body.echo else "") + (beam.text or ""),
                        "logprobs": None,
                        "finish_reason": beam.finish_reason,
                        "stop_reason": beam.stop_reason,
                        "prompt_logprobs": None,
                    }
                )
        return {**self._head(), "choices": choices, "usage": self._usage()}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._request_id,
            "object": "text_completion",
            "created": now(),
            "model": self.model,
        }

    def _choice(
        self, index: int, prompt: CompletionPrompt, sample: CompletionOutput
    ) -> dict[str, Any]:
        shown = CompletionText(prompt).read(sample)
        asked = prompt.logprobs if self._body.prompt_logprobs is not None else None
        return {"index": index, **shown, "prompt_logprobs": prompt_logprobs(asked)}

    # ---- piece by piece -------------------------------------------------------------------

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the response."""
        writer = ChunkWriter(self._request_id, "text_completion", self.model)
        num_samples = self._body.num_samples
        texts = [CompletionText(prompt) for prompt in self._prompts for _ in range(num_samples)]
        held: list[list[CompletionOutput]] = [[] for _ in self._prompts]
        async with aclosing(self._run(RequestOutputKind.DELTA)) as results:
            async for index, output in results:
                samples = output.outputs
                if self._prompts[index].is_waiting:
                    held[index] += samples
                    continue
                if held[index]:
                    samples, held[index] = held[index] + samples, []
                for sample in samples:
                    self._count([sample])
                    usage = self._usage() if self._body.has_continuous_usage else None
                    number = index * num_samples + sample.index
                    choice = {"index": number, **texts[number].read(sample)}
                    yield writer.choice(choice, usage)
        if includes_usage(self._context, self._body):
            yield writer.usage(self._usage())

    # ---- the engine -----------------------------------------------------------------------

    def make_params(self) -> None:
        """Create the parameters of all prompts before the first one runs, so that an error stops
        all of them.

        Raises:
            RequestError: a value is out of range, or a prompt leaves too little room for the
                output.
        """
        # The parameters of the prompts differ only in numbers, so lists are checked once and
        # shared.
        shared = self._params(self._prompts[0])
        for prompt in self._prompts:
            own = copy.copy(shared)
            own.max_tokens = self._num_wanted(prompt)
            if own.min_tokens > own.max_tokens:
                own = self._params(prompt)  # raises an error with the reason
            self._all_params.append(own)

    def _run(self, kind: RequestOutputKind) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        for params in self._all_params:
            params.output_kind = kind
        return self._checked(
            merge(
                [self._generate(index, each) for index, each in enumerate(self._all_params)],
                max_running(self._context, self._all_params[0].num_sampled),
            )
        )

    async def _checked(
        self, outputs: AsyncGenerator[tuple[int, RequestOutput], None]
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        async with aclosing(outputs):
            async for index, output in outputs:
                self._num_cached_tokens[index] = output.num_cached_tokens or 0
                if output.prompt_logprobs is not None:
                    self._prompts[index].logprobs = output.prompt_logprobs
                for sample in output.outputs:
                    refuse_failed(sample)
                yield index, output

    def _generate(self, index: int, params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        return self._engine.generate(
            self._prompts[index].for_engine,
            params,
            self._engine_id(index),
            lora_request=self._context.adapter(self.model),
            trace_headers=self._trace_headers,
            priority=self._body.priority or 0,
        )

    def _engine_id(self, index: int) -> str:
        if len(self._prompts) == 1:
            return self._engine_key
        return f"{self._engine_key}-{index}"

    def _max_tokens(self, prompt: CompletionPrompt) -> int:
        return output_budget(
            self._context.config,
            self._engine.generation_defaults,
            len(prompt.token_ids),
            self._body.max_tokens,
        )

    def _num_wanted(self, prompt: CompletionPrompt) -> int:
        # The engine samples at least one token; if only the prompt is requested, that token is not
        # shown.
        return 1 if prompt.is_echo_only else self._max_tokens(prompt)

    def _params(self, prompt: CompletionPrompt) -> SamplingParams:
        body = self._body
        params = sampling_params(
            body,
            self._engine.generation_defaults,
            max_tokens=self._num_wanted(prompt),
            logprobs=body.logprobs,
            output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
            guided=guided_decoding(body),
        )
        if self._fill is not None:
            params.stop_token_ids = [*(params.stop_token_ids or ()), *self._fill.stop_token_ids]
        if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
            params.prompt_logprobs = body.logprobs
        return params

    def _count(self, samples: list[CompletionOutput]) -> None:
        if not self._prompts[0].is_echo_only:
            self._num_output_tokens += sum(len(sample.token_ids) for sample in samples)

    def _usage(self) -> dict[str, Any]:
        return usage_of(
            self._context,
            self._num_prompt_tokens,
            self._num_output_tokens,
            sum(self._num_cached_tokens),
        )
