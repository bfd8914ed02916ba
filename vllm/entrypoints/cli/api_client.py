"""Call an OpenAI server for `vllm chat` and `vllm complete`: list models and stream answers.

Uses only the standard library: the official client is a large dependency for two commands.
"""

import argparse
import contextlib
import http.client
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

from vllm import envs
from vllm.errors import ConfigError, RequestError
from vllm.utils import FlexibleArgumentParser
from vllm.utils.arguments import add_number, add_text

_PREFIX = "/v1"
_CONNECT_TIMEOUT_S = 10.0
_MAX_LINE_BYTES = 16 * 2**20
"""Limit for one event."""


class ApiClient:
    """A client for one server.

    Args:
        url: URL with the path before the routes, such as http://localhost:8000/v1. Without /v1 at
            its end, it is also tried with it.
        api_key: None: send no key.

    Raises:
        ConfigError: the URL is not an HTTP URL.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = _split(url)
        self._headers = {"Content-Type": "application/json", "User-Agent": "vllm"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def first_model(self) -> str:
        """Return the name of the model that the server lists first.

        Raises:
            ConfigError: the server cannot be reached.
            RequestError: the server refuses the request, or has no model.
        """
        with contextlib.closing(self._connect()) as connection:
            response = self._send(connection, "GET", "/models", None)
            models = _read_json(response).get("data")
        if not isinstance(models, list) or not models:
            raise RequestError("the server lists no model; name one with --model-name")
        return str(models[0].get("id"))

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a streamed answer. Closing the iterator aborts the request.

        Raises:
            ConfigError: the server cannot be reached.
            RequestError: the server refuses the request, or the answer fails midway.
        """
        with contextlib.closing(self._connect()) as connection:
            response = self._send(connection, "POST", path, {**body, "stream": True})
            try:
                yield from _read_events(response)
            except (OSError, http.client.HTTPException) as error:
                raise RequestError(f"the connection was lost during the answer: {error}") from None

    def _connect(self) -> http.client.HTTPConnection:
        is_tls = self._url.scheme == "https"
        kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
        return kind(self._url.hostname or "", self._url.port, timeout=_CONNECT_TIMEOUT_S)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
    ) -> http.client.HTTPResponse:
        response = self._request(connection, method, path, body)
        if response.status == 404 and not self._url.path.rstrip("/").endswith(_PREFIX):
            refusal = f"{_describe_refusal(response)}. Does --url end in {_PREFIX}?"
            given = self._url
            self._url = given._replace(path=given.path.rstrip("/") + _PREFIX)
            connection.close()
            response = self._request(connection, method, path, body)
            if response.status == 404:
                self._url = given
                raise RequestError(refusal)
        if response.status != 200:
            raise RequestError(_describe_refusal(response))
        return response

    def _request(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
    ) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.connect()
            connection.sock.settimeout(None)  # no timeout, because an answer may take long
            target = self._url.path.rstrip("/") + path
            connection.request(method, target, data, self._headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"cannot reach {self._url.geturl()}: {error}") from None


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        has_host = False
    if not has_host or parts.scheme not in ("http", "https"):
        raise ConfigError(f"--url {url!r} must be like http://localhost:8000/v1")
    return parts


def _read_events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := response.readline(_MAX_LINE_BYTES):
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            raise RequestError("the server sent an event that is not JSON") from None
        if not isinstance(chunk, dict):
            raise RequestError("the server sent an event that is not an object")
        if chunk.get("object") == "error" or "error" in chunk:
            raise RequestError(_message_of(chunk))
        yield chunk


def _read_json(response: http.client.HTTPResponse) -> dict[str, Any]:
    try:
        body = json.loads(response.read())
    except (ValueError, http.client.HTTPException):
        body = None
    return body if isinstance(body, dict) else {}


def _describe_refusal(response: http.client.HTTPResponse) -> str:
    return f"the server answered {response.status}: {_message_of(_read_json(response))}"


def _message_of(body: Mapping[str, Any]) -> str:
    """Return the message of an error body, flat or nested."""
    error = body.get("error")
    inner = error if isinstance(error, dict) else body
    return str(inner.get("message") or error or "no reason given")


def text_of(chunk: Mapping[str, Any]) -> str:
    """Return the text in a chunk of a chat or a completion."""
    choices = chunk.get("choices") or [{}]
    delta = choices[0].get("delta")
    text = choices[0].get("text") if delta is None else delta.get("content")
    return text or ""


def add_client_flags(parser: FlexibleArgumentParser) -> None:
    """Add the flags for the server and the model."""
    parser.add_argument(
        "--url",
        default="http://localhost:8000/v1",
        help="URL of the server, including /v1 (default: http://localhost:8000/v1)",
    )
    add_text(
        parser,
        "--model-name",
        "model to use (default: the first that the server lists)",
        metavar="NAME",
    )
    add_text(parser, "--api-key", "API key of the server (default: VLLM_API_KEY)", metavar="KEY")
    add_number(parser, "--max-tokens", "maximum number of tokens in an answer")
    add_number(parser, "--temperature", "sampling temperature; 0: greedy", kind=float)


def connect(args: argparse.Namespace) -> tuple[ApiClient, dict[str, Any]]:
    """Create a client, and return it with the fields that all its requests share.

    Raises:
        ConfigError: the server cannot be reached.
        RequestError: the server refuses the request, or has no model.
    """
    client = ApiClient(args.url, args.api_key or envs.get().VLLM_API_KEY)
    fields = {"model": args.model_name or client.first_model()}
    for name in ("max_tokens", "temperature"):
        if getattr(args, name) is not None:
            fields[name] = getattr(args, name)
    return client, fields


def write_answer(chunks: Iterator[dict[str, Any]]) -> str:
    """Print an answer as it arrives, and return its text. Ctrl-C stops it early."""
    parts: list[str] = []
    with contextlib.closing(chunks) as source:  # type: ignore[type-var]
        try:
            for chunk in source:
                text = text_of(chunk)
                parts.append(text)
                sys.stdout.write(text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            sys.stdout.write(" [stopped]")
        finally:
            sys.stdout.write("\n")
    return "".join(parts)


def answer_prompts(quick: str | None, greeting: str, ask: Callable[[str], None]) -> None:
    """Ask one question, or every question that the user enters until the input ends.

    Args:
        quick: the only question; None: read questions from the user.
        greeting: text that is shown before the first question.
        ask: sends a question and shows the answer.

    Raises:
        ConfigError: the server cannot be reached.
        RequestError: the server refuses `quick`. If it refuses a question that the user entered,
            the error is shown and the next question is read.
    """
    if quick is not None:
        ask(quick)
        return
    sys.stderr.write(f"{greeting}; Ctrl-D ends\n")
    for text in read_prompts():
        try:
            ask(text)
        except RequestError as error:
            sys.stderr.write(f"error: {error}\n")


def read_prompts() -> Iterator[str]:
    """Yield the lines that the user enters, with history and editing. Ctrl-C or Ctrl-D ends the
    input.
    """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() history and editing
    while True:
        try:
            line = input("> " if is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            if is_terminal:
                sys.stdout.write("\n")
            return
        if line.strip():
            yield line
