"""Adapt reasoning parsers that were written for vLLM to this server's interface.

Such a parser has `extract_reasoning_content` for whole outputs and
`extract_reasoning_content_streaming` for deltas; since 0.12 they are called `extract_reasoning` and
`extract_reasoning_streaming`. Unlike this server's parsers it gets the whole text at each step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm.guided_decoding_params import GrammarStart
from vllm.reasoning.parsers import ReasoningParser, ends_inside
from vllm.utils.parser_registry import overrides_first

_WHOLE = ("extract_reasoning_content", "extract_reasoning")
_STREAMED = ("extract_reasoning_content_streaming", "extract_reasoning_streaming")


def is_foreign(parser: type[ReasoningParser]) -> bool:
    """Return whether a class is written for the interface of vLLM."""
    return overrides_first(
        parser, (*_WHOLE, *_STREAMED), ("feed", "split", "_parse"), base=ReasoningParser
    )


@dataclass
class OutputHistory:
    """The text and tokens of one output that a parser has received so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)

    def grow(self, text: str, token_ids: Sequence[int]) -> dict[str, Any]:
        """Add new text and tokens, and return the arguments for a streaming method."""
        before_text, before_ids = self.text, self.token_ids
        self.text = before_text + text
        self.token_ids = [*before_ids, *token_ids]
        return {
            "previous_text": before_text,
            "current_text": self.text,
            "delta_text": text,
            "previous_token_ids": before_ids,
            "current_token_ids": list(self.token_ids),
            "delta_token_ids": list(token_ids),
        }


class ForeignReasoningParser:
    """Reads one output with a parser written for vLLM. Has the methods of `ReasoningParser` that
    the server calls. Errors of the parser are passed on.

    Args:
        parser: a parser for only this output.
        request: request that the output answers.
    """

    def __init__(self, parser: Any, request: Any) -> None:
        self._parser = parser
        self._request = request
        self._history = OutputHistory()
        self._thoughts: list[str] = []
        self._is_inside: bool | None = None

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(start, end) of the reasoning so far, in characters of the output.

        This is the position of the reasoning in the output, or the beginning if the parser has
        changed its text.
        """
        thoughts = "".join(self._thoughts)
        start = max(self._history.text.find(thoughts), 0)
        return [(start, start + len(thoughts))] if thoughts else []

    def follow(self, prompt: str, *, is_continued: bool = False) -> None:
        """Set the prompt that the output follows. Only the grammar of the answer depends on it."""
        parser = self._parser
        self._is_inside = ends_inside(prompt, parser.starts, parser.ends, is_continued=is_continued)

    def grammar_start(self) -> GrammarStart:
        """Return the position at which a grammar for the answer begins: the beginning of the
        output, unless the parser finds the end of reasoning at the markers of its class.
        """
        parser, kind = self._parser, type(self._parser)
        is_known = (
            kind.is_reasoning_end is not ReasoningParser.is_reasoning_end
            or kind.ends is not ReasoningParser.ends
        )
        if not is_known or self._is_inside is False or parser.tokenizer is None:
            return GrammarStart()
        encode = partial(parser.tokenizer.encode, add_special_tokens=False)
        ends = tuple(end for end in kind.ends if self.is_reasoning_end(encode(end)))
        if not ends:
            return GrammarStart()
        if self._is_inside or kind.is_start_optional:
            return GrammarStart(is_thinking=True, thought_ends=ends)
        return GrammarStart(thought_starts=kind.starts, thought_ends=ends)

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> tuple[str | None, str | None]:
        """Read new text. Returns the new (reasoning, answer), each None if there is none."""
        if not text and not token_ids:
            return None, None
        delta = _method(self._parser, _STREAMED)(**self._history.grow(text, token_ids))
        if delta is None:
            return None, None
        reasoning = getattr(delta, "reasoning_content", None) or getattr(delta, "reasoning", None)
        self._thoughts.append(reasoning or "")
        return reasoning, delta.content

    def finish(self, *, is_cut: bool = False) -> tuple[str | None, str | None]:
        """End the text. Only a parser that is derived from this package's class may have held text
        back.

        Args:
            is_cut: not used.
        """
        held_back: tuple[str | None, str | None] = self._parser.finish()
        self._thoughts.append(held_back[0] or "")
        return held_back

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers of the parser's class."""
        return self._parser.markers

    def is_reasoning_end(self, token_ids: Sequence[int]) -> bool:
        """Return whether these output tokens contain the end of the reasoning."""
        return bool(self._parser.is_reasoning_end(list(token_ids)))

    def extract_content_ids(self, token_ids: Sequence[int]) -> list[int]:
        """Return the output tokens after the end of the reasoning."""
        return list(self._parser.extract_content_ids(list(token_ids)))

    def read_whole(
        self, text: str, token_ids: Sequence[int] = (), *, is_cut: bool = False
    ) -> tuple[str | None, str | None]:
        """Split a complete text into (reasoning, answer)."""
        reasoning, content = _method(self._parser, _WHOLE)(text, request=self._request)
        self._history.text, self._thoughts = text, [reasoning or ""]
        return reasoning, content


def _method(parser: Any, names: Sequence[str]) -> Any:
    """Return the method with one of these names that the parser's own class defines, or else the
    base class's method.

    Raises:
        NotImplementedError: the base class's method would find nothing, because the parser is not
            derived from one of this package.
    """
    for name in names:
        if getattr(type(parser), name) is not getattr(ReasoningParser, name):
            return getattr(parser, name)
    if type(parser).__mro__[1] is ReasoningParser:
        raise NotImplementedError(f"{type(parser).__name__} does not define {' or '.join(names)}")
    return getattr(parser, names[0])
