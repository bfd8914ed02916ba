"""Calls as Mistral models write them."""

import re
import secrets
import string

from vllm.entrypoints.openai.tool_parsers.json_calls import JsonToolParser
from vllm.entrypoints.openai.tool_parsers.json_reader import JSON, read_group
from vllm.utils.text_stream import Wait

_NAME = re.compile(r"[\w.-]+")
_LETTERS = string.ascii_letters + string.digits


class MistralToolParser(JsonToolParser):
    """`[TOOL_CALLS][{...}]`, and since 2025 `[TOOL_CALLS]name{...}` for each call.

    In the later form `[CALL_ID]id` and `[ARGS]` may stand before the arguments.
    """

    markers = ("[TOOL_CALLS]",)
    further_tokens = ("[CALL_ID]", "[ARGS]")

    def make_id(self) -> str:
        """A new id; the models' chat templates take nothing but nine letters and digits."""
        return "".join(secrets.choice(_LETTERS) for _ in range(9))

    def read_calls(self, marker: str) -> Wait[None]:
        """See `ToolParser.read_calls`."""
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
