"""Facts about the server for all pages: its state, and the progress of its start."""

from typing import Any

import msgspec
from starlette.responses import Response

from vllm.entrypoints.shared.context import ServerContext
from vllm.version import __version__


def describe_server(context: ServerContext) -> dict[str, Any]:
    """Return version, state in one word, and progress.

    `eta_s` is the time until the engine is ready; None while it is not known.

    `phases` lists the phases of the start that have ended.
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
    """Make a JSON response that must not be cached."""
    body = msgspec.json.encode(value)
    headers = {"content-type": "application/json", "cache-control": "no-store"}
    return Response(body, headers=headers)
