"""Compile grammars in processes that can be killed (`vllm.utils.process.deadline_worker`).

A hostile request could make reading the schema or the pattern, compiling, or a step of the output
very slow, use too much memory, or crash. So all of these are tried here first.
"""

import json
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from vllm.messages import Grammar
from vllm.structured_output.backends import BACKENDS, make_backend
from vllm.structured_output.backends.interface import Backend, BackendError
from vllm.structured_output.backends.vocabulary import Vocabulary
from vllm.structured_output.json_schema import PreparedSchema, SchemaError
from vllm.structured_output.regex import translate
from vllm.structured_output.spec import GrammarSpec

MAX_CONTENT_BYTES = 8 * 2**20
"""Maximum number of bytes of a compiled grammar. The engine loads this much in 0.1 s; a grammar
with a larger one is compiled by the other library."""
_TRIAL_TOKENS = 24
_MAX_STEP_S = 0.5
"""Time for one mask. The engine waits for it at every token of the output."""


def serve(setup: bytes) -> Callable[[bytes], bytes]:
    """Return a function that compiles an encoded `GrammarSpec` to an encoded `Grammar` or error
    message.

    Args:
        setup: result of `Vocabulary.encoded`.
    """
    vocabulary = Vocabulary.decode(setup)
    backends = _installed(vocabulary)
    decoder = msgspec.msgpack.Decoder(GrammarSpec)

    def handle(argument: bytes) -> bytes:
        try:
            result: Grammar | str = compile_spec(decoder.decode(argument), vocabulary, backends)
        except ValueError as error:
            result = str(error)
        return msgspec.msgpack.encode(result)

    return handle


def _installed(vocabulary: Vocabulary) -> dict[str, Backend]:
    """Return the backends that can be imported; raises ImportError if none can be."""
    backends: dict[str, Backend] = {}
    failure: ImportError | None = None
    for name in BACKENDS:
        try:
            backends[name] = make_backend(name, vocabulary)
        except ImportError as error:
            failure = error
    if not backends and failure is not None:
        raise failure
    return backends


def compile_spec(
    spec: GrammarSpec, vocabulary: Vocabulary, backends: dict[str, Backend]
) -> Grammar:
    """Compile a grammar with the first backend that can.

    Raises:
        ValueError: no backend can; the message says why.
    """
    source, only_llguidance, left_out = _read(spec)
    failure: ValueError | None = None
    for name in _order(spec, only_llguidance):
        if name not in backends:
            failure = failure or BackendError(f"{name} is not installed")
            continue
        try:
            content = backends[name].compile(
                spec.kind,
                source,
                any_whitespace=spec.any_whitespace,
                whitespace_pattern=spec.whitespace_pattern,
            )
            if len(content) > MAX_CONTENT_BYTES:
                raise BackendError(
                    f"the compiled grammar has {len(content)} bytes; at most "
                    f"{MAX_CONTENT_BYTES} are allowed"
                )
            _try_out(backends[name], content, vocabulary)
        except BackendError as error:
            failure = failure or error
            continue
        return Grammar(
            backend=name,
            content=content,
            key=spec.key,
            vocabulary_key=vocabulary.key,
            left_out=left_out,
        )
    assert failure is not None
    raise failure


def _order(spec: GrammarSpec, only_llguidance: str | None) -> list[str]:
    """Return the backends to try, best first."""
    if spec.kind in ("regex", "choice", "lark"):
        order = ["llguidance", "xgrammar"]
    else:
        order = ["xgrammar", "llguidance"]
    if spec.backend != "auto":
        order.sort(key=lambda name: name != spec.backend)
        if not spec.may_fall_back:
            order = order[:1]
    if only_llguidance is None and spec.whitespace_pattern is None:
        return order
    if order == ["xgrammar"]:
        reason = only_llguidance or "a whitespace pattern"
        raise BackendError(f"xgrammar does not enforce {reason}, and the fallback is disabled")
    return ["llguidance"]


