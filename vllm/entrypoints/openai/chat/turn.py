"""One turn of a conversation: runs a request and parses its output. Independent of wire formats.

Chat completions, responses and messages convert their bodies to a `ChatCompletionRequest`, and
format the result:

    turn = await prepare_turn(context, body, request_id)      # RequestError: nothing has run yet
    choices = await turn.complete()                           # all at once
    async with aclosing(turn.stream()) as deltas:             # or piece by piece
        async for delta in deltas: ...
    turn.usage                                                # counts so far, or of everything

Closing the stream, or cancelling `complete`, aborts the request in the engine.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.engine.input.pooling_input import refuse_generation
from vllm.entrypoints.openai.chat.custom_calls import CustomCalls
from vllm.entrypoints.openai.chat.output_reader import OutputReader, parser_failures
from vllm.entrypoints.openai.chat.prompt import chat_prompt, template_kwargs
from vllm.entrypoints.openai.chat.thinking import switch_of
from vllm.entrypoints.openai.chat.tool_choice import (
    NamedToolReader,
    RequiredToolReader,
    ToolCallDelta,
    check_grammars,
    merge_deltas,
    tool_constraint,
)
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.entrypoints.openai.protocol.sampling import (
    check_sampling_fields,
    guided_decoding,
    sampling_params,
)
from vllm.entrypoints.openai.shared.prompts import output_budget
from vllm.entrypoints.shared import off_loop
from vllm.entrypoints.shared.context import ServerContext
from vllm.entrypoints.shared.errors import refuse_failed
from vllm.errors import RequestError
from vllm.guided_decoding_params import GuidedDecodingParams
from vllm.inputs import TokensPrompt
from vllm.outputs import CompletionOutput, Logprob, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from vllm.entrypoints.openai.tool_parsers.base import ToolParser
    from vllm.entrypoints.openai.tool_parsers.plugin import ForeignToolParser
    from vllm.entrypoints.shared.server_args import ServerArgs
    from vllm.reasoning import ReasoningParser
    from vllm.reasoning.plugin import ForeignReasoningParser


@dataclass(slots=True)
class TurnDelta:
    """The new parts of one answer. The last delta of an answer has a finish reason.

    Attributes:
        index: of the answer, 0 to n - 1.
        reasoning, content: new text, often empty.
        tool_calls: `DeltaToolCall`s as dicts: `index` and what is new of `id`, `type` and
            `function` (`name`, `arguments`), or `custom` (`name`, `input`).
        token_ids: new output tokens, the end token included.
        logprobs: of these tokens, token id -> Logprob, the sampled one first; None without.
        finish_reason: "stop", "length", "tool_calls" or "abort"; None before the end.
        stop_reason: stop string or stop token.
    """

    index: int
    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it has nothing to send."""
        return not (self.reasoning or self.content or self.tool_calls or self.finish_reason)


@dataclass(slots=True)
class TurnChoice:
    """One complete answer; fields as in `TurnDelta`.

    Attributes:
        reasoning, content: None if there is none. Content is "" and not None if there is nothing
            else, and next to a call that the request named.
        tool_calls: `ToolCall`s as dicts: `id`, `type` and `function` (`name`, `arguments`), or
            `custom` (`name`, `input`).
    """

    index: int
    reasoning: str | None
    content: str | None
    tool_calls: list[dict[str, Any]]
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: int | str | None


