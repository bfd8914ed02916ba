"""Split an output incrementally into reasoning, content and tool calls.

The same object reads a stream and a whole output, so that both give the same result.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from vllm.entrypoints.http.errors import GenerationError
from vllm.entrypoints.openai.chat.custom_calls import CustomCalls
from vllm.entrypoints.openai.chat.thought_tokens import ThoughtTokens
from vllm.entrypoints.openai.chat.tool_choice import (
    NamedToolReader,
    RequiredToolReader,
    ToolCallDelta,
)
from vllm.entrypoints.openai.protocol.tools import CallForm
from vllm.guided_decoding_params import GrammarStart
from vllm.logger import init_logger
from vllm.utils.text.text_stream import Markers

if TYPE_CHECKING:
    from vllm.entrypoints.openai.tool_parsers.base import ParsedDelta, ToolParser
    from vllm.entrypoints.openai.tool_parsers.plugin import VllmToolParserAdapter
    from vllm.reasoning import ReasoningParser
    from vllm.reasoning.plugin import ForeignReasoningParser

logger = init_logger(__name__)


@contextmanager
def parser_failures(kind: str, name: str | None) -> Iterator[None]:
    """Convert exceptions of a parser, which may be a user's, to a failure of only this request.

    Args:
        kind: "tool" or "reasoning".
        name: name of the parser, as in the flag.

    Raises:
        GenerationError: replaces the parser's exception.
    """
    try:
        yield
    except Exception as error:
        logger.error("the %s parser %s failed", kind, name, exc_info=True)
        raise GenerationError(
            f"the {kind} parser {name!r} failed on this request: {type(error).__name__}: {error}"
        ) from error


@dataclass(slots=True)
class ReadDelta:
    """The new parts of an output."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