# ---- reading ----------------------------------------------------------------------------------


def _read(spec: GrammarSpec) -> tuple[Any, str | None, tuple[str, ...]]:
    """Return the source for a backend, the reason if only llguidance can enforce it, and what is
    left out of it.
    """
    close = "all" if spec.close_all_objects else "named"
    if spec.kind == "json":
        prepared = PreparedSchema(_parse(spec.text), close_objects=close, is_strict=spec.is_strict)
        return prepared.schema, prepared.only_llguidance, tuple(prepared.left_out)
    if spec.kind == "regex":
        return *translate(spec.text), ()
    if spec.kind == "choice":
        return json.loads(spec.text), None, ()
    if spec.kind == "structural_tag":
        return *_read_structural_tag(_parse(spec.text), close), ()
    return spec.text, None, ()


def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise SchemaError(f"not JSON: {error}") from None
    except RecursionError:
        raise SchemaError("the JSON is nested too deeply") from None


def _refuse_constant(name: str) -> Any:
    raise SchemaError(f"not JSON: {name} is not a JSON number")


def _read_structural_tag(tag: Any, close: str) -> tuple[Any, str | None]:
    """Convert a structural tag to the newer format, with all schemas inside it prepared."""
    if isinstance(tag, dict) and "structures" in tag:
        tag = _newer_format(tag)
    if not isinstance(tag, dict) or not isinstance(tag.get("format"), dict):
        raise SchemaError("a structural tag must have 'structures' and 'triggers', or a 'format'")
    reasons: list[str] = []
    prepared = _prepare_inside(tag, close, reasons, 0)
    is_simple = tag["format"].get("type") == "triggered_tags"
    if reasons and not is_simple:
        raise SchemaError(f"{reasons[0]} cannot be enforced inside this structural tag")
    return prepared, reasons[0] if reasons else None


def _newer_format(tag: dict[str, Any]) -> dict[str, Any]:
    try:
        tags = [
            {
                "type": "tag",
                "begin": structure["begin"],
                "content": {"type": "json_schema", "json_schema": structure["schema"]},
                "end": structure["end"],
            }
            for structure in tag["structures"]
        ]
        triggers = tag["triggers"]
    except (KeyError, TypeError) as error:
        raise SchemaError(
            f"a structural tag must have 'triggers', and 'structures' with begin, schema and end: "
            f"{error}"
        ) from None
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags},
    }


def _prepare_inside(value: Any, close: str, reasons: list[str], depth: int) -> Any:
    if depth > 50:
        raise SchemaError("the structural tag is nested too deeply")
    if isinstance(value, list):
        return [_prepare_inside(item, close, reasons, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    own = {}
    for key, item in value.items():
        if key == "json_schema":
            prepared = PreparedSchema(item, close_objects=close)
            own[key] = prepared.schema
            reasons += [prepared.only_llguidance] if prepared.only_llguidance else []
        else:
            own[key] = _prepare_inside(item, close, reasons, depth + 1)
    return own


# ---- trying out -------------------------------------------------------------------------------


def _try_out(backend: Backend, content: bytes, vocabulary: Vocabulary) -> None:
    """Generate the beginning of an output as the engine would, to test a compiled grammar.

    Raises:
        BackendError: no output is possible, the library fails, or it takes too long.
    """
    matcher = backend.load(content).matcher()
    rng = random.Random(0)
    mask = np.empty(vocabulary.num_words, np.int32)
    for _ in range(_TRIAL_TOKENS):
        started = time.thread_time()
        matcher.fill(mask)
        bits = np.unpackbits((mask & vocabulary.text_mask).view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        if not len(allowed):
            if not matcher.is_complete():
                raise BackendError("no output can satisfy the grammar")
            return
        matcher.accept(int(rng.choice(allowed)))
        if time.thread_time() - started > _MAX_STEP_S:
            raise BackendError(f"enforcing the grammar takes more than {_MAX_STEP_S} s per token")
