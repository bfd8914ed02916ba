"""Run one turn of a conversation and parse its output. Independent of wire formats.

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

import msgspec

from vllm.engine.input.pooling_input import refuse_generation
from vllm.entrypoints.conversation.thinking import switch_of
from vllm.entrypoints.http import off_loop
from vllm.entrypoints.http.errors import refuse_failed
from vllm.entrypoints.http.ignored import note_ignored
from vllm.entrypoints.openai.chat.custom_calls import CustomCalls
from vllm.entrypoints.openai.chat.output_reader import OutputReader, parser_failures
from vllm.entrypoints.openai.chat.prompt import chat_prompt, template_kwargs
from vllm.entrypoints.openai.chat.thought_tokens import ThoughtTokens
from vllm.entrypoints.openai.chat.tool_choice import (
    MakeId,
    NamedToolReader,
    RequiredToolReader,
    ToolCallDelta,
    merge_deltas,
    note_free_grammars,
    random_id,
    strict_schema,
    tool_constraint,
)
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm.entrypoints.openai.protocol.sampling import (
    check_sampling_fields,
    guided_decoding,
    sampling_params,
)
from vllm.entrypoints.openai.shared.logprob_formats import bytes_of_tokens
from vllm.entrypoints.openai.shared.prompts import output_budget
from vllm.entrypoints.shared.context import ServerContext
from vllm.errors import RequestError
from vllm.guided_decoding_params import GrammarStart, GuidedDecodingParams
from vllm.inputs import TokensPrompt
from vllm.outputs import CompletionOutput, Logprob, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.transformers_utils.special_tokens import SpecialTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vllm.entrypoints.openai.tool_parsers.base import ToolParser
    from vllm.entrypoints.openai.tool_parsers.plugin import VllmToolParserAdapter
    from vllm.entrypoints.shared.server_args import ServerArgs
    from vllm.reasoning import ReasoningParser
    from vllm.reasoning.plugin import ForeignReasoningParser


@dataclass(slots=True)
class TurnDelta:
    """The new parts of one answer. The last delta of an answer has a finish reason.

    Attributes:
        index: index of the answer, 0 to n - 1.
        reasoning, content: new text, often empty.
        tool_calls: `DeltaToolCall`s as dicts: `index` and the new parts of `id`, `type` and
            `function` (`name`, `arguments`), or `custom` (`name`, `input`).
        token_ids: new output tokens, the end token included.
        logprobs: log-probabilities for each token, token id -> Logprob, the sampled token first;
            None if not requested.
        finish_reason: "stop", "length", "tool_calls" or "abort"; None before the end.
        stop_reason: stop string or stop token.
        is_call_cut: the last call is incomplete, because a stop string or a stop token of the
            request was found inside it. The finish reason is "stop" then.
    """

    index: int
    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    is_call_cut: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether the delta has nothing to send."""
        return not (self.reasoning or self.content or self.tool_calls or self.finish_reason)


@dataclass(slots=True)
class TurnChoice:
    """One complete answer; fields as in `TurnDelta`.

    Attributes:
        reasoning, content: None if there is none. The content is "" instead if the answer is empty,
            or if the request named the called tool.
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
    is_call_cut: bool = False


@dataclass(slots=True)
class TurnUsage:
    """Token counts of a turn so far.

    Attributes:
        reasoning_tokens: output tokens of reasoning; None without a reasoning parser.
        cached_tokens: prompt tokens found in the prefix cache; None: not known yet.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    reasoning_tokens: int | None = None
    cached_tokens: int | None = None


