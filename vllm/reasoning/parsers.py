"""Split the text of a model into reasoning and answer while it grows.

Independent of the server and the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.guided_decoding_params import GrammarStart
from vllm.utils.text.text_stream import Markers, TextStream, Wait

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ReasoningDelta:
    """New text of an output, with the attributes of the chat API's `DeltaMessage`."""

    content: str | None = None
    reasoning_content: str | None = None
    role: str | None = None
    tool_calls: tuple[()] = ()

    @property
    def reasoning(self) -> str | None:
        """The new reasoning, under the name that vLLM uses since 0.12."""
        return self.reasoning_content


class ReasoningParser:
    """Splits one output: reasoning between two markers, then the answer. Never raises for any text.

    Reasoning is recognised only at the beginning: everything after the first end marker is the
    answer.

    Args:
        tokenizer: tokenizer of the model, or None.
        is_thinking: False: the request told the model not to reason, so all of its text is the
            answer. None: the request does not say.

    Attributes:
        spans: (start, end) of the reasoning so far, in characters of the output.
    """

    starts: ClassVar[tuple[str, ...]] = ("<think>",)
    """Markers with which thoughts begin, after white space."""
    ends: ClassVar[tuple[str, ...]] = ("</think>",)
    """Markers with which thoughts end."""
    is_start_optional: ClassVar[bool] = False
    """Whether a text without a marker at its beginning begins with thoughts."""
    answer_starts: ClassVar[tuple[str, ...]] = ()
    """Markers that end thoughts as well, and that are part of the answer."""
    thinks_by_default: ClassVar[bool] = True
    """Whether the model thinks if the request does not say so."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase | None" = None, *, is_thinking: bool | None = None
    ) -> None:
        self.tokenizer = self.model_tokenizer = tokenizer
        self._is_told_not_to = is_thinking is False
        self._is_thinking = self.thinks_by_default if is_thinking is None else is_thinking
        self._is_start_needed = not self.is_start_optional
        self._begin()

    def _begin(self) -> None:
        """Forget the previous output, to read another one."""
        self._stream = TextStream()
        self.spans: list[tuple[int, int]] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._steps = self._parse()

    @property
    def markers(self) -> tuple[str, ...]:
        """The strings that must be in the output text even if they are special tokens."""
        return (*self.starts, *self.ends, *self.answer_starts)

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Map from each token to its id."""
        assert self.model_tokenizer is not None
        return self.model_tokenizer.get_vocab()

    def follow(self, prompt: str, *, is_continued: bool = False) -> None:
        """Set the prompt that the output follows, before any output is read.

        A prompt may end inside reasoning, or after it.

        Args:
            prompt: text of the prompt, with special tokens.
            is_continued: whether the prompt ends with the beginning of the answer, rather than with
                text that the chat template writes before it.
        """
        is_inside = ends_inside(prompt, self.starts, self.ends, is_continued=is_continued)
        if is_inside is None or self._is_told_not_to:
            return
        self._is_thinking, self._is_start_needed = is_inside, False

    def grammar_start(self) -> GrammarStart:
        """Return the position at which a grammar for the answer begins, after the prompt given to
        `follow`.
        """
        if not self._is_thinking:
            return GrammarStart()
        begin = partial(GrammarStart, thought_ends=self.ends, calls_in_thoughts=self.answer_starts)
        if self._is_start_needed:
            return begin(thought_starts=self.starts)
        return begin(is_thinking=True)

    def feed(
        self, delta_text: str, delta_token_ids: Sequence[int] = ()
    ) -> tuple[str | None, str | None]:
        """Read new text. Returns the new (reasoning, answer), each None if there is none.

        Args:
            delta_text: the new text.
            delta_token_ids: tokens of the new text; no built-in parser needs them.
        """
        self._stream.add(delta_text)
        next(self._steps, None)
        return self._take()

    def finish(self, *, is_cut: bool = False) -> tuple[str | None, str | None]:
        """End the text, and return the parts that were held back, in the form of `feed`.

        Args:
            is_cut: the model did not end the text itself.
        """
        self._stream.is_complete, self._stream.is_cut = True, is_cut
        next(self._steps, None)
        return self._take()

    def split(self, text: str) -> tuple[str | None, str | None]:
        """Split a complete text into (reasoning, answer). The result is the same as for reading it
        in pieces.
        """
        parser = type(self)(self.tokenizer)
        parser._is_thinking, parser._is_start_needed = self._is_thinking, self._is_start_needed
        first, last = parser.feed(text), parser.finish()
        return _join(first[0], last[0]), _join(first[1], last[1])

    def read_whole(
        self, text: str, token_ids: Sequence[int] = (), *, is_cut: bool = False
    ) -> tuple[str | None, str | None]:
        """Return the (reasoning, answer) of a complete output, read by this parser.

        Args:
            text: the output.
            token_ids: its tokens; no built-in parser needs them.
            is_cut: see `finish`.
        """
        first, last = self.feed(text, token_ids), self.finish(is_cut=is_cut)
        return _join(first[0], last[0]), _join(first[1], last[1])

    def extract_reasoning_content(
        self, model_output: str, request: Any = None
    ) -> tuple[str | None, str | None]:
        """Return the result of `split`; a method name of vLLM."""
        return self.split(model_output)

    def extract_reasoning(
        self, model_output: str, request: Any = None
    ) -> tuple[str | None, str | None]:
        """Return the result of `split`; a method name of vLLM since 0.12."""
        return self.split(model_output)

    def extract_reasoning_content_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> "ReasoningDelta | None":
        """Read new text; a method for programs written for vLLM.

        An empty `previous_text` begins another output. Text that may be a part of a marker is held
        back. The text that is held back at the end of an output is returned only by `finish`.

        Args:
            previous_text: only checked for being empty.
            current_text: not used.
            delta_text: the new text.
            previous_token_ids: not used.
            current_token_ids: not used.
            delta_token_ids: not used.

        Returns:
            The new reasoning and the new answer; None if there is nothing new.
        """
        if not previous_text:
            self._begin()
        reasoning, content = self.feed(delta_text)
        if reasoning is None and content is None:
            return None
        return ReasoningDelta(content, reasoning)

    def extract_reasoning_streaming(self, *args: Any, **kwargs: Any) -> "ReasoningDelta | None":
        """Read new text; the name of `extract_reasoning_content_streaming` since vLLM 0.12."""
        return self.extract_reasoning_content_streaming(*args, **kwargs)

    def extract_content_ids(self, input_ids: Sequence[int]) -> list[int]:
        """Return the output tokens after the end of the reasoning; empty before that."""
        ids = list(input_ids)
        if self.tokenizer is None:
            return []
        end = self.reasoning_end_token_ids(self.tokenizer)
        starts = (i for i in range(len(ids) - len(end) + 1) if ids[i : i + len(end)] == end)
        first = next(starts, None)
        return [] if first is None else ids[first + len(end) :]

    @classmethod
    def reasoning_end_token_ids(cls, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
        """Return the tokens of the first end marker, after which the answer begins."""
        return list(tokenizer.encode(cls.ends[0], add_special_tokens=False))

    def is_reasoning_end(self, token_ids: Sequence[int]) -> bool:
        """Return whether these output tokens contain the end of the reasoning. False without a
        tokenizer.
        """
        if self.tokenizer is None:
            return False
        end = self.reasoning_end_token_ids(self.tokenizer)
        ids = list(token_ids)
        return any(ids[i : i + len(end)] == end for i in range(len(ids) - len(end) + 1))

    def _parse(self) -> Wait[None]:
        stream = self._stream
        if self._is_thinking and (yield from self._read_start()):
            ends = Markers((*self.ends, *self.answer_starts))
            end = yield from stream.read_until(ends, self._add_reasoning)
            if end in self.ends:
                stream.consume(len(end))
                stream.pop_read()
        yield from self._read_answer()

    def _read_answer(self) -> Wait[None]:
        """Read the text after the reasoning."""
        yield from self._stream.read_until(Markers(()), self._add_content)

    def _read_start(self) -> Wait[bool]:
        """Read the start marker. Returns False if the text begins with the answer."""
        stream = self._stream
        yield from stream.skip_space()
        for start in self.starts:
            if (yield from stream.read_literal(start)):
                return True
        stream.drop_cut(Markers(self.starts))
        # The white space is part of the text that follows.
        space = stream.pop_read()
        if self._is_start_needed:
            self._content.append(space)
        else:
            self._add_reasoning(space)
        return not self._is_start_needed

    def _add_reasoning(self, piece: str) -> None:
        """Treat text that was just read as reasoning."""
        self._stream.pop_read()
        self._reasoning.append(piece)
        end = self._stream.num_read
        start = end - len(piece)
        if self.spans and self.spans[-1][1] == start:
            start = self.spans.pop()[0]
        if end > start:
            self.spans.append((start, end))

    def _add_content(self, piece: str) -> None:
        self._stream.pop_read()
        self._content.append(piece)

    def _take(self) -> tuple[str | None, str | None]:
        taken = "".join(self._reasoning), "".join(self._content)
        self._reasoning.clear()
        self._content.clear()
        return taken[0] or None, taken[1] or None


class DeepSeekR1ReasoningParser(ReasoningParser):
    """Parser for `reasoning</think>answer`; `<think>` may be missing, because chat templates write
    it.

    For DeepSeek R1 and its distillations, QwQ, and models that always reason. A text without
    `</think>` is only reasoning.
    """

    is_start_optional = True


class Qwen3ReasoningParser(ReasoningParser):
    """Parser for `<think>...</think>`: Qwen3. A text without `<think>` has no reasoning, unless the
    prompt ends with it.
    """


class GraniteReasoningParser(ReasoningParser):
    """Parser for Granite 3.2, where reasoning and answer each follow a phrase."""

    starts = ("Here is my thought process:", "Here's my thought process:")
    ends = ("Here is my response:", "Here's my response:")


class KimiK2ReasoningParser(DeepSeekR1ReasoningParser):
    """Parser for Kimi K2 Thinking and later: reasoning ends at `</think>` or at the first call."""

    answer_starts = ("<|tool_calls_section_begin|>",)


class DeepSeekV3ReasoningParser(DeepSeekR1ReasoningParser):
    """Parser for DeepSeek V3.1 and V3.2: reasoning ends at `</think>`, if the request turns
    thinking on.
    """

    thinks_by_default = False


class MistralReasoningParser(ReasoningParser):
    """Parser for `[THINK]...[/THINK]`: Magistral, Ministral 3."""

    starts, ends = ("[THINK]",), ("[/THINK]",)


class SeedOssReasoningParser(ReasoningParser):
    """Parser for `<seed:think>...</seed:think>`: Seed-OSS."""

    starts, ends = ("<seed:think>",), ("</seed:think>",)


class ApertusReasoningParser(ReasoningParser):
    """Parser for `<|inner_prefix|>...<|inner_suffix|>`, or up to the first call: Apertus."""

    starts, ends = ("<|inner_prefix|>",), ("<|inner_suffix|>",)
    answer_starts = ("<|tools_prefix|>",)


class Gemma4ReasoningParser(ReasoningParser):
    """Parser for `<|channel>thought`, a new line, `...<channel|>`: Gemma 4.

    Large models that were told not to reason write both markers with nothing between them.
    """

    starts, ends = ("<|channel>thought",), ("<channel|>",)

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase | None" = None, *, is_thinking: bool | None = None
    ) -> None:
        super().__init__(tokenizer)

    def _read_start(self) -> Wait[bool]:
        if not (yield from super()._read_start()):
            return False
        yield from self._stream.read_literal("\n")
        return True


