"""Compile a chat template, and find out its properties by rendering probes.

A probe is a conversation of two to five messages with words that occur nowhere else. A template
reads a field of a message if the rendered probe contains the words that the field has. Every
property is determined once per template, when it is first needed.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jinja2

from vllm.entrypoints.conversation.environment import environment
from vllm.entrypoints.conversation.messages import REASONING_NAMES, Message

ContentForm = Literal["string", "parts"]

_WORDS = ("zqvone", "zqvtwo")
"""Words of the probes. Two, as parts of one content must both appear."""
_DUMPED = re.compile(rf"""['"]text\\?['"]:\s?\\?['"](?:{"|".join(_WORDS)})""")
"""A list of parts that was printed as it is."""
_MIDDLE_USER: Message = {"role": "user", "content": "hi"}
_MIDDLE_ANSWER: Message = {"role": "assistant", "content": "ho"}
_TOOL_NAME = "zqvtool"
_TOOL: dict[str, Any] = {
    "name": _TOOL_NAME,
    "description": "d",
    "parameters": {"type": "object", "properties": {}, "required": []},
}
_ROLES = frozenset(
    ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
)
_MAX_OTHER_ROLES = 32
_MAX_ROLE_CHARS = 64
_NINE_LETTERS = "aB3dE6gH9"
_FOREIGN_ID = "call_1a2b3c4d5e6f"


class MessageKind(NamedTuple):
    """The properties of a message that decide how a template handles it."""

    role: str
    has_calls: bool
    is_first: bool
    is_last: bool


class Template:
    """A compiled chat template and its properties. Thread-safe.

    Args:
        source: source text of the template.
        special_tokens: variables of all renderings: name -> text.
        has_tools: render probes with a tool, because templates may behave differently then.

    Raises:
        jinja2.TemplateSyntaxError: the source is not valid Jinja.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, Any], *, has_tools: bool = False
    ) -> None:
        self._compiled = compile_template(source)
        self._special_tokens = special_tokens
        self._has_tools = has_tools
        self._answers: dict[object, bool] = {}
        self._other_roles: set[str] = set()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation.

        Raises:
            Any error that the template raises.
        """
        return self._compiled.render(
            {
                **self._special_tokens,
                "documents": None,
                **(variables or {}),
                "messages": messages,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
            }
        )

    # ---- content ------------------------------------------------------------------------------

    def content_form(self, kind: MessageKind) -> ContentForm | None:
        """Return the form of content that the template shows, a string if possible; None if it
        shows neither form.
        """
        if self._shows_content(kind, "string"):
            return "string"
        return "parts" if self._shows_content(kind, "parts") else None

    def reads_parts(self, kind: MessageKind) -> bool:
        """Return whether the template shows the texts of a list of parts, rather than the list as
        Python or JSON text.
        """
        return self._shows_content(kind, "parts")

    def _shows_content(self, kind: MessageKind, form: ContentForm) -> bool:
        """Return whether the content of a message is shown in this form. Other messages have
        strings, or the same form if needed.
        """
        if kind.role not in _ROLES and not self._admits(kind.role):
            return form == "string"

        def ask() -> bool:
            given: Any = _in_parts(*_WORDS) if form == "parts" else " ".join(_WORDS)
            probe, index = _around(kind, given)
            if self._shows(probe):
                return True
            alike = [_with_parts(each) if i != index else each for i, each in enumerate(probe)]
            return self._shows(alike)

        return self._ask((kind, form), ask)

    def shows_media(self, kind: MessageKind, modality: str, placeholder: str) -> bool:
        """Return whether the template writes the placeholder once for each item of a list, and
        shows the texts.
        """
        if kind.role not in _ROLES and not self._admits(kind.role):
            return False

        def ask() -> bool:
            texts, item = _in_parts(*_WORDS), media_of_template(modality)
            probe, index = _around(kind, [item, texts[0], item, texts[1]])
            alike = [_with_parts(each) if i != index else each for i, each in enumerate(probe)]
            return any(
                self._shows(each) and (self._try(each) or "").count(placeholder) == 2
                for each in (probe, alike)
            )

        return self._ask((kind, modality, placeholder), ask)

    # ---- roles --------------------------------------------------------------------------------

    def shows_role(self, kind: MessageKind) -> bool:
        """Return whether the template shows messages of this kind. Also True if no probe can be
        rendered.
        """
        return self.content_form(kind) is not None or not self._can_be_probed()

    def shows_two_systems(self) -> bool:
        """Return whether the template shows two system messages at the beginning."""
        first, second = ({"role": "system", "content": word} for word in _WORDS)
        probe = [first, second, _MIDDLE_USER]
        return self._ask(
            "systems",
            lambda: (
                self._shows(probe)
                or self._shows([_with_parts(each) for each in probe])
                or not self._can_be_probed()
            ),
        )

    def shows_lone_system(self) -> bool:
        """Return whether the template shows a system message without any other message."""
        probe = [{"role": "system", "content": " ".join(_WORDS)}]
        return self._ask(
            "lone",
            lambda: (
                self._shows(probe)
                or self._shows([_with_parts(each) for each in probe])
                or not self._can_be_probed()
            ),
        )

    def refuses_greetings(self) -> bool:
        """Return whether the template refuses a message of the assistant before the first message
        of the user, and accepts it after one.
        """
        usual = [_MIDDLE_USER, _MIDDLE_ANSWER, _MIDDLE_USER]
        return self._ask("greetings", lambda: self._renders(usual) and not self._renders(usual[1:]))

    def refuses_in_a_row(self, *roles: str) -> bool:
        """Return whether the template refuses a message of the second role directly after the first
        role.
        """

        def ask() -> bool:
            before = {
                "user": [_MIDDLE_USER],
                "assistant": [_MIDDLE_USER, _MIDDLE_ANSWER],
                "tool": _call_of({}, result="r"),
            }[roles[0]]
            after = {"role": roles[1], "content": "next"}
            return self._renders(before) and not self._renders([*before, after])

        return self._ask(roles, ask)

    def needs_single_calls(self) -> bool:
        """Return whether the template refuses two calls in one message, or shows only one of
        them.
        """
        single, other = (_call_of({"key": word}, result="r") for word in _WORDS)
        calls = single[1]["tool_calls"] + other[1]["tool_calls"]
        double = [single[0], {**single[1], "tool_calls": calls}, single[2]]

        def ask() -> bool:
            text, both = self._try(single), self._try(double)
            if text is None or both is None:
                return text is not None
            return _WORDS[0] in text and not all(word in both for word in _WORDS)

        return self._ask("calls", ask)

    def hides_results(self) -> bool:
        """Return whether the template shows results of tools under none of the names of their
        role.
        """
        kinds = [
            MessageKind(role, has_calls=False, is_first=False, is_last=is_last)
            for role in ("tool", "function", "ipython", "observation")
            for is_last in (True, False)
        ]
        return self._ask(
            "results",
            lambda: self._can_be_probed() and all(self.content_form(k) is None for k in kinds),
        )

    def hides_calls(self) -> bool:
        """Return whether the template writes the same text for a message without its calls."""

        def ask() -> bool:
            tools = [_function(_TOOL)]
            for result in (None, "r"):
                probe = _call_of({}, result=result)
                bare = [{k: v for k, v in each.items() if k != "tool_calls"} for each in probe]
                text = self._try(probe, tools)
                if text is not None:
                    return text == self._try(bare, tools)
            return False

        return self._ask("hidden calls", ask)

    def refuses_calls_without_tools(self) -> bool:
        """Return whether the template refuses calls and results in a request without tools, and
        accepts them in a request with tools.
        """

        def ask() -> bool:
            arguments = '{"key": "value"}' if self.needs_text_arguments() else {"key": "value"}
            probe = _call_of(arguments, result="r")
            try:
                self.render(probe, None)
            except MemoryError:
                raise
            except Exception:  # a template may raise anything
                return self._renders(probe)
            return False

        return not self._has_tools and self._ask("no tools", ask)

    def refuses_unanswered_calls(self) -> bool:
        """Return whether the template refuses a user message after a call without a result."""
        answered = [*_call_of({}, result="r"), _MIDDLE_ANSWER, _MIDDLE_USER]
        unanswered = [*_call_of({}), _MIDDLE_USER]
        return self._ask(
            "unanswered", lambda: self._renders(answered) and not self._renders(unanswered)
        )

    # ---- tools --------------------------------------------------------------------------------

    def needs_nine_letters(self) -> bool:
        """Return whether the template refuses ids of calls that are not nine letters and digits."""
        return self._ask(
            "ids",
            lambda: (
                self._renders(_call_of({}, result="r"))
                and not self._renders(_call_of({}, result="r", call_id=_FOREIGN_ID))
            ),
        )

    def needs_text_arguments(self) -> bool:
        """Return whether the template shows the arguments of a call as JSON only if they are given
        as text.
        """
        key, value = _WORDS

        def is_shown(arguments: Any) -> bool:
            text = self._try_unchanged(_call_of(arguments, result="r"))
            return text is not None and value in text and f"'{key}'" not in text

        as_text = f'{{"{key}": "{value}"}}'
        return self._ask("arguments", lambda: not is_shown({key: value}) and is_shown(as_text))

    def reads_damaged_arguments(self) -> bool:
        """Return whether the template shows arguments that are text but not valid JSON."""
        text = f'{{"{" ".join(_WORDS)}'
        return self._ask("damaged", lambda: self._shows(_call_of(text, result="r")))

    def can_show_tool(self, *lacks: str) -> bool:
        """Return whether the template renders a tool without the given fields (description,
        parameters, properties).

        Also True if it refuses a complete tool.
        """
        parameters = {k: v for k, v in _TOOL["parameters"].items() if k not in lacks}
        function = {**_TOOL, "parameters": parameters}
        tool = _function({key: value for key, value in function.items() if key not in lacks})
        return self._ask(
            ("tool", *lacks),
            lambda: (
                self._renders([_MIDDLE_USER], [tool])
                or not self._renders([_MIDDLE_USER], [_function(_TOOL)])
            ),
        )

    def refuses_thoughts_and_text(self) -> bool:
        """Return whether the template refuses reasoning together with content in a message with
        calls.
        """
        thoughts = dict.fromkeys(REASONING_NAMES, "t")
        return self._ask(
            "thoughts",
            lambda: (
                not self._renders(_call_of({}, result="r", content="c", **thoughts))
                and self._renders(_call_of({}, result="r", content="c"))
            ),
        )

    # ---- probes -------------------------------------------------------------------------------

    def _ask(self, question: object, find: Callable[[], bool]) -> bool:
        answer = self._answers.get(question)
        if answer is None:
            answer = self._answers[question] = find()
        return answer

    def _can_be_probed(self) -> bool:
        """Return whether the template renders a single message. Some need variables that only
        requests have.
        """
        probe = [_MIDDLE_USER]
        return self._ask(
            "any", lambda: self._renders(probe) or self._renders([_with_parts(_MIDDLE_USER)])
        )

    def _admits(self, role: str) -> bool:
        """Return whether to probe a role that is not part of any API. Their count is limited,
        because clients may invent roles.
        """
        if len(self._other_roles) < _MAX_OTHER_ROLES and len(role) <= _MAX_ROLE_CHARS:
            self._other_roles.add(role)
        return role in self._other_roles

    def _shows(self, probe: Sequence[Message]) -> bool:
        text = self._try(probe)
        return text is not None and all(w in text for w in _WORDS) and not _DUMPED.search(text)

    def _renders(self, probe: Sequence[Message], tools: Sequence[Any] | None = None) -> bool:
        return self._try(probe, tools) is not None

    def _try(self, probe: Sequence[Message], tools: Sequence[Any] | None = None) -> str | None:
        if any("tool_calls" in each for each in probe) and self.needs_text_arguments():
            probe = [_with_text_arguments(each) for each in probe]
        return self._try_unchanged(probe, tools)

    def _try_unchanged(
        self, probe: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> str | None:
        if tools is None and (self._has_tools or any("tool_calls" in each for each in probe)):
            tools = [_function(_TOOL)]
        try:
            return self.render(probe, tools)
        except MemoryError:
            raise
        except Exception:  # a failed probe is a result too, because a template may raise anything
            return None


@functools.lru_cache(maxsize=32)
def load_template(
    source: str, special_tokens: tuple[tuple[str, str], ...], *, has_tools: bool = False
) -> Template:
    """Return the template with this source. The most recently used templates are cached, with their
    properties.

    Raises:
        jinja2.TemplateSyntaxError: the source is not valid Jinja.
    """
    return Template(source, dict(special_tokens), has_tools=has_tools)


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> jinja2.Template:
    """Return the compiled template, which checks its syntax.

    Raises:
        jinja2.TemplateSyntaxError: the source is not valid Jinja.
    """
    return environment().from_string(source)


def media_of_template(modality: str) -> dict[str, str]:
    """Return the part of a message that represents an image, audio or video, as templates expect
    it.

    Some templates look at the value of "type", and others for a key that is named after the
    modality; the part has both.
    """
    return {"type": modality, modality: ""}


def _around(kind: MessageKind, content: Any) -> tuple[list[Message], int]:
    """Return the shortest usual conversation that contains a message of this kind, and the index of
    the message.
    """
    probed: Message = {"role": kind.role, "content": content}
    if kind.role == "tool":
        return [*_call_of({}), probed | {"tool_call_id": _NINE_LETTERS, "name": _TOOL_NAME}], 2
    if kind.has_calls:
        return _call_of({}, result="r", content=content), 1
    before: list[Message] = []
    if not kind.is_first:
        before = [_MIDDLE_USER] if kind.role == "assistant" else [_MIDDLE_USER, _MIDDLE_ANSWER]
    if kind.role == "user":
        after = [] if kind.is_last else [_MIDDLE_ANSWER, _MIDDLE_USER]
    else:
        after = [] if kind.is_last and not kind.is_first else [_MIDDLE_USER]
    return [*before, probed, *after], len(before)


def _call_of(
    arguments: Any,
    *,
    result: str | None = None,
    call_id: str = _NINE_LETTERS,
    content: Any = "",
    **fields: Any,
) -> list[Message]:
    """Return a conversation with a question, a tool call, and its result if there is one."""
    function = {"name": _TOOL_NAME, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    messages: list[Message] = [
        _MIDDLE_USER,
        {"role": "assistant", "content": content, "tool_calls": [call], **fields},
    ]
    if result is not None:
        answer = {"role": "tool", "tool_call_id": call_id, "name": _TOOL_NAME, "content": result}
        messages.append(answer)
    return messages


def _with_text_arguments(message: Message) -> Message:
    """Return a message whose calls have their arguments as JSON text."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        if not isinstance(function["arguments"], str):
            function = {**function, "arguments": json.dumps(function["arguments"])}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}


def _in_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _with_parts(message: Message) -> Message:
    content = message["content"]
    return {**message, "content": _in_parts(content)} if isinstance(content, str) else message
