"""Test the answers before the application has been imported."""

import asyncio
import json
import subprocess
import sys

import pytest

from vllm.entrypoints.server.startup_app import StartupApp


class Call:
    """One GET request, in the event loop of the test."""

    def __init__(self, app, path):
        self.sent = []
        scope = {"type": "http", "method": "GET", "path": path}
        self.task = asyncio.ensure_future(app(scope, None, self.send))

    async def send(self, message):
        self.sent.append(message)

    @property
    def status(self):
        return self.sent[0]["status"] if self.sent else None


async def real_app(scope, receive, send):
    await send({"type": "http.response.start", "status": 201, "headers": []})


def run(path, decide, root_path=""):
    """Return (status before `decide`, status after it, last message)."""

    async def test():
        app = StartupApp(root_path)
        call = Call(app, path)
        await asyncio.sleep(0)
        before = call.status
        decide(app)
        await asyncio.wait_for(call.task, 120)
        return before, call.status, call.sent[-1]

    return asyncio.run(test())


def load(app):
    app.switch_to(real_app)


@pytest.mark.parametrize(
    ("path", "status"),
    [("/livez", 200), ("/startupz", 503), ("/readyz", 503), ("/health", 503), ("/ping", 503)],
)
@pytest.mark.parametrize("root_path", ["", "/api"])
def test_probes_are_answered_at_once(path, status, root_path):
    before, _, message = run(root_path + path, load, root_path)
    assert before == status
    if path in ("/startupz", "/readyz"):
        assert json.loads(message["body"])["status"] == "starting"


def test_other_requests_wait_for_the_application():
    assert run("/v1/models", load)[:2] == (None, 201)


def test_without_an_application_those_who_wait_are_sent_away():
    before, after, message = run("/v1/models", StartupApp.close)
    assert (before, after) == (None, 503)
    assert json.loads(message["body"])["error"]["type"] == "service_unavailable_error"


def test_all_requests_go_to_the_application_once_it_is_there():
    async def test():
        app = StartupApp()
        load(app)
        call = Call(app, "/livez")
        await call.task
        return call.status

    assert asyncio.run(test()) == 201


HEAVY = ("numpy", "torch", "transformers")
TOO_SLOW = {
    "openai.api_server": ("fastapi", "pydantic", *HEAVY),
    "server.uvicorn_server": ("fastapi", "pydantic", *HEAVY),
    "server.app": ("torch", "transformers", "openai", "xgrammar", "opentelemetry.sdk"),
}
"""Modules in the order of a start, and packages that are not imported with them."""


def test_what_listens_imports_nothing_that_takes_long():
    code = f"""
import importlib, sys
for module, too_slow in {TOO_SLOW}.items():
    importlib.import_module("vllm.entrypoints." + module)
    print([name for name in too_slow if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout == "[]\n" * len(TOO_SLOW), done.stderr
