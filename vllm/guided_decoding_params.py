"""Parameters of the structured output of a request."""

from collections.abc import Mapping
from typing import Any

import msgspec

from vllm.errors import RequestError

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
"""Fields that are a constraint; the others are options of it."""

REQUEST_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "structural_tag": "structural_tag",
    "guided_decoding_backend": "backend",
    "guided_whitespace_pattern": "whitespace_pattern",
}
"""Name of a request's own field -> field of `GuidedDecodingParams`."""


INTERNAL_FIELDS = ("field", "start", "is_strict")
"""Fields of `GuidedDecodingParams` that no user sets."""


class GrammarStart(msgspec.Struct, frozen=True, kw_only=True):
    """The point of an output at which its grammar begins; by default the beginning of the output.

    A server sets it, because it knows how its model writes thoughts and tool calls.

    Args:
        is_thinking: the output begins inside of thoughts.
        thought_starts: if the output begins with one of these, thoughts follow.
        thought_ends: after the first of these, thoughts are over and the answer begins.
        calls: an answer that begins with one of these is free text: tool calls.
        calls_in_thoughts: inside of thoughts, one of these ends them and begins such calls.
        special_tokens: id -> text, of the special tokens that are part of these texts.
        grammar_starts: the answer is free text, and after each of these the grammar applies once,
            unless one of `calls` follows.
        allows_space: white space is allowed before these texts and the answer. The reader of the
            answer removes it.
    """

    is_thinking: bool = False
    thought_starts: tuple[str, ...] = ()
    thought_ends: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    calls_in_thoughts: tuple[str, ...] = ()
    grammar_starts: tuple[str, ...] = ()
    special_tokens: dict[int, str] = {}
    allows_space: bool = False

    @property
    def is_late(self) -> bool:
        """Whether free text may come before the grammar, or instead of it."""
        return bool(self.is_thinking or self.thought_starts or self.calls or self.grammar_starts)

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts in free text after which the grammar begins."""
        return self.thought_ends + self.grammar_starts


class GuidedDecodingParams(msgspec.Struct, kw_only=True):
    """Parameters of structured output.

    At most one of json, regex, choice, grammar, json_object and structural_tag may be set.

    Args:
        json: a JSON schema, its text, or a model class of pydantic.
        regex: a pattern of Python's `re` that matches the whole output.
        choice: the output is one of these.
        grammar: EBNF with a rule `root`, or Lark with a rule `start`.
        json_object: any JSON object.
        structural_tag: free text with JSON between tags; JSON text.
        backend: auto, xgrammar or llguidance; None: the backend of the engine.
        whitespace_pattern: allowed between the tokens of JSON.
        disable_any_whitespace: no whitespace that JSON does not need.
        disable_additional_properties: objects have only the properties that their schema names.
        disable_fallback: raise an error for features that the backend does not enforce.
        field: the user's field with this value, for errors; None: this class.
        start: where the grammar begins; None: at the beginning of the output.
        is_strict: refuse keywords of a JSON schema that cannot be enforced. A server leaves them
            out if the API that it serves accepts them.

    Raises:
        RequestError: (a ValueError) more than one kind is set. The content is checked with the
            request.
    """

    json: Any = None  # str, dict, or a class
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    backend: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    disable_fallback: bool = False
    field: str | None = None
    start: GrammarStart | None = None
    is_strict: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.json, type) and hasattr(self.json, "model_json_schema"):
            self.json = self.json.model_json_schema()
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) > 1:
            raise RequestError(
                f"guided_decoding accepts one kind of constraint, got {', '.join(given)}",
                param="guided_decoding",
            )

    @property
    def ignores_space(self) -> bool:
        """Whether white space before outputs of this kind is not part of them."""
        if self.choice is not None:
            return all(isinstance(text, str) and text[:1].strip() for text in self.choice)
        return self.json is not None or bool(self.json_object)


StructuredOutputsParams = GuidedDecodingParams
"""The newer name."""


def read_guided_decoding(
    guided_decoding: Any, structured_outputs: Any
) -> GuidedDecodingParams | None:
    """Return the constraint of a request, which may be given under one of two names.

    Its value is parameters, or a dict of them.

    Raises:
        RequestError: both names are used, the type is wrong, or a key of the dict is unknown.
    """
    if guided_decoding is not None and structured_outputs is not None:
        raise RequestError(
            "guided_decoding and structured_outputs are both given; they are two names of one "
            "parameter: leave one out",
            param="structured_outputs",
        )
    name, given = "guided_decoding", guided_decoding
    if structured_outputs is not None:
        name, given = "structured_outputs", structured_outputs
    if given is None or isinstance(given, GuidedDecodingParams):
        return given
    if not isinstance(given, Mapping):
        raise RequestError(
            f"{name} must be StructuredOutputsParams (or GuidedDecodingParams), or a dict of their "
            f"fields, got {type(given).__name__}",
            param=name,
        )
    accepted = [f for f in GuidedDecodingParams.__struct_fields__ if f not in INTERNAL_FIELDS]
    if unknown := [key for key in given if key not in accepted]:
        raise RequestError(
            f"{name} has no field {unknown[0]!r}; accepted: {', '.join(accepted)}", param=name
        )
    return GuidedDecodingParams(**given)
