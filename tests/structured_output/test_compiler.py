"""Test compiling the grammar of a request: limits, cache, deadline, and processes that may be
killed.
"""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from tests.reach import kept_bytes_of, num_busy_of, num_starts_of, set_compile_timeout
from vllm.assets import BUNDLED_MODEL
from vllm.config import StructuredOutputConfig
from vllm.errors import CapacityError, ConfigError, RequestError
from vllm.sampling_params import GuidedDecodingParams
from vllm.structured_output import compiler as compiler_module
from vllm.structured_output.compiler import GrammarCompiler
from vllm.structured_output.spec import make_spec
from vllm.transformers_utils.tokenizer import get_tokenizer
from vllm.utils.process.deadline_worker import (
    DeadlineExceeded,
    DeadlineWorker,
    WorkerDied,
    make_server,
)

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
LEGACY_TAG = {
    "structures": [{"begin": "<f=a>", "schema": OBJECT, "end": "</f>"}],
    "triggers": ["<f="],
}
LEGACY_TAG_WITH_PATTERN = {
    "structures": [{"begin": "<f=a>", "schema": {"type": "string", "pattern": "^a$"}, "end": ""}],
    "triggers": ["<f="],
}
NEWER_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [
            {
                "begin": "<f=a>",
                "content": {"type": "json_schema", "json_schema": OBJECT},
                "end": "</f>",
            }
        ],
    },
}


def make_compiler(**config) -> GrammarCompiler:
    tokenizer = get_tokenizer(str(BUNDLED_MODEL))
    return GrammarCompiler(StructuredOutputConfig(**config), tokenizer, len(tokenizer) + 5)


START = GrammarCompiler.start
"""The method before tests/conftest.py replaces it, when the first test begins."""


@pytest.fixture(autouse=True)
def processes_of_its_own(monkeypatch):
    """Use a separate fork server, which starts as for users, since these tests inspect it."""
    monkeypatch.setattr("vllm.structured_output.compiler.make_server", make_server)
    monkeypatch.setattr(GrammarCompiler, "start", START)


@pytest.fixture(scope="module")
def compiler():
    compiler = make_compiler(grammar_compile_timeout=120.0)
    yield compiler
    compiler.close()


class FakeWorker(DeadlineWorker):
    """Returns the answers of a test, without a process."""

    def __init__(self, answer) -> None:
        super().__init__(make_server("no:where"))
        self.answer = answer
        self.num_calls = 0

    def start(self) -> None:
        pass

    def call(self, argument: bytes, timeout_s: float) -> bytes:
        self.num_calls += 1
        return self.answer(argument, timeout_s)


def with_worker(answer, monkeypatch, **config) -> tuple[GrammarCompiler, FakeWorker]:
    """Return a compiler that has one worker."""
    worker = FakeWorker(answer)
    monkeypatch.setattr("vllm.structured_output.compiler.NUM_WORKERS", 1)
    monkeypatch.setattr("vllm.structured_output.compiler.DeadlineWorker", lambda server: worker)
    return make_compiler(**config), worker


def packed(text: str) -> bytes:
    """Return the encoded answer that there is no grammar, with the reason."""
    return msgspec.msgpack.encode(text)


