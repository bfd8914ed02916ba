"""Handle tool calls that a request requires: their schema, and the readers of the output.

With a named tool the whole output is the arguments of the call. With "required" it is an array of
`{"name": ..., "parameters": ...}`. Independent of the engine.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vllm.entrypoints.http.ignored import note_ignored
from vllm.entrypoints.openai.protocol.chat import ChatCompletionRequest, random_tool_call_id
from vllm.entrypoints.openai.protocol.tools import CallForm
from vllm.errors import RequestError
from vllm.guided_decoding_params import GuidedDecodingParams
from vllm.utils.text.json_pointer import follow_reference

_MAX_SCHEMA_DEPTH = 100
_ANY_OBJECT = {"type": "object"}
_REQUIRED_CALLS = CallForm(arguments_key="parameters", is_list=True)
ToolCallDelta = dict[str, Any]
"""`DeltaToolCall` as a plain dict: index, and the new parts of id, type and function."""
MakeId = Callable[[str, int], str]
"""Name of a function and index of its call -> id of the call."""


def random_id(name: str, index: int) -> str:
    """Return a random id for a call, whatever its function."""
    return random_tool_call_id()


def tool_constraint(body: ChatCompletionRequest) -> GuidedDecodingParams | None:
    """Return the constraint for an output that must be tool calls.

    None: the output is any text, because it is the input of a custom tool without a grammar.

    Raises:
        RequestError: the parameters of a tool are nested too deeply.
    """
    tool = body.custom_tools.get(body.only_call or "")
    if tool is None:
        callable_tools = [
            each.function
            for each in body.function_tools
            if body.named_tool in (None, each.function.name)
        ]
        is_strict = all(each.strict for each in callable_tools)
        return GuidedDecodingParams(json=tool_schema(body), field="tools", is_strict=is_strict)
    if tool.grammar is None:
        return None
    if tool.grammar.syntax == "regex":
        return GuidedDecodingParams(regex=tool.grammar.definition, field="tools")
    return GuidedDecodingParams(grammar=tool.grammar.definition, field="tools")


def note_free_grammars(body: ChatCompletionRequest) -> None:
    """Log the grammars of custom tools that are not enforced.

    With `auto` the model may write any text. With several required tools the output is JSON, which
    cannot contain text of a Lark grammar. The model still sees the grammar as a description.
    """
    for name, tool in body.custom_tools.items():
        if tool.grammar is None or body.tool_choice == "none" or body.only_call == name:
            continue
        if body.tool_choice == "required" and tool.grammar.syntax == "regex":
            continue
        note_ignored(
            "the grammar of the custom tool",
            name,
            "not enforced, because the model need not call this tool; its input may be any text. "
            "Name the tool in tool_choice to enforce it",
        )


def tool_schema(body: ChatCompletionRequest) -> dict[str, Any] | None:
    """Return the JSON schema for an output that must be function calls, or None.

    Raises:
        RequestError: the parameters of a tool are nested too deeply.
    """
    tools = [tool.function for tool in body.function_tools]
    if (name := body.named_tool) is not None:
        return next(t.parameters or _ANY_OBJECT for t in tools if t.name == name)
    if body.tool_choice != "required":
        return None
    schemas = [tool.parameters for tool in tools]
    return _calls_schema(body, schemas, _REQUIRED_CALLS)


def strict_schema(body: ChatCompletionRequest, form: CallForm) -> dict[str, Any] | None:
    """Return the JSON schema for calls that the model may make, in the format of its parser. None
    if no tool is strict.

    The arguments of tools that are not strict may be any object.

    Raises:
        RequestError: the parameters of a tool are nested too deeply.
    """
    tools = [tool.function for tool in body.function_tools]
    if not any(tool.strict for tool in tools):
        return None
    return _calls_schema(body, [t.parameters if t.strict else None for t in tools], form)


def _calls_schema(
    body: ChatCompletionRequest, schemas: Sequence[dict[str, Any] | None], form: CallForm
) -> dict[str, Any]:
    """Return the schema of calls in a format, given the schema of the arguments of each tool."""
    definitions: dict[str, Any] = {}
    names = [tool.function.name for tool in body.function_tools]
    calls = [
        _call_schema(index, name, arguments, form, definitions)
        for index, (name, arguments) in enumerate(zip(names, schemas, strict=True))
    ]
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if form.is_list:
        schema = {"type": "array", "minItems": 1, "items": schema}
        if body.parallel_tool_calls is False:
            schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return schema


def _call_schema(
    index: int,
    name: str,
    schema: dict[str, Any] | None,
    form: CallForm,
    definitions: dict[str, Any],
) -> dict[str, Any]:
    """Return the schema of one call. Definitions inside it move to the top level, where references
    expect them.
    """
    parameters = dict(schema or _ANY_OBJECT)
    prefixes = {}
    own_names: list[str] = []
    for place in ("$defs", "definitions"):
        own = parameters.pop(place, None)
        if isinstance(own, dict):
            prefixes[f"#/{place}/"] = f"#/$defs/{index}_"
            definitions.update({f"{index}_{name}": own[name] for name in own})
            own_names += [f"{index}_{name}" for name in own]
    # Another reference is to another part of the schema, or to all of it.
    whole = f"#/$defs/{index}"
    prefixes["#/"] = f"{whole}/"
    parameters = _move_references(parameters, prefixes, schema, _MAX_SCHEMA_DEPTH)
    for own_name in own_names:
        definition = _move_references(definitions[own_name], prefixes, schema, _MAX_SCHEMA_DEPTH)
        definitions[own_name] = definition
    own = [parameters, *map(definitions.get, own_names)]
    if any(f"{each}/".startswith(f"{whole}/") for each in _references(own)):
        definitions[str(index)] = parameters
        parameters = {"$ref": whole}
    keys = [form.name_key, form.arguments_key]
    values = [{"type": "string", "enum": [name]}, parameters]
    return {
        "type": "object",
        "properties": dict(zip(keys, values, strict=True)),
        "required": keys,
        "additionalProperties": False,
    }


def _move_references(schema: Any, prefixes: dict[str, str], root: Any, depth: int) -> Any:
    """Change the references in a part of the schema `root` for a new position of `root`.

    A reference to nothing is not changed, so that the error about it names what the client sent.
    """
    if depth == 0:
        raise RequestError(
            f"tools: parameters are nested more than {_MAX_SCHEMA_DEPTH} levels deep", param="tools"
        )
    if isinstance(schema, list):
        return [_move_references(item, prefixes, root, depth - 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {
        key: _move_references(value, prefixes, root, depth - 1) for key, value in schema.items()
    }
    reference = moved.get("$ref")
    if isinstance(reference, str) and follow_reference(root, reference) is not None:
        for old, new in prefixes.items():
            if reference.startswith(old):
                moved["$ref"] = new + reference[len(old) :]
                break
        else:
            moved["$ref"] = prefixes["#/"][:-1] if reference == "#" else reference
    return moved


def _references(schema: Any) -> Iterator[str]:
    """Yield all references in a schema."""
    if isinstance(schema, list):
        for item in schema:
            yield from _references(item)
    elif isinstance(schema, dict):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        yield from _references(list(schema.values()))


def first_delta(call_id: str, index: int, name: str, arguments: str) -> ToolCallDelta:
    """Return the first delta of a call, with id, type and name."""
    return {
        "index": index,
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def next_delta(index: int, arguments: str) -> ToolCallDelta:
    """Return a later delta of a call, with new arguments."""
    return {"index": index, "function": {"arguments": arguments}}


def split_beginning(delta: ToolCallDelta) -> list[ToolCallDelta]:
    """Split the first delta of a call into a delta without arguments and a delta with its first
    arguments or input.

    >>> split_beginning(first_delta("a", 0, "f", "{"))[1]
    {'index': 0, 'function': {'arguments': '{'}}
    """
    kind, key = ("custom", "input") if delta.get("custom") else ("function", "arguments")
    call = delta.get(kind) or {}
    if not call.get("name") or not call.get(key):
        return [delta]
    begun = {**delta, kind: {**call, key: ""}}
    return [begun, {"index": delta["index"], kind: {key: call[key]}}]


class NamedToolReader:
    """Reads an output that consists of the arguments of one call, or of its input if the tool is
    custom.

    Args:
        name: name of the tool.
        is_custom: whether the tool is custom.
        make_id: creates ids of calls, in the form of the model's tool parser.
    """

    def __init__(self, name: str, *, is_custom: bool = False, make_id: MakeId = random_id) -> None:
        self._name: str | None = name
        self._is_custom = is_custom
        self._make_id = make_id

    def feed(self, text: str) -> list[ToolCallDelta]:
        """Return the deltas for a piece of the output."""
        if self._name is not None:
            name, self._name = self._name, None
            first = first_delta(self._make_id(name, 0), 0, name, text)
            if self._is_custom:
                del first["function"]
                first.update(type="custom", custom={"name": name, "input": text})
            return [first]
        if not text:
            return []
        return [{"index": 0, "custom": {"input": text}} if self._is_custom else next_delta(0, text)]


class RequiredToolReader:
    """Reads an array of calls while it grows, character by character.

    Arguments are returned as the model wrote them. The reader relies on the grammar of
    `tool_schema`: an array of flat objects, with the name before the parameters. If the output was
    cut off, so are the calls.

    Args:
        make_id: creates ids of calls, in the form of the model's tool parser.
    """

    def __init__(self, make_id: MakeId = random_id) -> None:
        self._make_id = make_id
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        self._index = -1
        self._key: str | None = None
        self._token: list[str] = []
        self._is_value = False

    def feed(self, text: str) -> list[ToolCallDelta]:
        """Return the deltas for a piece of the output."""
        deltas: list[ToolCallDelta] = []
        arguments: list[str] = []
        for char in text:
            was_arguments = self._is_arguments
            name = self._read(char)
            if name is not None:
                call_id = self._make_id(name, self._index)
                deltas.append(first_delta(call_id, self._index, name, ""))
            elif was_arguments and self._is_arguments:
                if not self._is_between(char):
                    arguments.append(char)
            elif was_arguments and arguments:
                deltas.append(next_delta(self._index, "".join(arguments)))
                arguments = []
        if arguments:
            deltas.append(next_delta(self._index, "".join(arguments)))
        return deltas

    def _is_between(self, char: str) -> bool:
        """Return whether a character is white space around a value, which is not part of the
        value.
        """
        return self._depth == 2 and not self._is_string and char.isspace()

    @property
    def _is_arguments(self) -> bool:
        return self._is_value and self._key == "parameters"

    def _read(self, char: str) -> str | None:
        """Read a character. Returns the name of a call if the name ends with this character, else
        None.
        """
        if self._is_string:
            return self._read_in_string(char)
        if char == '"':
            self._is_string = True
            self._token = []
        elif char in "[{":
            self._depth += 1
            if self._depth == 2:
                self._index += 1
                self._key, self._is_value = None, False
        elif char in "]}":
            self._depth -= 1
            if self._depth == 1:
                self._is_value = False
        elif self._depth == 2 and char == ":" and not self._is_value:
            self._is_value = True
        elif self._depth == 2 and char == ",":
            self._key, self._is_value = None, False
        return None

    def _read_in_string(self, char: str) -> str | None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_string = False
            return self._end_string()
        if self._depth == 2:
            self._token.append(char)
        return None

    def _end_string(self) -> str | None:
        if self._depth != 2:
            return None
        text = _unescape("".join(self._token))
        if not self._is_value:
            self._key = text
        elif self._key == "name":
            return text
        return None


def _unescape(raw: str) -> str:
    try:
        return str(json.loads(f'"{raw}"'))
    except ValueError:
        return raw


def merge_deltas(deltas: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    """Merge deltas to complete calls, in the order of their indices.

    >>> first = {"index": 0, "id": "a", "type": "function", "function": {"name": "f"}}
    >>> merge_deltas([first, {"index": 0, "function": {"arguments": "{}"}}])
    [{'id': 'a', 'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}}]
    """
    calls: dict[int, dict[str, Any]] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        function = delta.get("function") or delta.get("custom") or {}
        call = calls.setdefault(delta["index"], {})
        for key, value in (("id", delta.get("id")), ("type", delta.get("type"))):
            if value is not None:
                call[key] = value
        if function.get("name") is not None:
            call["name"] = function["name"]
        piece = function.get("arguments") or function.get("input") or ""
        arguments.setdefault(delta["index"], []).append(piece)
    return [_whole_call(calls[index], "".join(arguments[index])) for index in sorted(calls)]


def _whole_call(call: dict[str, Any], text: str) -> ToolCallDelta:
    kind = call.get("type", "function")
    key = "input" if kind == "custom" else "arguments"
    return {
        "id": call.get("id") or random_tool_call_id(),
        "type": kind,
        kind: {"name": call.get("name", ""), key: text},
    }
