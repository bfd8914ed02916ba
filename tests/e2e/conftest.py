"""Fixtures for the models of the parity tests and for the browser."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.e2e import forced_text
from tests.e2e.browser import Page, chromium_page
from tests.e2e.operated_server import OperatedServer, start_operated_server
from tests.e2e.server import Server, start_server
from tests.entrypoints.openai.scripted_engine import TEMPLATE
from tests.tiny_models import make_tiny_model
from vllm.assets import BUNDLED_MODEL


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory):
    """Return the folder of a tiny model of a family, made once; 'bundled' is the trained model."""

    @cache
    def folder(family: str) -> Path:
        if family == "bundled":
            return BUNDLED_MODEL
        return make_tiny_model(family, tmp_path_factory.mktemp(family))

    return folder


CHAT_FLAGS = (
    *("--max-model-len", "2048", "--chat-template", TEMPLATE),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    # The bundled model writes no thoughts, so only requests that ask for thoughts expect them.
    *("--reasoning-parser", "qwen3"),
    *("--default-chat-template-kwargs", '{"enable_thinking": false}'),
    *forced_text.FLAGS,
)
"""Settings that the tests of the APIs need; none of them affects other tests."""


@pytest.fixture(scope="session")
def chat_server() -> Iterator[Server]:
    """Run a live server for the official clients, one for all modules; no request may run between
    two tests.
    """
    with start_server(*CHAT_FLAGS, compiles_early=True, is_fork=False) as server:
        yield server


@pytest.fixture(scope="session")
def operated_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedServer]:
    """Run a live server with the options of an operator, one for all modules."""
    with start_operated_server(tmp_path_factory.mktemp("traces")) as operated:
        yield operated


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory):
    """Open a tab in one browser for all modules, because its start takes seconds."""
    with chromium_page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Page):
    """Return the tab. After a test it may not have an exception, blocked content or stored data."""
    browser.complaints.clear()
    yield browser
    browser.evaluate(
        "sessionStorage.clear(); localStorage.clear(); indexedDB.databases().then("
        "  (all) => { for (const { name } of all) indexedDB.deleteDatabase(name); })"
    )
    # A page continues to send requests while the server of its test ends: ignore refused
    # connections.
    assert [line for line in browser.complaints if "ERR_CONNECTION_REFUSED" not in line] == []
