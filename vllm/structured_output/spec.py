"""Check the structured output of a request, and make it hashable. Compiles nothing."""

import hashlib
import json
import re
from typing import Any, NoReturn

import msgspec

from vllm.config import StructuredOutputConfig
from vllm.config.structured_output import parse_backend
from vllm.errors import RequestError
from vllm.guided_decoding_params import KINDS, GuidedDecodingParams
from vllm.utils.text.json_words import show_value

MAX_TEXT_BYTES = 256 * 2**10
"""Maximum size of a schema, grammar, tag or list of choices, as JSON or text."""
MAX_REGEX_BYTES = 32 * 2**10

_WHITESPACE_ONLY = re.compile(r"(?:\\[nrts ]|[ \n\r\t\[\](){}*+?|,]|(?<=[{,\d])\d)*")
_GROUPS = ("guided_decoding", "structured_outputs")
"""Objects with all that a constraint has; of other requests each part is a field of its own."""
_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar to compile."""

    kind: str
    """json (a schema), regex, choice (a JSON list), ebnf, lark or structural_tag (JSON)."""
    text: str
    backend: str
    """auto, xgrammar or llguidance."""
    may_fall_back: bool
    """Use another backend if the named one does not enforce all of it."""
    any_whitespace: bool
    whitespace_pattern: str | None
    close_all_objects: bool
    is_strict: bool = True
    """Refuse a schema of which no library can enforce all."""

    @property
    def key(self) -> bytes:
        """Hash that is equal for equal specifications."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()


def field_of(params: GuidedDecodingParams) -> str:
    """Return the name of the field for errors: a field of the request, or of
    `GuidedDecodingParams`.

    Raises:
        RequestError: no field is set.
    """
    return params.field or f"guided_decoding.{_kind_of(params)}"


def _kind_of(params: GuidedDecodingParams) -> str:
    for name in KINDS:
        if getattr(params, name) not in (None, False):
            return name
    raise RequestError(
        f"guided_decoding is empty: set one of {', '.join(KINDS)}", param="guided_decoding"
    )


def _option_of(params: GuidedDecodingParams, name: str, request_name: str) -> str:
    """Return the name of an option for errors, as it is written in a request or in Python."""
    group = "guided_decoding.x" if params.field is None else params.field
    group, is_member, _ = group.partition(".")
    return f"{group}.{name}" if group in _GROUPS and is_member else request_name


def make_spec(params: GuidedDecodingParams, config: StructuredOutputConfig) -> GrammarSpec:
    """Return the spec of a request's grammar, after all fast checks.

    Raises:
        RequestError: the value is too large, has the wrong type, or is missing; names the field.
    """
    field = field_of(params)
    backend_field = _option_of(params, "backend", "guided_decoding_backend")
    backend, options = _backend(params.backend or config.guided_decoding_backend, backend_field)
    kind, text = _text(params, field)
    limit = MAX_REGEX_BYTES if kind == "regex" else MAX_TEXT_BYTES
    try:
        size = len(text) if len(text) > limit else len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"{field} is not valid text: {error.reason}", param=field) from None
    if size > limit:
        raise RequestError(f"{field} has {size} bytes; at most {limit} are allowed", param=field)

    def is_on(switch: str) -> bool:
        return bool(
            switch in options
            or getattr(params, switch)
            or getattr(config, f"guided_decoding_{switch}")
        )

    return GrammarSpec(
        kind=kind,
        text=text,
        backend=backend,
        may_fall_back=not is_on("disable_fallback"),
        any_whitespace=not is_on("disable_any_whitespace"),
        whitespace_pattern=_whitespace(
            params.whitespace_pattern,
            _option_of(params, "whitespace_pattern", "guided_whitespace_pattern"),
        ),
        close_all_objects=is_on("disable_additional_properties"),
        is_strict=params.is_strict,
    )


def _backend(name: Any, field: str) -> tuple[str, set[str]]:
    """Return this package's name for a backend, and the options after its colon."""
    try:
        return parse_backend(name)
    except ValueError as error:
        raise RequestError(f"{field} {error}", param=field) from None


def _text(params: GuidedDecodingParams, field: str) -> tuple[str, str]:
    name = _kind_of(params)
    if name == "json_object":
        if params.json_object is not True:
            _refuse(field, "true", params.json_object)
        return "json", '{"type":"object"}'
    if name == "json":
        return "json", _json_text(params.json, field)
    if name == "structural_tag":
        return "structural_tag", _json_text(params.structural_tag, field)
    if name == "choice":
        return "choice", _choices(params.choice, field)
    value = params.regex if name == "regex" else params.grammar
    if not isinstance(value, str):
        _refuse(field, "a string", value)
    if name == "regex":
        return "regex", value
    return ("ebnf" if _EBNF_RULE.search(value[:MAX_TEXT_BYTES]) else "lark"), value


def _json_text(value: Any, field: str) -> str:
    """Return the given JSON text; an object is encoded."""
    if isinstance(value, str):
        return value
    if not isinstance(value, (dict, bool)):
        _refuse(field, "JSON text or an object", value)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{field} is not JSON: {error}", param=field) from None


def _choices(value: Any, field: str) -> str:
    if not isinstance(value, (list, tuple)) or not all(isinstance(c, str) for c in value):
        _refuse(field, "a list of strings", value)
    if not value:
        raise RequestError(f"{field} must not be empty", param=field)
    return json.dumps(list(dict.fromkeys(value)), ensure_ascii=False, separators=(",", ":"))


def _whitespace(pattern: Any, field: str) -> str | None:
    """Check the pattern for whitespace between JSON tokens. It may match only whitespace."""
    if pattern is None:
        return None
    if not isinstance(pattern, str) or len(pattern) > 256:
        _refuse(field, "a short string", pattern)
    if not _WHITESPACE_ONLY.fullmatch(pattern):
        raise RequestError(
            f"{field} must match whitespace only, got {pattern!r}; for example '[ \\n]*'",
            param=field,
        )
    inside = r"\s" in pattern and re.search(r"\[[^\]]*\\s", pattern)
    return pattern.replace(r"\s", r" \n\r\t" if inside else r"[ \n\r\t]")


def _refuse(field: str, wanted: str, value: Any) -> NoReturn:
    raise RequestError(f"{field} must be {wanted}, got {show_value(value)}", param=field)
