"""Describe the state of the server and the progress of its start, for all pages."""

from typing import Any

import msgspec
from starlette.responses import Response

from vllm.entrypoints.shared.context import ServerContext
from vllm.version import __version__


def describe_server(context: ServerContext) -> dict[str, Any]:
    """Return the version, the state in one word, and the progress of the start.

    `eta_s` is the estimated time until the engine is ready; None if it is not known. `phases` lists
    the finished phases of the start.
    """
    startup = context.engine.startup
    return {
        "version": __version__,
        "state": context.state,
        "phase": startup.phase,
        "done": startup.done,
        "total": startup.total,
        "eta_s": startup.eta_seconds,
        "phases": [
            {"name": name, "seconds": round(seconds, 2)}
            for name, seconds in startup.finished_phases
        ],
    }


def fresh_json(value: Any) -> Response:
    """Return a JSON response that must not be cached."""
    body = msgspec.json.encode(value)
    headers = {"content-type": "application/json", "cache-control": "no-store"}
    return Response(body, headers=headers)