class ChatTurn:
    """A request that is ready to run once. Created by `prepare_turn`.

    Attributes:
        request_id: id of the request in the engine.
        model: name of the model for the response.
        prompt: token ids, and their text.
        params: parameters that are sent to the engine.
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
        self._usage = TurnUsage(len(prompt["prompt_token_ids"]))
        self._has_reasoning = context.reasoning_parser is not None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._engine = context.engine
        self._adapter = context.adapter(body.model)
        self._body = body
        self._trace_headers = trace_headers
        self._readers = readers

    @property
    def usage(self) -> TurnUsage:
        """Token counts so far."""
        if self._has_reasoning:
            self._usage.reasoning_tokens = sum(r.num_thought_tokens for r in self._readers)
        return self._usage

    @property
    def is_plain(self) -> bool:
        """Whether all text is content, without reasoning or tool calls."""
        return self._readers[0].is_plain

    async def stream(self) -> AsyncGenerator[TurnDelta, None]:
        """Yield deltas of all answers, one per engine step. Some deltas are empty.

        Raises:
            RequestError, CapacityError, RequestTimeoutError, EngineDeadError: as in
            `AsyncLLM.generate`.
            GenerationError: the request failed while it ran.
        """
        async with aclosing(self._run(RequestOutputKind.DELTA)) as outputs:
            async for output in outputs:
                for sample in output.outputs:
                    yield self._read(sample)

    async def complete(self) -> list[TurnChoice]:
        """Return all answers; with `best_of`, the best `n`.

        Raises:
            The errors of `stream`.
        """
        samples: list[CompletionOutput] = []
        async with aclosing(self._run(RequestOutputKind.FINAL_ONLY)) as outputs:
            async for output in outputs:
                samples = output.outputs
                self.prompt_logprobs = output.prompt_logprobs
                self._usage.completion_tokens += output.num_dropped_tokens
        return [self._choose(sample, self._read(sample)) for sample in samples]

    async def _run(self, kind: RequestOutputKind) -> AsyncGenerator[RequestOutput, None]:
        self.params.output_kind = kind
        prompt: TokensPrompt = {"prompt_token_ids": self.prompt["prompt_token_ids"]}
        if "cache_salt" in self.prompt:
            prompt["cache_salt"] = self.prompt["cache_salt"]
        if "media" in self.prompt:
            prompt["media"] = self.prompt["media"]
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
                    self._usage.cached_tokens = output.num_cached_tokens
                yield output

    def _read(self, sample: CompletionOutput) -> TurnDelta:
        refuse_failed(sample)
        reader = self._readers[sample.index]
        is_last = sample.finish_reason is not None
        stop = self._stop_of_request(sample)
        is_cut = is_last and (
            sample.finish_reason != "stop" or (stop is not None and stop not in reader.markers)
        )
        read = reader.feed(sample.text, sample.token_ids, is_last=is_last, is_cut=is_cut)
        if self._body.hides_reasoning:
            read.reasoning = ""
        self._usage.completion_tokens += len(sample.token_ids)
        reason = sample.finish_reason
        is_call_cut = stop is not None and reader.has_open_call
        is_called = reader.has_called and not is_call_cut
        if reason == "stop" and is_called and self._body.named_tool is None:
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
            is_call_cut,
        )

    def _stop_of_request(self, sample: CompletionOutput) -> str | None:
        """Return the stop string of the request that ended the output, or the text of its stop
        token. None: the output has not ended, or the model ended it.
        """
        stop = sample.stop_reason if sample.finish_reason == "stop" else None
        if stop is None or isinstance(stop, str):
            return stop
        if stop not in (self._body.stop_token_ids or ()):
            return None
        tokenizer = self._engine.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode([stop]))

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
            delta.is_call_cut,
        )


async def prepare_turn(
    context: ServerContext,
    body: ChatCompletionRequest,
    request_id: str,
    *,
    trace_headers: Mapping[str, str] | None = None,
    fetched: dict[str, bytes] | None = None,
) -> ChatTurn:
    """Check a request, and create its prompt.

    Args:
        context: context of the server; its engine is ready.
        body: body of the request; the tool parser may change its fields.
        request_id: unique among running requests.
        trace_headers: W3C trace context of the request.
        fetched: content of media that are fetched already, by URL; or None.

    Raises:
        NotFoundError: there is no such model.
        RequestError: something else is wrong with the request; names the field.
    """
    context.check_model(body.model)
    refuse_generation(context.config.model.pooler)
    check_sampling_fields(body)
    check_tools(context, body)
    guided = await off_loop.run(partial(_output_constraint, body))
    prompt = await chat_prompt(
        context,
        body,
        with_tools=body.tool_choice != "none",
        truncate=body.truncate_prompt_tokens,
        cache_salt=body.cache_salt,
        max_tokens=context.config.scheduler.max_model_len - 1,
        fetched=fetched,
    )
    # Make the readers before the sampling parameters: a user's parser may change the request.
    readers = [make_reader(context, body, prompt) for _ in range(body.num_samples)]
    tokenizer = context.engine.tokenizer
    special = SpecialTokens.of(tokenizer)
    is_skipping = body.skip_special_tokens is not False
    kept = special.parts_of(readers[0].markers) if is_skipping else {}
    for reader in readers:
        reader.hide(kept.values())
        if context.reasoning_parser is not None and tokenizer is not None:
            skipped = special.ids.difference(kept) if is_skipping else ()
            reader.count_thoughts(ThoughtTokens(tokenizer, skipped))
    if guided is not None:
        starts = [_grammar_start(reader, body, guided, special) for reader in readers]
        guided.start = starts[0] if starts[0].is_late else None
    elif body.tool_choice == "auto":
        guided = await off_loop.run(partial(_strict_calls, readers[0], body, special, tokenizer))
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
    params.kept_special_token_ids = list(kept) or None
    return ChatTurn(context, body, request_id, prompt, params, readers, trace_headers)


def _output_constraint(body: ChatCompletionRequest) -> GuidedDecodingParams | None:
    """Return the constraint for the output, from its tool calls or from the request."""
    if body.tool_choice in ("none", "auto"):
        return guided_decoding(body)
    return tool_constraint(body)


def _strict_calls(
    reader: OutputReader,
    body: ChatCompletionRequest,
    special: SpecialTokens,
    tokenizer: "PreTrainedTokenizerBase | None",
) -> GuidedDecodingParams | None:
    """Return the constraint for calls that the model may make. None unless a tool is strict, and
    both the format of the parser and the tokenizer allow it.
    """
    form = reader.call_form
    schema = None if form is None else strict_schema(body, form)
    if schema is None:
        return None
    if tokenizer is None or bytes_of_tokens(tokenizer) is None:
        note_ignored("strict", "of tools", "a grammar needs a tokenizer that works on bytes")
        return None
    start = reader.call_start([tool.function.name for tool in body.function_tools])
    parts = special.parts_of((*start.thought_starts, *start.markers, *start.calls))
    start = msgspec.structs.replace(start, special_tokens=parts)
    return GuidedDecodingParams(json=schema, field="tools", start=start)


def check_tools(context: ServerContext, body: ChatCompletionRequest) -> None:
    """Refuse tool choices that need a server with another configuration.

    Raises:
        RequestError: tool choice auto without a tool parser.
    """
    note_free_grammars(body)
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
    context: ServerContext, body: ChatCompletionRequest, prompt: TokensPrompt
) -> OutputReader:
    """Create the reader for one output of a request. Its tool parser may change the request."""
    args, tokenizer = context.args, context.engine.tokenizer
    reasoning = tools = None
    forced: NamedToolReader | RequiredToolReader | None = None
    custom = CustomCalls(body.custom_tools) if body.custom_tools else None
    if context.reasoning_parser is not None:
        with parser_failures("reasoning", context.reasoning_parser):
            reasoning = _make_reasoning_parser(context, body, prompt)
    if (name := body.only_call) is not None:
        make_id = _id_maker(args, tokenizer, body)
        is_custom = name in body.custom_tools
        forced, custom = NamedToolReader(name, is_custom=is_custom, make_id=make_id), None
    elif body.tool_choice == "required":
        forced = RequiredToolReader(_id_maker(args, tokenizer, body))
    elif body.tool_choice == "auto" and args.tool_call_parser is not None:
        with parser_failures("tool", args.tool_call_parser):
            tools = _make_tool_parser(args.tool_call_parser, tokenizer)
            tools.adjust_request(body)
    return OutputReader(
        reasoning,
        tools,
        forced,
        max_calls=1 if body.parallel_tool_calls is False and name is None else None,
        custom=custom,
        names=(context.reasoning_parser, args.tool_call_parser),
    )


def _grammar_start(
    reader: OutputReader,
    body: ChatCompletionRequest,
    guided: GuidedDecodingParams,
    special: SpecialTokens,
) -> GrammarStart:
    """Return where the grammar of an output begins, after the thoughts of the model.

    A grammar of a response format applies only to answers: if the model may call tools instead, the
    texts that begin such calls are part of the result.
    """
    may_call = body.tool_choice == "auto" and body.has_response_format
    names = [tool.function.name for tool in body.function_tools] if may_call else []
    start = reader.grammar_start(names, allows_space=guided.ignores_space)
    texts = (*start.thought_starts, *start.thought_ends, *start.calls, *start.calls_in_thoughts)
    return msgspec.structs.replace(start, special_tokens=special.parts_of(texts))


def _make_reasoning_parser(
    context: ServerContext, body: ChatCompletionRequest, prompt: TokensPrompt
) -> "ReasoningParser | ForeignReasoningParser | None":
    """Create a reasoning parser for one output; None if the output has no reasoning."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.reasoning.plugin import ForeignReasoningParser, is_foreign

    assert context.reasoning_parser is not None
    tokenizer = context.engine.tokenizer
    kind = ReasoningParserManager.get(context.reasoning_parser)
    is_thinking = switch_of(template_kwargs(context.args, body))
    parser: ReasoningParser | ForeignReasoningParser
    if not is_foreign(kind):
        parser = kind(tokenizer, is_thinking=is_thinking)
    elif is_thinking is False:
        return None
    else:
        parser = ForeignReasoningParser(kind(tokenizer), body)
    text = prompt.get("prompt")
    if text is None:
        text = "" if tokenizer is None else str(tokenizer.decode(prompt["prompt_token_ids"]))
    parser.follow(text, is_continued=bool(body.continue_final_message))
    return parser


def _id_maker(args: "ServerArgs", tokenizer: Any, body: ChatCompletionRequest) -> MakeId:
    """Return the function that creates ids of required calls; the tool parser has one if it is set.

    A chat template may accept only ids of that form in a history, or the model may number its calls
    over the whole conversation.
    """
    from vllm.entrypoints.openai.tool_parsers.base import ToolParser

    if args.tool_call_parser is None:
        return random_id
    with parser_failures("tool", args.tool_call_parser):
        parser = _make_tool_parser(args.tool_call_parser, tokenizer)
    if not isinstance(parser, ToolParser):
        return random_id
    calls = [message.get("tool_calls") for message in body.messages]
    num_earlier = sum(len(each) for each in calls if isinstance(each, list))
    return lambda name, index: parser.make_id(name, num_earlier + index)


def _make_tool_parser(name: str, tokenizer: Any) -> "ToolParser | VllmToolParserAdapter":
    from vllm.entrypoints.openai.tool_parsers import ToolParserManager
    from vllm.entrypoints.openai.tool_parsers.plugin import VllmToolParserAdapter, is_foreign

    kind = ToolParserManager.get(name)
    return VllmToolParserAdapter(kind(tokenizer)) if is_foreign(kind) else kind(tokenizer)
