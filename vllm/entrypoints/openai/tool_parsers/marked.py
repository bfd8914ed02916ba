"""Parse tool calls that are JSON after a marker or between markers."""

import re
import secrets
import string
from collections.abc import Sequence
from typing import ClassVar

from vllm.entrypoints.openai.protocol.tools import CallForm
from vllm.entrypoints.openai.tool_parsers.json_calls import JsonToolParser
from vllm.entrypoints.openai.tool_parsers.json_reader import JSON, read_group
from vllm.utils.text.text_stream import Wait

_XLAM_CLOSING = {"```": ("```",), "<tool_call>": ("</tool_call>",)}


class HermesToolParser(JsonToolParser):
    """Parses `<tool_call>{...}</tool_call>`, with one object or several: Hermes 2 and 3, Qwen 2.5
    and 3.
    """

    markers = ("<tool_call>",)
    closing = ("</tool_call>",)
    separators = (",", "")
    form = CallForm()


class LlamaJsonToolParser(JsonToolParser):
    """Parses `{...}`, several of them, or a list of them, optionally after `<|python_tag|>`: Llama
    3 and 4.
    """

    markers = ("<|python_tag|>",)
    bare = "{["
    separators = (";", ",", "")
    form = CallForm(arguments_key="parameters")


class GraniteToolParser(JsonToolParser):
    """Parses `<|tool_call|>[{...}]` of Granite 3; also accepts `<tool_call>`, or no marker."""

    markers = ("<|tool_call|>", "<tool_call>")
    closing = ("</tool_call>",)
    bare = "["
    form = CallForm(is_list=True)


class Granite20bToolParser(JsonToolParser):
    """Parses `<function_call> {...}`, repeated for each call: granite-20b-functioncalling."""

    markers = ("<function_call>",)
    form = CallForm()


class InternLMToolParser(JsonToolParser):
    """Parses `<|action_start|><|plugin|>{...}<|action_end|>`: InternLM 2.5."""

    markers = ("<|action_start|>",)
    further_tokens = ("<|plugin|>", "<|action_end|>")
    closing = ("<|action_end|>",)
    form = CallForm(arguments_key="parameters", starts=("<|action_start|><|plugin|>",))

    def read_calls(self, marker: str) -> Wait[None]:
        """Read the second marker and the call after it."""
        yield from self.stream.skip_space()
        if (yield from self.stream.read_literal("<|plugin|>")):
            yield from super().read_calls(marker)


class CohereToolParser(JsonToolParser):
    """Parses `<|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>`: Command A,
    R7B.
    """

    markers = ("<|START_ACTION|>",)
    closing = ("<|END_ACTION|>",)
    further_tokens = closing
    name_key = "tool_name"


class ApertusToolParser(JsonToolParser):
    """Parses `<|tools_prefix|>[{NAME: {...}}]<|tools_suffix|>`: Apertus."""

    markers = ("<|tools_prefix|>",)
    closing = ("<|tools_suffix|>",)
    further_tokens = closing
    name_key = None


class GigaChat3ToolParser(JsonToolParser):
    """Parses `<|message_sep|>`, an empty line, `function call<|role_sep|>`, `{...}`: GigaChat 3."""

    markers = ("<|message_sep|>", "function call<|role_sep|>")
    form = CallForm(starts=("function call<|role_sep|>",))

    def read_calls(self, marker: str) -> Wait[None]:
        """Read the call after a marker."""
        if marker == self.markers[0]:
            yield from self.stream.skip_space()
            if not (yield from self.stream.read_literal(self.markers[1])):
                return
        yield from super().read_calls(marker)


class JambaToolParser(JsonToolParser):
    """Parses `<tool_calls>[{...}]</tool_calls>`: Jamba 1.5 and later, Hunyuan A13B."""

    markers = ("<tool_calls>",)
    closing = ("</tool_calls>",)
    form: ClassVar[CallForm | None] = CallForm(is_list=True)


class MiniMaxToolParser(JambaToolParser):
    """Parses `<tool_calls>` with an object on each line: MiniMax M1."""

    separators = (",", "")
    form: ClassVar[CallForm | None] = None


class NemotronJsonToolParser(JsonToolParser):
    """Parses `<TOOLCALL>[{...}]</TOOLCALL>`: Nemotron Nano v2."""

    markers = ("<TOOLCALL>",)
    closing = ("</TOOLCALL>",)
    form = CallForm(is_list=True)


class Phi4MiniToolParser(JsonToolParser):
    """Parses `functools[{...}]` or `<|tool_call|>[{...}]<|/tool_call|>`: Phi-4-mini."""

    markers = ("functools", "<|tool_call|>")
    closing = ("<|/tool_call|>",)
    further_tokens = closing

    def call_starts(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the beginnings of calls, without the markers that may come before any answer."""
        return ("functools[", "<|tool_call|>")

    def read_calls(self, marker: str) -> Wait[None]:
        """Read the list of calls, which must follow the word `functools` directly."""
        # In prose the word is a Python module. It begins a call only if a list follows immediately.
        if marker != "functools" or (yield from self.stream.peek()) == "[":
            yield from super().read_calls(marker)


class XlamToolParser(JsonToolParser):
    """Parses `[{...}]` in a code fence, without a marker, or after `</think>`, `[TOOL_CALLS]` or
    `<tool_call>`: xLAM 2.
    """

    markers = ("</think>", "```", "[TOOL_CALLS]", "<tool_call>")
    bare = "[{"

    def call_starts(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the beginnings of calls, without markers that may also begin ordinary text."""
        others = ("</think>", "```")
        return tuple(start for start in super().call_starts(names) if start not in others)

    def read_calls(self, marker: str) -> Wait[None]:
        """Read calls. Calls without a marker must have arguments."""
        if marker == "</think>":
            # A tool parser returns no reasoning, so the reasoning before the marker is content.
            self.release()
        if marker == "```":
            yield from self.stream.read_literal("json")
        # Code and answers may be JSON too. Without a marker, only an object with arguments is a
        # call.
        is_marked = marker in ("[TOOL_CALLS]", "<tool_call>")
        if (yield from self.read_json(is_marked=is_marked)):
            yield from self.read_closing(*_XLAM_CLOSING.get(marker, ()))


_NAME = re.compile(r"[\w.-]+")
_LETTERS = string.ascii_letters + string.digits


class MistralToolParser(JsonToolParser):
    """Parses `[TOOL_CALLS][{...}]`, and since 2025 `[TOOL_CALLS]name{...}` for each call: Mistral.

    In the later format `[CALL_ID]id` and `[ARGS]` may come before the arguments.
    """

    markers = ("[TOOL_CALLS]",)
    further_tokens = ("[CALL_ID]", "[ARGS]")
    form = CallForm(is_list=True)

    def free_calls(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the tools, which follow the marker in the later format."""
        return tuple(names)

    def make_id(self, name: str, index: int) -> str:
        """Return a new id of nine letters and digits; the models' chat templates accept no other
        ids.
        """
        return "".join(secrets.choice(_LETTERS) for _ in range(9))

    def read_calls(self, marker: str) -> Wait[None]:
        """Read a list of calls, or one call that begins with its name."""
        stream = self.stream
        if (yield from stream.skip_space()) in ("[", "{"):
            yield from self.read_json(is_marked=True)
            return
        name = yield from stream.read_run(_NAME)
        if (yield from stream.read_literal("[CALL_ID]")):
            yield from stream.read_run(_NAME)
        yield from stream.read_literal("[ARGS]")
        if name and (yield from stream.skip_space()) == "{":
            self.start_call(name)
            yield from read_group(stream, self.add_arguments, JSON)