@pytest.mark.parametrize(
    ("asked", "backend"),
    [
        ({"json": OBJECT}, "xgrammar"),
        ({"json": json.dumps(OBJECT)}, "xgrammar"),
        ({"json": {"type": "string", "minLength": 2}}, "llguidance"),
        ({"json": OBJECT, "backend": "guidance"}, "llguidance"),
        ({"json": OBJECT, "whitespace_pattern": r"[ \n]*"}, "llguidance"),
        ({"json": {"type": "string", "minLength": 2}, "backend": "xgrammar"}, "llguidance"),
        ({"json": OBJECT, "backend": "outlines"}, "xgrammar"),
        ({"json_object": True}, "xgrammar"),
        ({"regex": r"\d+"}, "llguidance"),
        ({"choice": ["yes", "no"]}, "llguidance"),
        ({"choice": ['q"\n', "é😀", ""], "backend": "xgrammar"}, "xgrammar"),
        ({"grammar": 'root ::= "a" | "b"'}, "xgrammar"),
        ({"grammar": 'start: "a" | "b"'}, "llguidance"),
        ({"structural_tag": json.dumps(LEGACY_TAG)}, "xgrammar"),
        ({"structural_tag": json.dumps(NEWER_TAG)}, "xgrammar"),
        ({"structural_tag": json.dumps(LEGACY_TAG_WITH_PATTERN)}, "llguidance"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_the_backend_is_chosen_by_what_is_asked(compiler, asked, backend):
    assert compiler.compile(GuidedDecodingParams(**asked)).backend == backend


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        ({}, "guided_decoding", "is empty: set one of"),
        ({"json": 3}, "guided_decoding.json", "must be JSON text or an object, got 3"),
        ({"json": "{"}, "guided_decoding.json", "not JSON"),
        ({"json": '{"const": NaN}'}, "guided_decoding.json", "NaN is not a JSON number"),
        ({"json": {"a": {1}}}, "guided_decoding.json", "not JSON"),
        ({"json": {"uniqueItems": True}}, "guided_decoding.json", "'uniqueItems' of the schema"),
        ({"json": {"a": "x" * 300_000}}, "guided_decoding.json", "300008 bytes; at most 262144"),
        ({"json": '{"a":' * 90_000}, "guided_decoding.json", "450000 bytes; at most 262144"),
        (
            {"json": '{"a":' * 20_000 + "1" + "}" * 20_000},
            "guided_decoding.json",
            "nested too deeply",
        ),
        (
            {
                "json": {"type": "string", "minLength": 2},
                "backend": "xgrammar",
                "disable_fallback": True,
            },
            "guided_decoding.json",
            "xgrammar does not enforce 'minLength'",
        ),
        (
            {"json": OBJECT, "whitespace_pattern": "x*"},
            "guided_decoding.whitespace_pattern",
            "whitespace",
        ),
        ({"json": OBJECT, "backend": "best"}, "guided_decoding.backend", "one of auto"),
        ({"json": OBJECT, "backend": "auto:x"}, "guided_decoding.backend", "options no-fallback"),
        (
            {"json": {"type": "string", "minLength": 2}, "backend": "xgrammar:no-fallback"},
            "guided_decoding.json",
            "the fallback is disabled",
        ),
        ({"regex": 3}, "guided_decoding.regex", "must be a string, got 3"),
        ({"regex": "(a"}, "guided_decoding.regex", "not a regular expression"),
        ({"regex": "a" * 40_000}, "guided_decoding.regex", "40000 bytes; at most 32768"),
        ({"regex": "\ud800"}, "guided_decoding.regex", "not valid text"),
        ({"choice": []}, "guided_decoding.choice", "must not be empty"),
        ({"choice": ["a", 1]}, "guided_decoding.choice", "must be a list of strings"),
        ({"grammar": "rubbish"}, "guided_decoding.grammar", "guided_decoding.grammar: "),
        (
            {"grammar": 'root ::= root "a"'},
            "guided_decoding.grammar",
            "no output can satisfy the grammar",
        ),
        (
            {"structural_tag": "{}"},
            "guided_decoding.structural_tag",
            "must have 'structures' and 'triggers'",
        ),
        ({"json_object": 1}, "guided_decoding.json_object", "must be true"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_refused_and_names_the_field(compiler, asked, param, message):
    with pytest.raises(RequestError) as failure:
        compiler.compile(GuidedDecodingParams(**asked))
    assert failure.value.param == param
    assert message in str(failure.value)


HOSTILE = [
    {"regex": "(a+)+b"},
    {"regex": "((a{1,100}){1,100}){1,100}b"},
    {"regex": "(?:a|b)*a(?:a|b){200}"},
    {"regex": "(.*a){1,30}b(.*c){1,30}"},
    {"regex": "(" * 9000 + ")" * 9000},
    {"json": {"enum": [f"x{i}" for i in range(20_000)]}},
    {"json": {"type": "string", "maxLength": 10**9}},
    {"json": {"type": "array", "items": {}, "minItems": 10**5, "maxItems": 10**6}},
    {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9}}}},
    {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(5000)}}},
    {"grammar": "root ::= a\na ::= b\nb ::= a"},
    {"grammar": 'root ::= ("a"{0,1000}){0,1000}'},
    {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
    {"grammar": 'start: x\nx: x x | "a" | '},
]