class AppendThinkReasoningParser(ReasoningParser):
    """Parser for MiniMax M2: reasoning remains in the answer, with the `<think>` that the chat
    template wrote.

    The model expects its reasoning in the conversation, and not every client sends it back.
    """

    def _parse(self) -> Wait[None]:
        stream = self._stream
        if self._is_thinking and (yield from stream.more()):
            yield from stream.read_literal(self.starts[0])
            stream.pop_read()
            self._content.append(self.starts[0])
        yield from self._read_answer()


class WrappedAnswerReasoningParser(ReasoningParser):
    """Parser for reasoning, then an answer between two markers, which are removed. A subclass
    defines the markers.
    """

    answer_start: ClassVar[str]
    answer_end: ClassVar[str]

    @property
    def markers(self) -> tuple[str, ...]:
        """The strings that must be in the output text even if they are special tokens."""
        return (*super().markers, self.answer_start, self.answer_end)

    def _read_answer(self) -> Wait[None]:
        stream = self._stream
        yield from stream.skip_space()
        if (yield from stream.read_literal(self.answer_start)):
            yield from stream.read_literal("\n")
            stream.pop_read()
            ends = Markers((f"\n{self.answer_end}", self.answer_end))
            end = yield from stream.read_until(ends, self._add_content)
            stream.consume(len(end))
            yield from stream.skip_space()
            stream.pop_read()
        self._content.append(stream.pop_read())
        yield from super()._read_answer()


