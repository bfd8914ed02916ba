"""Test requests that are wrong in every way: each is refused with the name of the field, and the
server continues.
"""

import contextlib
import http.client
import json
import subprocess
import sys

import pytest

from tests.e2e.server import start_server
from tests.exhaustive import exhaustive

pytestmark = pytest.mark.e2e

USER = {"role": "user", "content": "Hi"}
BODIES = {
    "/v1/completions": {"prompt": "def", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": [USER], "max_tokens": 1, "model": ""},
    "/tokenize": {"prompt": "def"},
    "/detokenize": {"tokens": [1]},
    "/invocations": {"prompt": "def", "max_tokens": 1},
    "/v1/embeddings": {"input": "def"},
    "/pooling": {"input": "def"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/classify": {"input": "def"},
}
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
EFFECTS = (b"maximum context length", b"max_tokens", b"structured", b"grammar", b"not found")
"""Names that an error may have instead of the field."""

# Values as JSON text: Python's json module would write some of them in another form.
VALUES = (
    *("null", "true", "0", "-1", "1.5", "1e400", "-1e400", "NaN", "Infinity", "1" * 400),
    *("9223372036854775808", '""', '"x"', '"\\u0000"', '"\\ud800"', '"{"', '"(a+)+b"'),
    *("[]", "[null]", "[[]]", "[-1]", "[1e400]", '["\\ud800"]', "{}", '{"a": 1}', '{"": null}'),
    json.dumps("x" * 100_000),
    "[" * 200 + "]" * 200,
)
RAW_BODIES = (
    b"",
    b"null",
    b"[]",
    b'"x"',
    b"{",
    b"\xff\xfe{}",
    b"{}" * 2,
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"prompt": "a", "prompt": 3}',
    b'{"max_tokens": ' + b"9" * 100_000 + b"}",
    b'{"model": "' + b"\\u0000" * 1000 + b'"}',
)


@pytest.fixture(scope="module")
def server(chat_server):
    return chat_server


@pytest.fixture(scope="module")
def server_with_all_routes():
    flags = ("--disable-uvicorn-access-log", "--request-timeout", "300")
    with start_server(*flags, variables={"VLLM_SERVER_DEV_MODE": "1"}) as server:
        yield server


@pytest.fixture
def post(server):
    """Return a function that sends bodies unchanged over one connection and returns (status,
    body).
    """
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)

    def send(path, data):
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()

    with contextlib.closing(connection):
        yield send


def fields_of(server, path):
    """Return the names of the fields of a route, from the route's own description."""
    api = server.get_json("/openapi.json")
    content = api["paths"][path]["post"].get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    names = set()
    for option in schema.get("anyOf", [schema]):
        reference = option.get("$ref", "").rpartition("/")[2]
        names |= set(api["components"]["schemas"].get(reference, {}).get("properties", {}))
    return names | BODIES[path].keys()


def is_named(field, body):
    return field.encode() in body or any(effect in body for effect in EFFECTS)


@pytest.mark.parametrize("share", [8, exhaustive(1)])
@pytest.mark.parametrize("path", BODIES)
def test_every_field_may_be_nonsense(server, post, path, share):
    """Each field gets every eighth value, and the next field the next ones, so a route gets each
    value several times.

    Together the parts find a value that breaks only one of many fields.
    """
    wrong, unnamed = [], []
    for index, field in enumerate(sorted(fields_of(server, path))):
        rest = {name: value for name, value in BODIES[path].items() if name != field}
        for value in VALUES[index % share :: share]:
            if field.startswith("max_") and value in ("true", "null"):
                continue  # such a request would be valid, and would take long
            data = json.dumps(rest)[:-1] + (", " if rest else "") + f'"{field}": {value}}}'
            status, body = post(path, data.encode())
            if status >= 500 or (status >= 400 and b'"message":"' not in body):
                wrong.append((field, value[:40], status, body[:300]))
            elif status >= 400 and path in GENERATING and not is_named(field, body):
                unnamed.append((field, value[:40], body[:300]))
    assert not wrong, f"{len(wrong)}: {wrong[:5]}"
    assert not unnamed, f"{len(unnamed)}: {unnamed[:5]}"
    assert server.request("POST", "/v1/completions", BODIES["/v1/completions"])[0] == 200


@pytest.mark.parametrize("path", BODIES)
def test_a_body_that_is_no_object_is_refused(post, path):
    for data in RAW_BODIES:
        status, body = post(path, data)
        assert 400 <= status < 500 and b'"message":"' in body, (data[:40], status, body[:300])


def test_nothing_is_held_after_all_this(server):
    server.wait_until_idle()


@pytest.mark.exhaustive
def test_schemathesis_finds_no_server_error(server_with_all_routes, tmp_path):
    server = server_with_all_routes
    pytest.importorskip("schemathesis")
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
    command += ["--checks", "not_a_server_error", "--max-examples", "12", "--no-color"]
    command += ["--phases", "examples,coverage,fuzzing", "--request-timeout", "300", "--seed", "1"]
    command += ["--exclude-path-regex", "^/(livez|startupz|readyz|health|ping|collective_rpc)$"]
    command += ["--generation-database", "none"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    server.wait_until_idle()