@pytest.mark.slow
def test_hostile_grammars_end_in_time_and_do_not_hold_up_others():
    compiler = make_compiler(grammar_compile_timeout=2.0)
    compiler.compile(GuidedDecodingParams(regex="first"))

    def attack(asked) -> float:
        started = time.monotonic()
        try:
            compiler.compile(GuidedDecodingParams(**asked))
        except RequestError as error:
            assert error.param.removeprefix("guided_decoding.") in ("json", "regex", "grammar")
        except CapacityError as error:
            assert error.status == 503
        return time.monotonic() - started

    with ThreadPoolExecutor(len(HOSTILE)) as threads:
        times = threads.map(attack, HOSTILE)
        started = time.monotonic()
        for _ in range(50):
            compiler.compile(GuidedDecodingParams(regex="first"))
        assert time.monotonic() - started < 60, "what is cached does not wait"
        # Twice the time of waiting and compiling, and the start of a new process.
        assert max(times) < 120
    assert compiler.compile(GuidedDecodingParams(regex="x+")).backend == "llguidance"
    compiler.close()


def test_options_may_follow_the_library_of_the_engine():
    """So did scripts of the fork write the settings that are flags of their own today."""
    config = StructuredOutputConfig(guided_decoding_backend="xgrammar:no-fallback")
    spec = make_spec(GuidedDecodingParams(json=OBJECT), config)
    assert (spec.backend, spec.may_fall_back, spec.any_whitespace) == ("xgrammar", False, True)
    for wrong in ("xgrammar:fallback", "best"):
        with pytest.raises(ConfigError, match="guided_decoding_backend must be one of auto, xgr"):
            StructuredOutputConfig(guided_decoding_backend=wrong)


def test_equal_requests_are_compiled_once(monkeypatch):
    release = threading.Event()

    def answer(argument: bytes, timeout_s: float) -> bytes:
        release.wait(120)
        return packed("no")

    compiler, worker = with_worker(answer, monkeypatch)
    failures = []

    def ask() -> None:
        with pytest.raises(RequestError, match=r"guided_decoding\.regex: no") as failure:
            compiler.compile(GuidedDecodingParams(regex="a"))
        failures.append(failure.value)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    release.set()
    for thread in threads:
        thread.join()
    assert worker.num_calls == 1
    assert len(set(map(id, failures))) == 8, "an exception belongs to one request"
    ask()
    assert worker.num_calls == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [(DeadlineExceeded(), "it takes more than 7 s to compile"), (WorkerDied(), "too much memory")],
)
def test_a_grammar_that_kills_its_process_is_not_tried_again(error, message, monkeypatch):
    def answer(argument: bytes, timeout_s: float) -> bytes:
        assert timeout_s == 7
        raise error

    compiler, worker = with_worker(answer, monkeypatch, grammar_compile_timeout=7.0)
    for _ in range(3):
        with pytest.raises(RequestError, match=message):
            compiler.compile(GuidedDecodingParams(regex="a"))
    assert worker.num_calls == 1


def test_after_a_timeout_the_next_grammar_is_compiled_by_a_process_that_is_already_started():
    compiler = make_compiler(grammar_compile_timeout=120.0)
    compiler.compile(GuidedDecodingParams(regex="first"))
    set_compile_timeout(compiler, 1e-6)
    for pattern in "abc":
        with pytest.raises(RequestError, match="takes more than 1e-06 s"):
            compiler.compile(GuidedDecodingParams(regex=pattern))
    set_compile_timeout(compiler, 120.0)
    assert compiler.compile(GuidedDecodingParams(regex="d")).backend == "llguidance"
    assert num_starts_of(compiler) == 1, "the imports were not done again"
    compiler.close()