@dataclass(slots=True)
class TurnUsage:
    """Numbers of tokens so far.

    Attributes:
        reasoning_tokens: output tokens that were reasoning; 0 without a reasoning parser.
        cached_tokens: prompt tokens found in the prefix cache; None is not known yet.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int | None = None


class ChatTurn:
    """A request that is ready to run, once. Made by `prepare_turn`.

    Attributes:
        request_id: of the engine request.
        model: name of the model for the response.
        prompt: token ids, and their text.
        params: as sent to the engine.
        usage: see there.
        prompt_logprobs: available once the output is complete, if requested.
    """

    def __init__(
        self,
        context: ServerContext,
        body: ChatCompletionRequest,
        request_id: str,
        prompt: TokensPrompt,
        params: SamplingParams,
        readers: Sequence[OutputReader],
        trace_headers: Mapping[str, str] | None,
    ) -> None:
        self.request_id = request_id
        self.model = context.check_model(body.model)
        self.prompt = prompt
        self.params = params
        self.usage = TurnUsage(len(prompt["prompt_token_ids"]))
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._engine = context.engine
        self._adapter = context.adapter(body.model)
        self._body = body
        self._trace_headers = trace_headers
        self._readers = readers

    @property
    def is_plain(self) -> bool:
        """Whether all text is content: there is neither reasoning nor tool calls."""
        return self._readers[0].is_plain

    async def stream(self) -> AsyncGenerator[TurnDelta, None]:
        """Deltas of all answers, one per engine step; some are empty.

        Raises:
            RequestError, CapacityError, RequestTimeoutError, EngineDeadError: see `AsyncLLM`.
            GenerationError: the request failed while it ran.
        """
        async with aclosing(self._run(RequestOutputKind.DELTA)) as outputs:
            async for output in outputs:
                for sample in output.outputs:
                    yield self._read(sample)

    async def complete(self) -> list[TurnChoice]:
        """All answers, the best `n` of `best_of`. Raises like `stream`."""
        samples: list[CompletionOutput] = []
        async with aclosing(self._run(RequestOutputKind.FINAL_ONLY)) as outputs:
            async for output in outputs:
                samples = output.outputs
                self.prompt_logprobs = output.prompt_logprobs
                self.usage.completion_tokens += output.num_dropped_tokens
        return [self._choose(sample, self._read(sample)) for sample in samples]

    async def _run(self, kind: RequestOutputKind) -> AsyncGenerator[RequestOutput, None]:
        self.params.output_kind = kind
        prompt: TokensPrompt = {"prompt_token_ids": self.prompt["prompt_token_ids"]}
        if "cache_salt" in self.prompt:
            prompt["cache_salt"] = self.prompt["cache_salt"]
        outputs = self._engine.generate(
            prompt,
            self.params,
            self.request_id,
            lora_request=self._adapter,
            trace_headers=self._trace_headers,
            priority=self._body.priority or 0,
        )
        async with aclosing(outputs):
            async for output in outputs:
                if output.num_cached_tokens is not None:
                    self.usage.cached_tokens = output.num_cached_tokens
                yield output

    def _read(self, sample: CompletionOutput) -> TurnDelta:
        refuse_failed(sample)
        reader = self._readers[sample.index]
        is_last = sample.finish_reason is not None
        read = reader.feed(sample.text, sample.token_ids, is_last=is_last)
        self.usage.completion_tokens += len(sample.token_ids)
        if read.reasoning and not read.content:
            self.usage.reasoning_tokens += len(sample.token_ids)
        reason = sample.finish_reason
        if reason == "stop" and reader.has_called and self._body.named_tool is None:
            reason = "tool_calls"
        return TurnDelta(
            sample.index,
            read.reasoning,
            read.content,
            read.tool_calls,
            sample.token_ids,
            sample.logprobs,
            reason,
            sample.stop_reason,
        )

    def _choose(self, sample: CompletionOutput, delta: TurnDelta) -> TurnChoice:
        calls = merge_deltas(delta.tool_calls)
        is_alone = not (delta.reasoning or calls) or self._body.named_tool is not None
        return TurnChoice(
            sample.index,
            delta.reasoning or None,
            delta.content if delta.content or is_alone else None,
            calls,
            sample.token_ids,
            sample.logprobs if self._body.logprobs else None,
            delta.finish_reason or "stop",
            sample.stop_reason,
        )


async def prepare_turn(
    context: ServerContext,
    body: ChatCompletionRequest,
    request_id: str,
    *,
    trace_headers: Mapping[str, str] | None = None,
) -> ChatTurn:
    """Check a request, and make its prompt.

    Args:
        context: of the server; its engine is ready.
        body: the tool parser may change fields of it.
        request_id: unique among running requests; also the beginning of ids that clients see.
        trace_headers: W3C trace context of the request.

    Raises:
        NotFoundError: there is no such model.
        RequestError: something else is wrong with it; names the field.
    """
    context.check_model(body.model)
    refuse_generation(context.config.model.pooler)
    check_sampling_fields(body)
    check_tools(context, body)
    guided = await off_loop.run(partial(_output_constraint, body))
    # First, because a tool parser may need special tokens in the text.
    readers = [
        make_reader(context, body, is_constrained=guided is not None)
        for _ in range(body.num_samples)
    ]
    prompt = await chat_prompt(
        context,
        body,
        with_tools=body.tool_choice != "none",
        truncate=body.truncate_prompt_tokens,
        cache_salt=body.cache_salt,
        max_tokens=context.config.scheduler.max_model_len - 1,
    )
    defaults = context.engine.generation_defaults
    num_prompt_tokens = len(prompt["prompt_token_ids"])
    make_params = partial(
        sampling_params,
        body,
        defaults,
        max_tokens=output_budget(context.config, defaults, num_prompt_tokens, body.wanted_tokens),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
        guided=guided,
    )
    params = await off_loop.run(make_params)
    return ChatTurn(context, body, request_id, prompt, params, readers, trace_headers)


def _output_constraint(body: ChatCompletionRequest) -> GuidedDecodingParams | None:
    """The constraint of the output, from its tool calls or from the request."""
    if body.tool_choice in ("none", "auto"):
        return guided_decoding(body)
    return tool_constraint(body)


def check_tools(context: ServerContext, body: ChatCompletionRequest) -> None:
    """Refuse tool choices that the server is not configured for.

    Raises:
        RequestError: tool choice auto without a tool parser, or a grammar of a custom tool that
            cannot be enforced.
    """
    check_grammars(body)
    args = context.args
    if body.tool_choice != "auto":
        return
    if not args.enable_auto_tool_choice or args.tool_call_parser is None:
        raise RequestError(
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be '
            "set; or use tool_choice required, none, or a named function",
            param="tool_choice",
        )


def make_reader(
    context: ServerContext, body: ChatCompletionRequest, *, is_constrained: bool
) -> OutputReader:
    """Make the reader for one output of a request. Its tool parser adjusts the request.

    There is no reasoning if structured output begins with the first token.
    """
    args, tokenizer = context.args, context.engine.tokenizer
    max_calls = 1 if body.parallel_tool_calls is False else None
    if (name := body.only_call) is not None:
        is_custom = name in body.custom_tools
        return OutputReader(forced=NamedToolReader(name, is_custom=is_custom))
    custom = CustomCalls(body.custom_tools) if body.custom_tools else None
    if body.tool_choice == "required":
        return OutputReader(forced=RequiredToolReader(), max_calls=max_calls, custom=custom)
    reasoning = tools = None
    name = context.reasoning_parser
    if name is not None and not is_constrained:
        with parser_failures("reasoning", name):
            reasoning = _make_reasoning_parser(name, args, tokenizer, body)
    if body.tool_choice == "auto" and args.tool_call_parser is not None:
        with parser_failures("tool", args.tool_call_parser):
            tools = _make_tool_parser(args.tool_call_parser, tokenizer)
            tools.adjust_request(body)
    names = name, args.tool_call_parser
    return OutputReader(reasoning, tools, max_calls=max_calls, custom=custom, names=names)


def _make_reasoning_parser(
    name: str, args: "ServerArgs", tokenizer: Any, body: ChatCompletionRequest
) -> "ReasoningParser | ForeignReasoningParser | None":
    """A parser for one output; None if it has no reasoning."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.reasoning.plugin import ForeignReasoningParser, is_foreign

    kind = ReasoningParserManager.get(name)
    is_thinking = switch_of(template_kwargs(args, body))
    if not is_foreign(kind):
        return kind(tokenizer, is_thinking=is_thinking)
    return None if is_thinking is False else ForeignReasoningParser(kind(tokenizer), body)


def _make_tool_parser(name: str, tokenizer: Any) -> "ToolParser | ForeignToolParser":
    from vllm.entrypoints.openai.tool_parsers import ToolParserManager
    from vllm.entrypoints.openai.tool_parsers.plugin import ForeignToolParser, is_foreign

    kind = ToolParserManager.get(name)
    return ForeignToolParser(kind(tokenizer)) if is_foreign(kind) else kind(tokenizer)
