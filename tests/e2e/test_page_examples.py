"""Test that the examples on the pages for users run, word for word."""

import json
import re
import subprocess
from typing import Any

import pytest

from tests.e2e.server import ROOT, Server

_ON_PAGES = "http://localhost:8000"
"""Address of the server of the examples."""


def blocks_of(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def curls_of(page: str) -> list[str]:
    """Return the requests that a page sends with curl, each on one line."""
    lines = "".join(blocks_of(page, "bash")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("curl ") and " -d " in line]


@pytest.fixture(scope="module")
def model(chat_server: Server) -> str:
    """Return the name of the model that the server has."""
    _, _, body = chat_server.request("GET", "/v1/models")
    name: str = json.loads(body)["data"][0]["id"]
    return name


@pytest.mark.parametrize("page", ["openai_server.md", "quickstart.md"])
def test_requests_with_curl(page, chat_server: Server, model):
    commands = curls_of(page)
    assert commands
    for command in commands:
        command = command.replace(_ON_PAGES, chat_server.url)
        command = re.sub(r'"model": "[\w-]+"', f'"model": "{model}"', command)
        shown = subprocess.run(
            ["bash", "-c", f"{command} -sS --fail-with-body"], capture_output=True, text=True
        )
        assert shown.returncode == 0, (command, shown.stdout, shown.stderr)


@pytest.mark.parametrize("page", ["openai_server.md", "offline_inference.md", "quickstart.md"])
def test_programs(page, chat_server: Server, model, capsys):
    blocks = blocks_of(page, "python")
    assert blocks
    # Later examples of a page use names that earlier examples define.
    names: dict[str, Any] = {"__name__": page}
    for block in blocks:
        block = block.replace(_ON_PAGES, chat_server.url).replace("my-model", model)
        exec(compile(block, page, "exec"), names)
    assert capsys.readouterr().out.strip() != ""


def test_fields_that_the_page_lists_are_known(chat_server: Server, model):
    text = (ROOT / "docs" / "openai_server.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^(`top_k`.*?`cache_salt`)\.$", text, re.DOTALL | re.MULTILINE)
    names = re.findall(r"`(\w+)`", listed)
    # A wrong value in a field that the server does not know would have no effect: check the names.
    for name in names:
        body = {"model": model, "prompt": "a", "max_tokens": 1, name: {"wrong": 1}}
        status, _, answer = chat_server.request("POST", "/v1/completions", body)
        assert (status, name in answer.decode()) == (400, True), name
