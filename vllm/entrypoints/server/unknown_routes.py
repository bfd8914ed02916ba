"""Answer requests for an unknown path or method: name it, and the nearest route."""

import difflib
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route

from vllm.entrypoints.anthropic.errors import PATH as MESSAGES_PATH
from vllm.entrypoints.http.asgi import route_path
from vllm.entrypoints.http.errors import ERROR_BODIES, ErrorInfo, error_response

_MAX_PATH_CHARS = 200
_LIST_OF_ROUTES = "/docs"
_FILL_IN_MIDDLE = ("infill", "fim/completions")
"""Ends of paths under which other servers fill in text before a suffix."""
_COMPLETIONS = "/v1/completions"
_VERSIONS = ("v1", "v2")
_VERSION = "/v1"
_OLLAMA = "/api/"
_OTHER_APIS = {
    _OLLAMA: "the API of Ollama",
    "/props": "the server of llama.cpp",
    "/slots": "the server of llama.cpp",
}
"""Beginning of a path that clients try -> the API that has it."""
_RUN_BATCH = "run `vllm run-batch` with a file of requests"
_STORED = "POST /v1/responses stores conversations, and previous_response_id continues them"
_SERVICES = {
    "conversations": _STORED,
    "responses/compact": "send the messages of the conversation that the model still needs",
    "assistants": _STORED,
    "threads": _STORED,
    "files": _RUN_BATCH,
    "uploads": _RUN_BATCH,
    "batches": _RUN_BATCH,
    "messages/batches": "send the requests at the same time, or " + _RUN_BATCH,
    **dict.fromkeys(
        ("vector_stores", "moderations", "images", "videos", "fine_tuning", "realtime", "evals"), ""
    ),
}
"""Path below /v1 of a service of OpenAI or Anthropic that this server does not have -> what to use
instead; empty: it has nothing like it."""
_SIMILARITY = 0.75
"""Minimum similarity of two paths, from 0 to 1; a typing error or two in a short path."""


class UnknownRoutes:
    """Creates the errors for requests that no route of a server accepts.

    Args:
        routers: routers of the server.
    """

    def __init__(self, routers: Iterable[APIRouter]) -> None:
        self._routes = [r for router in routers for r in router.routes if isinstance(r, Route)]
        self._methods: dict[str, set[str]] = {}
        for route in self._routes:
            self._methods.setdefault(route.path, set()).update(route.methods or ())

    def add_to(self, app: FastAPI) -> None:
        """Make the router of an application answer 404 and 405 with these errors."""

        async def answer(request: Request, error: Exception) -> Response:
            path = route_path(request.scope)
            assert isinstance(error, HTTPException)
            # The default text, so not an error of a user's middleware.
            if error.detail == HTTPStatus(error.status_code).phrase:
                find = self.no_path if error.status_code == 404 else self.no_method
                error, path = find(request)
            return error_response(path, error)

        for status in (404, 405):
            app.add_exception_handler(status, answer)

    def no_path(self, request: Request) -> tuple[HTTPException, str]:
        """Return the error for a path without a route, and the path that the client probably
        meant.
        """
        path = route_path(request.scope)
        near = self.nearest(path)
        message = f"there is no route {_shown(request)}"
        if (missing := _missing_service(path)) is not None:
            near = None
            message += missing
        elif path.rstrip("/").endswith(_FILL_IN_MIDDLE) and _COMPLETIONS in self._methods:
            near = _COMPLETIONS
            message += f"; to fill in text before a suffix, send prompt and suffix to POST {near}"
        elif near is not None:
            methods = self._methods[near]
            method = request.method if request.method in methods else min(methods)
            message += f"; did you mean {method} {near}?{_base_url_advice(path, near)}"
        elif (other := _other_api(path)) is not None:
            message += (
                f"; it belongs to {other}. This server has OpenAI's API: add it to the client "
                "as a server that is compatible with OpenAI, with a base URL that ends with /v1"
            )
        elif _LIST_OF_ROUTES in self._methods:
            message += f"; GET {_LIST_OF_ROUTES} shows all routes"
        return HTTPException(404, message), near or path

    def no_method(self, request: Request) -> tuple[HTTPException, str]:
        """Return the error for a method that the path does not accept, and the path."""
        path = route_path(request.scope)
        if _missing_service(path) is not None:
            return self.no_path(request)
        known = set[str]().union(
            *(r.methods or () for r in self._routes if r.matches(request.scope)[0] != Match.NONE)
        )
        accepted = ", ".join(sorted(known))
        message = f"there is no route {_shown(request)}; this path takes {accepted}"
        return HTTPException(405, message, {"Allow": accepted}), path

    def nearest(self, path: str) -> str | None:
        """Return the path of the route that a request may have meant, or None.

        It has a part of a prefix too few or too many, such as `/v1` or Azure's
        `/openai/deployments/NAME`, or a slightly different spelling.
        """
        path = path[:_MAX_PATH_CHARS]
        parts = path.strip("/").split("/")
        same_end = [
            known
            for known in self._methods
            if (own := known.strip("/").split("/")) != [""]
            and parts != [""]
            and own[-len(parts) :] == parts[-len(own) :]
        ]
        if not same_end:
            same_end = [
                known
                for known in self._methods
                if (own := known.strip("/").split("/"))[0] in _VERSIONS
                and own[1:]
                and parts[-len(own[1:]) :] == own[1:]
            ]
        if same_end:
            without_version = _VERSION + path
            return max(same_end, key=lambda known: (known == without_version, len(known)))
        return next(iter(difflib.get_close_matches(path, self._methods, 1, _SIMILARITY)), None)


def _missing_service(path: str) -> str | None:
    """Return what to say about a path below a service of other servers; None if it is no such
    path.
    """
    below = path.removeprefix(_VERSION).strip("/") + "/"
    service = next((each for each in _SERVICES if below.startswith(f"{each}/")), None)
    if service is None:
        return None
    instead = f": {_SERVICES[service]}" if _SERVICES[service] else ""
    return f"; this server does not offer {_VERSION}/{service}{instead}"


def _base_url_advice(path: str, near: str) -> str:
    """Return how to correct the base URL of a client, if the path consists of a wrong base URL and
    the route; else "".
    """
    end = near.removeprefix(_VERSION)
    if end == near or not path.endswith(end):
        return ""
    given = path.removesuffix(end)
    shown = quote(given[:_MAX_PATH_CHARS], errors="replace")
    if not near.startswith(MESSAGES_PATH):
        wrong = f", not with {shown}" if given else ""
        return f" Let the base URL of the client end with {_VERSION}{wrong}"
    if not path.endswith(near):
        return ""
    extra = quote(path.removesuffix(near)[:_MAX_PATH_CHARS], errors="replace")
    return f" Let the base URL of the client end without {extra}, as it adds {_VERSION} itself"


def _ollama_error(info: ErrorInfo) -> dict[str, Any]:
    """Return the body of an error as Ollama's clients read it."""
    return {"error": info.message}


ERROR_BODIES[_OLLAMA] = _ollama_error


def _other_api(path: str) -> str | None:
    """Return the name of another server's API to which a path belongs; None if it is not known."""
    found = (name for beginning, name in _OTHER_APIS.items() if path.startswith(beginning))
    return next(found, None)


def _shown(request: Request) -> str:
    """Return the method and the path of a request in one line."""
    path = quote(route_path(request.scope)[:_MAX_PATH_CHARS], errors="replace")
    return f"{request.method[:20]} {path}"