def test_a_request_does_not_wait_without_end_for_its_turn(monkeypatch):
    release = threading.Event()
    compiler, _ = with_worker(
        lambda argument, timeout_s: release.wait(120) and packed("no"),
        monkeypatch,
        grammar_compile_timeout=0.05,
    )
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(compiler.compile, GuidedDecodingParams(regex="a"))
        while num_busy_of(compiler) == 0:
            time.sleep(0.01)
        with pytest.raises(CapacityError, match="try again later") as failure:
            compiler.compile(GuidedDecodingParams(regex="b"))
        assert failure.value.status == 503
        release.set()
        assert "no" in str(first.exception())


def test_the_cache_is_bounded_in_bytes_and_keeps_what_was_used_last(monkeypatch):
    compiler, worker = with_worker(
        lambda argument, timeout_s: packed("x" * 1000), monkeypatch, grammar_cache_bytes=8192
    )

    def ask(pattern: str) -> None:
        with pytest.raises(RequestError):
            compiler.compile(GuidedDecodingParams(regex=pattern))

    for pattern in "abcd":
        ask(pattern)
        ask("a")
    assert worker.num_calls == 4
    ask("e")
    assert kept_bytes_of(compiler) <= 8192
    ask("a")
    assert worker.num_calls == 5, "used a moment ago"
    ask("b")
    assert worker.num_calls == 6, "the oldest was dropped"


def test_what_is_asked_with_other_options_is_another_grammar(compiler):
    variants = [
        {},
        {"disable_any_whitespace": True},
        {"disable_additional_properties": True},
        {"backend": "llguidance"},
    ]
    asked = [GuidedDecodingParams(json={"type": "object"}, **more) for more in variants]
    assert len({compiler.compile(params).key for params in asked}) == 4
    assert compiler.cached(asked[0]) == compiler.compile(asked[0])
    assert compiler.cached(GuidedDecodingParams(regex="never seen")) is None


def test_without_a_tokenizer_everything_is_refused():
    compiler = GrammarCompiler(StructuredOutputConfig(), None, 100)
    with pytest.raises(RequestError, match=r"^text\.format: .* needs a tokenizer") as failure:
        compiler.compile(GuidedDecodingParams(regex="a", field="text.format"))
    assert failure.value.param == "text.format"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"json": {"uniqueItems": True}, "field": "response_format"}, "response_format"),
        ({"json": OBJECT, "backend": "x", "field": "tools"}, "guided_decoding_backend"),
        (
            {"json": OBJECT, "whitespace_pattern": "x", "field": "guided_json"},
            "guided_whitespace_pattern",
        ),
        (
            {"json": OBJECT, "whitespace_pattern": "x", "field": "structured_outputs.json"},
            "structured_outputs.whitespace_pattern",
        ),
    ],
)
def test_errors_name_what_the_user_of_a_server_sent(compiler, asked, param):
    with pytest.raises(RequestError, match=f"^{param}") as failure:
        compiler.compile(GuidedDecodingParams(**asked))
    assert failure.value.param == param


def test_processes_are_ended_while_they_start(monkeypatch, tmp_path):
    server = make_server("tests.utils.workers:endless", bytes(tmp_path / "tried"))
    monkeypatch.setattr(compiler_module, "make_server", lambda target, setup: server)
    hanging = GrammarCompiler(StructuredOutputConfig(), get_tokenizer(BUNDLED_MODEL), 4096)
    hanging.start()
    while not (tmp_path / "tried").exists():
        time.sleep(0.01)
    closing = threading.Thread(target=hanging.close, daemon=True)
    closing.start()
    closing.join(60)  # far more time than needed, and less than the time limit of a start
    assert not closing.is_alive()
    assert not server.is_running