class _HiddenTexts:
    """Removes given texts from a growing text."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._markers = Markers(sorted(texts, key=len, reverse=True))
        self._held = ""

    def remove(self, piece: str, *, is_last: bool) -> str:
        text, kept, start = self._held + piece, "", 0
        while found := self._markers.search(text, start):
            kept += text[start : found.start()]
            start = found.end()
        end = len(text) if is_last else self._markers.safe_end(text, start)
        self._held = text[end:]
        return kept + text[start:end]


_STRING = re.compile(r'"(?:[^"\\]+|\\.)*(?:"|\\?\Z)', re.DOTALL)
"""A string of JSON, or its beginning at the end of the text."""


class _LastCall:
    """Keeps the arguments of the last call of an output, to find out whether they have an end."""

    def __init__(self) -> None:
        self._index = -1
        self._pieces: list[str] = []

    def add(self, deltas: Iterable[ToolCallDelta]) -> None:
        for delta in deltas:
            if delta["index"] != self._index:
                self._index, self._pieces = delta["index"], []
            # The input of a custom tool may be any text, so nothing shows where it ends.
            self._pieces.append((delta.get("function") or {}).get("arguments") or "")

    @property
    def is_open(self) -> bool:
        """Whether there is a call whose arguments lack a closing bracket. They may be damaged
        otherwise.
        """
        if self._index < 0:
            return False
        text = "".join(self._pieces)
        outside = _STRING.sub("", text)
        num_open = sum(map(outside.count, "{[")) - sum(map(outside.count, "}]"))
        return num_open > 0 or not text.strip()


class OutputReader:
    """Splits one output: first into reasoning and the rest, then the rest into content and tool
    calls.

    Args:
        reasoning: parser for reasoning, or None.
        tools: parser for calls that the model may make, or None.
        forced: reader of calls that the model must make, or None. With it, there is no content.
        max_calls: maximum number of tool calls; further ones are dropped. None: no limit.
        custom: converts calls of custom tools; None: the request has no custom tools.
        names: names of the reasoning parser and the tool parser, for errors.

    Attributes:
        has_called: a tool call was read.
    """

    def __init__(
        self,
        reasoning: "ReasoningParser | ForeignReasoningParser | None" = None,
        tools: "ToolParser | VllmToolParserAdapter | None" = None,
        forced: NamedToolReader | RequiredToolReader | None = None,
        max_calls: int | None = None,
        custom: CustomCalls | None = None,
        names: tuple[str | None, str | None] = (None, None),
    ) -> None:
        self.has_called = False
        self._last_call = _LastCall()
        self._reasoning = reasoning
        self._tools = tools
        self._forced = forced
        self._max_calls = max_calls
        self._custom = custom
        self._names = names
        self._hidden: list[_HiddenTexts] = []
        """Hidden texts of reasoning and of content."""
        self._is_answer_stripped = False
        self._has_answer = False
        """Whether there was content, or calls that had to be made."""
        self._has_begun = False
        self._is_cut = False
        self._tokens: ThoughtTokens | None = None
        self._early_ids: list[int] | None = []
        """The tokens so far, until the answer begins; then None."""

    @property
    def is_plain(self) -> bool:
        """Whether all text is content, because there are no parsers."""
        return self._reasoning is None and self._tools is None and self._forced is None

    def feed(
        self,
        text: str,
        token_ids: Sequence[int] = (),
        *,
        is_last: bool = False,
        is_cut: bool = False,
    ) -> ReadDelta:
        """Read new output, and return its parts.

        Args:
            text: the new text.
            token_ids: tokens of this text.
            is_last: the output is complete, so text that was held back is returned.
            is_cut: it is complete only because of a limit or a stop string, so that a call may be
                incomplete.
        """
        if self.is_plain:
            return ReadDelta(content=text)
        delta = ReadDelta()
        self._is_cut = is_cut
        is_whole = is_last and not self._has_begun
        self._has_begun = True
        content = text
        if self._reasoning is not None:
            if self._tokens is not None:
                self._tokens.add(token_ids)
            with parser_failures("reasoning", self._names[0]):
                delta.reasoning, content = self._split(text, token_ids, is_last, is_whole)
                token_ids = self._answer_ids(token_ids, bool(content))
        if self._is_answer_stripped and not self._has_answer:
            content = content.lstrip()
        self._has_answer = self._has_answer or bool(content)
        if self._forced is not None:
            # If the output ended during the reasoning, there is no tool call.
            is_begun = self._has_answer or self._reasoning is None
            delta.tool_calls = self._forced.feed(content) if is_begun else []
        elif self._tools is not None:
            with parser_failures("tool", self._names[1]):
                self._find_calls(delta, content, token_ids, is_last, is_whole)
        else:
            delta.content = content
        if self._hidden:
            of_reasoning, of_content = self._hidden
            delta.reasoning = of_reasoning.remove(delta.reasoning, is_last=is_last)
            delta.content = of_content.remove(delta.content, is_last=is_last)
        if self._max_calls is not None:
            delta.tool_calls = [c for c in delta.tool_calls if c["index"] < self._max_calls]
        self._last_call.add(delta.tool_calls)
        if self._custom is not None:
            delta.tool_calls = self._custom.convert(delta.tool_calls)
            if is_last:
                delta.tool_calls += self._custom.finish()
        self.has_called = self.has_called or bool(delta.tool_calls)
        return delta

    @property
    def has_open_call(self) -> bool:
        """Whether the arguments of the last call have no end so far."""
        return self._last_call.is_open

    @property
    def markers(self) -> list[str]:
        """The strings that the parsers search for."""
        tools = self._tools
        of_tools = () if tools is None else (*tools.markers, *tools.further_tokens)
        return [*(() if self._reasoning is None else self._reasoning.markers), *of_tools]

    def count_thoughts(self, tokens: ThoughtTokens) -> None:
        """Start to count the tokens of the reasoning. Nothing of the output may have been read
        yet.
        """
        self._tokens = tokens

    @property
    def num_thought_tokens(self) -> int:
        """Number of reasoning tokens so far; 0 if they are not counted."""
        if self._tokens is None or self._reasoning is None:
            return 0
        return self._tokens.count(self._reasoning.spans)

    def hide(self, texts: Iterable[str]) -> None:
        """Remove special tokens from the result that the text contains only for the parsers."""
        if texts := list(texts):
            self._hidden = [_HiddenTexts(texts) for _ in range(2)]

    def grammar_start(self, names: Sequence[str], *, allows_space: bool) -> GrammarStart:
        """Return the position at which a grammar for the answer begins. If this is the beginning of
        the output, the reasoning parser is removed.

        Args:
            names: names of the tools that the model may call instead of answering.
            allows_space: the answer never begins with white space. So if the grammar begins late,
                white space before the answer is removed.
        """
        start = GrammarStart()
        if self._reasoning is not None:
            with parser_failures("reasoning", self._names[0]):
                start = self._reasoning.grammar_start()
            if not start.is_late:
                self._reasoning = None
        if self._tools is not None and names:
            with parser_failures("tool", self._names[1]):
                calls = self._tools.call_starts(names)
            start = msgspec.structs.replace(start, calls=calls)
        else:
            start = msgspec.structs.replace(start, calls_in_thoughts=())
        self._is_answer_stripped = start.is_late and allows_space
        return msgspec.structs.replace(start, allows_space=allows_space)

    @property
    def call_form(self) -> CallForm | None:
        """JSON form of calls that the model may make; None: a grammar cannot describe them."""
        return None if self._tools is None else self._tools.form

    def call_start(self, names: Sequence[str]) -> GrammarStart:
        """Return the position at which a grammar for calls begins.

        Args:
            names: names of the tools.
        """
        start = GrammarStart()
        if self._reasoning is not None:
            with parser_failures("reasoning", self._names[0]):
                start = self._reasoning.grammar_start()
        assert self._tools is not None and self._tools.form is not None
        return msgspec.structs.replace(
            start,
            calls=self._tools.free_calls(names),
            calls_in_thoughts=(),
            grammar_starts=self._tools.form.starts or self._tools.markers,
            allows_space=True,
        )

    def _split(
        self, text: str, token_ids: Sequence[int], is_last: bool, is_whole: bool
    ) -> tuple[str, str]:
        """Split new text into reasoning and answer."""
        assert self._reasoning is not None
        if is_whole:
            parts = [self._reasoning.read_whole(text, token_ids, is_cut=self._is_cut)]
        else:
            parts = [self._reasoning.feed(text, token_ids)]
            if is_last:
                parts.append(self._reasoning.finish(is_cut=self._is_cut))
        thoughts, answers = zip(*parts, strict=True)
        return "".join(each or "" for each in thoughts), "".join(each or "" for each in answers)

    def _answer_ids(self, token_ids: Sequence[int], has_content: bool) -> Sequence[int]:
        """Return the tokens that belong to the answer, for parsers that read tokens."""
        if self._early_ids is None or not getattr(self._tools, "reads_tokens", False):
            return token_ids
        assert self._reasoning is not None
        self._early_ids += token_ids
        if self._reasoning.is_reasoning_end(self._early_ids):
            token_ids = self._reasoning.extract_content_ids(self._early_ids)
        elif not has_content:
            return ()
        self._early_ids = None
        return token_ids

    def _find_calls(
        self,
        delta: ReadDelta,
        content: str,
        token_ids: Sequence[int],
        is_last: bool,
        is_whole: bool,
    ) -> None:
        assert self._tools is not None
        if is_whole:
            self._add(delta, self._tools.read_whole(content, token_ids, is_cut=self._is_cut))
            return
        self._add(delta, self._tools.feed(content, token_ids))
        if is_last:
            self._add(delta, self._tools.finish(is_cut=self._is_cut))

    @staticmethod
    def _add(delta: ReadDelta, found: "Sequence[ParsedDelta]") -> None:
        for each in found:
            delta.content += each.content or ""
            delta.tool_calls += each.tool_calls
