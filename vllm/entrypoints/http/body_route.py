"""Read the JSON bodies of routes with limits, and outside the event loop if they are large.

FastAPI would read and validate any body in the event loop.
"""

import json
import sys
from collections.abc import Callable, Coroutine
from functools import cached_property, partial
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import Response

from vllm.entrypoints.http import off_loop
from vllm.entrypoints.http.long_texts import CutJson
from vllm.entrypoints.http.request_limits import check_limits, check_num_values
from vllm.entrypoints.shared.context import get_context
from vllm.entrypoints.shared.server_args import ServerArgs

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class BodyRoute(APIRoute):
    """A route whose handler gets a body that is within the limits of the server.

    The handler is a coroutine function with a body, and optionally the request, as its arguments.
    It is called directly, because FastAPI would validate the body once more, and resolve
    dependencies that these routes do not have.
    """

    def get_route_handler(self) -> Handler:
        """Return a handler that reads and validates the body. A request without a body uses
        FastAPI's handler.
        """
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        dependant, endpoint = self.dependant, self.endpoint
        (body_name,) = (param.name for param in dependant.body_params)
        request_name = dependant.request_param_name
        others = (dependant.path_params, dependant.query_params, dependant.header_params)
        assert not any((*others, dependant.cookie_params, dependant.dependencies)), self.path

        async def read_and_handle(request: Request) -> Response:
            data = await request.body()
            off_loop.mark_request(len(data))
            if not data:
                return await handle(request)  # FastAPI's handler reports the missing body
            args = get_context(request).args
            given = {body_name: await off_loop.run(partial(self.read_body, data, args))}
            if request_name is not None:
                given[request_name] = request
            return await endpoint(**given)

        return read_and_handle

    @property
    def is_direct(self) -> bool:
        """Whether the server may call the handler directly, without the router: only POST, with a
        body, and without path parameters.
        """
        return self.body_field is not None and self.methods == {"POST"} and "{" not in self.path

    @cached_property
    def _classes(self) -> list[type]:
        assert self.body_field is not None
        return body_classes(self.body_field.field_info.annotation)

    def read_body(self, data: bytes, args: ServerArgs) -> Any:
        """Read the body as the object that the route expects.

        Raises:
            RequestError: the body exceeds a limit of the server; names the flag.
            RequestValidationError: it is not JSON, or does not fit the route.
        """
        assert self.body_field is not None
        text = CutJson(data)
        del data
        check_num_values(text.rest, args)
        try:
            body = text.parse()
        except json.JSONDecodeError as error:
            raise _not_json(error.pos, error.msg) from None
        except UnicodeDecodeError as error:
            raise _not_json(error.start, f"not {error.encoding}") from None
        except ValueError:  # Python limits the number of digits
            raise _not_json(
                0, f"an integer must have at most {sys.get_int_max_str_digits()} digits"
            ) from None
        except RecursionError:
            raise _not_json(0, "nested too deeply") from None
        if isinstance(body, dict):
            body = _with_extra_body(body)
            for kind in self._classes:
                check_limits(kind, body, args)
        value, errors = self.body_field.validate(body, {}, loc=("body",))
        if errors:
            raise RequestValidationError(errors)
        return value


def _with_extra_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with the fields of its `extra_body` at its top.

    This is an argument of OpenAI's Python client, which sends its fields at the top. Users of other
    clients write it into the body, as all examples have it. A field of the body has priority.
    """
    extra = body.get("extra_body")
    if extra is None:
        return body
    if not isinstance(extra, dict):
        error = {"type": "dict_type", "loc": ("body", "extra_body"), "msg": "", "input": extra}
        raise RequestValidationError([error])
    return {**extra, **{name: value for name, value in body.items() if name != "extra_body"}}


def body_classes(annotation: Any) -> list[type]:
    """Return the class of a body, or the classes of a union."""
    if isinstance(annotation, type):
        return [annotation]
    return [kind for part in getattr(annotation, "__args__", ()) for kind in body_classes(part)]


def _not_json(position: int, reason: str) -> RequestValidationError:
    error = {
        "type": "json_invalid",
        "loc": ("body", position),
        "msg": "JSON decode error",
        "input": {},
        "ctx": {"error": reason},
    }
    return RequestValidationError([error])
