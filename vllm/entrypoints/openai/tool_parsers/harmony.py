"""Parse tool calls of GPT-OSS: messages whose recipient is a tool."""

from collections.abc import Sequence

from vllm.entrypoints.openai.tool_parsers.base import ToolParser
from vllm.entrypoints.openai.tool_parsers.json_reader import encode_string
from vllm.reasoning.harmony import (
    BODY_ENDS,
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RECIPIENT,
    RETURN,
    START,
    TEXT_CHANNELS,
    drop_cut_header,
    read_end,
    read_header,
)
from vllm.utils.text.text_stream import Wait

_NAMESPACE = "functions."


class HarmonyToolParser(ToolParser):
    """Parses messages to `functions.NAME`, which call a tool of the request: GPT-OSS.

    A message to one of the model's own tools, such as `python` or `browser.search`, becomes a call
    with this name. The text for `python` is code and not JSON: it becomes the argument `code`.
    Headers of messages to the user are removed. Without a reasoning parser, reasoning is not
    changed.
    """

    markers = (START, CHANNEL)
    further_tokens = (CONSTRAIN, MESSAGE, END, CALL, RETURN)
    bare = RECIPIENT[0]

    def call_starts(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return no strings, because an answer with a grammar begins after the header of its
        message, and calls come before it.
        """
        return ()

    def read_calls(self, marker: str) -> Wait[None]:
        """Read one message."""
        stream = self.stream
        if not marker and not (yield from stream.read_literal(RECIPIENT)):
            return
        header = yield from read_header(stream, marker or RECIPIENT)
        if header is None:
            drop_cut_header(stream)
            return
        if header.recipient:
            yield from self._read_call(header.recipient)
        elif header.channel in TEXT_CHANNELS:
            self.accept()
            yield from stream.read_until(BODY_ENDS, self._pass_content)
        else:
            return
        yield from read_end(stream)
        self.accept()

    def _read_call(self, recipient: str) -> Wait[None]:
        stream = self.stream
        name = recipient.removeprefix(_NAMESPACE)
        self.start_call(name)
        yield from stream.skip_space()
        is_code = name == recipient and (yield from stream.peek()) not in ("{", "")
        self._is_empty = True
        if is_code:
            self.add_arguments('{"code": "')
        yield from stream.read_until(BODY_ENDS, self._add_code if is_code else self._add_json)
        # The end marker of a call is a stop token, so the text of a complete call may lack it.
        if not stream.is_cut or (yield from stream.peek()):
            self.add_arguments('"}' if is_code else "{}" if self._is_empty else "")

    def _add_json(self, piece: str) -> None:
        self._is_empty = False
        self.add_arguments(piece)

    def _add_code(self, piece: str) -> None:
        self.add_arguments(encode_string(piece)[1:-1])
