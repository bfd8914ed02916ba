"""Parse the messages of GPT-OSS (the Harmony format): each has a channel, and may have a recipient.

    <|channel|>analysis<|message|>THOUGHTS<|end|><|start|>assistant<|channel|>commentary
    to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

    <|channel|>analysis<|message|>THOUGHTS<|end|><|start|>assistant<|channel|>final<|message|>ANSWER

The recipient may also come before the channel, and an output may begin with ` to=NAME`, as the
prompt ends with `<|start|>assistant`.
"""

import re
from dataclasses import dataclass

from vllm.guided_decoding_params import GrammarStart
from vllm.reasoning.parsers import ReasoningParser
from vllm.utils.text.text_stream import Markers, TextStream, Wait

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
RECIPIENT = "to="

BODY_ENDS = Markers((END, CALL, RETURN, START, CHANNEL))
"""Texts that end a message. A model may leave the end out before the next message."""
TEXT_CHANNELS = ("commentary", "final")
"""Channels of messages that are for the user, if they have no recipient."""

_WORDS = re.compile(r"[\w .=:/-]+")
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s=]+)")


@dataclass(frozen=True)
class Header:
    """The fields in the header of a message."""

    channel: str
    """Name of the channel; empty: the header names none."""
    recipient: str
    """Name of the tool that is called; empty: it is a message to the user or a thought."""


def read_header(stream: TextStream, start: str) -> Wait[Header | None]:
    """Read the header of a message, up to its text; None if it is not a header.

    Args:
        stream: text of which `start` was just read.
        start: `START`, `CHANNEL`, or `RECIPIENT` at the beginning of an output.
    """
    words = {START: "", CHANNEL: "", CONSTRAIN: ""}
    part = START if start == RECIPIENT else start
    words[part] = start if start == RECIPIENT else ""
    while True:
        words[part] += yield from stream.read_run(_WORDS)
        if (yield from stream.read_literal(MESSAGE)):
            break
        for part in (CHANNEL, CONSTRAIN):
            if not words[part] and (yield from stream.read_literal(part)):
                break
        else:
            return None
    recipient = _RECIPIENT.search(words[START]) or _RECIPIENT.search(words[CHANNEL])
    channel = words[CHANNEL].split()
    return Header(channel[0] if channel else "", recipient[1] if recipient else "")


def drop_cut_header(stream: TextStream) -> bool:
    """Drop the text since the start of a header that the end of a cut output interrupted, because
    half of a header is no content. Returns whether this was the case.
    """
    rest = stream.text[stream.position :]
    if not stream.is_cut or not any(
        part.startswith(rest) for part in (MESSAGE, CHANNEL, CONSTRAIN)
    ):
        return False
    stream.consume(len(rest))
    stream.pop_read()
    return True


def read_end(stream: TextStream) -> Wait[None]:
    """Read the end marker of a message, if it is next."""
    for end in (END, CALL, RETURN):
        if (yield from stream.read_literal(end)):
            return


class HarmonyReasoningParser(ReasoningParser):
    """Parser for GPT-OSS: reasoning is the messages of the channel `analysis`.

    Messages to a tool become part of the answer with their headers, for the tool parser. Several
    messages of reasoning or of text are separated by a line break.
    """

    starts = ("<|channel|>analysis<|message|>",)
    ends = ("<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>")
    answer_starts = (f"{CHANNEL}commentary {RECIPIENT}", f"{START}assistant {RECIPIENT}")
    is_start_optional = True

    def grammar_start(self) -> GrammarStart:
        """Return the position at which a grammar for the answer begins. The model always reasons
        first.
        """
        self._is_thinking = True
        return super().grammar_start()

    @property
    def markers(self) -> tuple[str, ...]:
        """The strings that must be in the output text even if they are special tokens."""
        return (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)

    def _parse(self) -> Wait[None]:
        stream = self._stream
        is_spoken: set[str] = set()
        """The kinds of text of which there was a message."""
        yield from stream.skip_space()
        if (yield from stream.read_literal(RECIPIENT)):
            yield from self._read_message(RECIPIENT, is_spoken)
        self._content.append(stream.pop_read())
        while start := (yield from stream.read_until(Markers((START, CHANNEL)), self._add_content)):
            stream.consume(len(start))
            yield from self._read_message(start, is_spoken)

    def _read_message(self, start: str, is_spoken: set[str]) -> Wait[None]:
        """Read a message whose start marker was just read."""
        stream = self._stream
        header = yield from read_header(stream, start)
        if header is None and drop_cut_header(stream):
            return
        is_text = header is not None and not header.recipient
        if header is None or not (is_text and header.channel in ("analysis", *TEXT_CHANNELS)):
            self._add_content(stream.pop_read())
            return
        stream.pop_read()
        is_thought = header.channel == "analysis"
        kind, texts, sink = (
            ("thoughts", self._reasoning, self._add_reasoning)
            if is_thought
            else ("text", self._content, self._add_content)
        )
        if (yield from stream.more()) and kind in is_spoken:
            texts.append("\n")
        is_spoken.add(kind)
        yield from stream.read_until(BODY_ENDS, sink)
        yield from read_end(stream)
        stream.pop_read()
