"""Takes one output apart while it grows: reasoning, content, tool calls.

The same object reads a stream and a whole output, so that both give the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.entrypoints.openai.chat.tool_choice import (
    NamedToolReader,
    RequiredToolReader,
    ToolCallDelta,
)

if TYPE_CHECKING:
    from vllm.entrypoints.openai.tool_parsers.base import ParsedDelta, ToolParser
    from vllm.reasoning import ReasoningParser


@dataclass(slots=True)
class ReadDelta:
    """What an output has grown by."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


class OutputReader:
    """Reads one output. Reasoning is split off first; tool calls are looked for in the rest.

    Args:
        reasoning: or None.
        tools: what finds calls that the model may make, or None.
        forced: what reads calls that the model had to make, or None. Then there is no content.
        max_calls: further tool calls are left out; None keeps all.

    Attributes:
        has_called: a tool call was read.
        is_plain: all text is content.
    """

    def __init__(
        self,
        reasoning: "ReasoningParser | None" = None,
        tools: "ToolParser | None" = None,
        forced: NamedToolReader | RequiredToolReader | None = None,
        max_calls: int | None = None,
    ) -> None:
        self.has_called = False
        self._reasoning = reasoning
        self._tools = tools
        self._forced = forced
        self._max_calls = max_calls
        self.is_plain = reasoning is None and tools is None and forced is None

    def feed(self, text: str, token_ids: Sequence[int] = (), *, is_last: bool = False) -> ReadDelta:
        """Read on.

        Args:
            text: what the output has grown by.
            token_ids: of this text.
            is_last: nothing follows; what was held back comes now.
        """
        if self.is_plain:
            return ReadDelta(content=text)
        delta = ReadDelta()
        content = text if self._reasoning is None else ""
        if self._reasoning is not None:
            parts = [self._reasoning.feed(text)]
            if is_last:
                parts.append(self._reasoning.finish())
            delta.reasoning = "".join(thought or "" for thought, _ in parts)
            content = "".join(answer or "" for _, answer in parts)
        if self._forced is not None:
            delta.tool_calls = self._forced.feed(content)
        elif self._tools is not None:
            self._add(delta, self._tools.feed(content, list(token_ids)))
            if is_last:
                self._add(delta, self._tools.finish())
        else:
            delta.content = content
        if self._max_calls is not None:
            delta.tool_calls = [c for c in delta.tool_calls if c["index"] < self._max_calls]
        self.has_called = self.has_called or bool(delta.tool_calls)
        return delta

    @staticmethod
    def _add(delta: ReadDelta, found: "Sequence[ParsedDelta]") -> None:
        for each in found:
            delta.content += each.content or ""
            delta.tool_calls += each.tool_calls