class HunyuanReasoningParser(WrappedAnswerReasoningParser):
    """Parser for `<think>...</think><answer>...</answer>`: Hunyuan A13B."""

    answer_start, answer_end = "<answer>", "</answer>"


class Ernie45ReasoningParser(WrappedAnswerReasoningParser):
    """Parser for reasoning before `</think>`, then `<response>...</response>`: ERNIE 4.5 Thinking
    and VL.
    """

    is_start_optional = True
    answer_start, answer_end = "<response>", "</response>"


class CohereReasoningParser(WrappedAnswerReasoningParser):
    """Parser for `<|START_THINKING|>...<|END_THINKING|>`, then the answer between similar markers:
    Command A.
    """

    starts, ends = ("<|START_THINKING|>",), ("<|END_THINKING|>",)
    answer_start, answer_end = "<|START_RESPONSE|>", "<|END_RESPONSE|>"


def _join(first: str | None, last: str | None) -> str | None:
    return None if first is None and last is None else (first or "") + (last or "")


def ends_inside(
    prompt: str, starts: Sequence[str], ends: Sequence[str], *, is_continued: bool
) -> bool | None:
    """Return True if a prompt ends inside reasoning, False if it ends after reasoning, and None
    otherwise.

    A template writes a marker at the very end of the prompt; an earlier marker is ordinary text. If
    a message is continued, the last marker in it decides.
    """
    if is_continued:
        start, end = (max(map(prompt.rfind, texts), default=-1) for texts in (starts, ends))
        return None if start == end else start > end
    text = prompt.rstrip()
    if text.endswith(tuple(ends)):
        return False
    return True if text.endswith(tuple(starts)) else None
