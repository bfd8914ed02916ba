"""Test the pages as an HTTP client sees them; tests/e2e opens them in a browser."""

import asyncio
import re
from importlib.resources import files

import pytest

from tests.entrypoints.openai.scripted_engine import ScriptedEngine, make_client
from vllm import assets
from vllm.config import PoolerConfig
from vllm.entrypoints.pages.web_page import load_page, page_paths
from vllm.entrypoints.server.startup_app import StartupApp
from vllm.entrypoints.shared.server_args import ServerArgs

FOLDER = files(assets) / "web_pages"
PAGES = ("chat", "status", "docs", "plan")


def client_of(engine=None, **settings):
    return make_client(engine or ScriptedEngine(), **settings)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_nothing_from_elsewhere_and_says_so(name):
    page = load_page(name)
    text, policy = page.body.decode(), page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "trusted-types 'none'" in policy
    assert page.headers["x-dns-prefetch-control"] == "off"
    assert "unsafe" not in policy and "'self'" not in policy.replace("connect-src 'self'", "")
    assert not re.findall(r"""<[^a][^>]* (?:src|href)=["'](?!data:,)""", text)
    assert not re.findall(r" on[a-z]+=[\"']| style=[\"']|@import|url\(", text)
    addresses = set(re.findall(r"https?://[a-z][^\s\"'`|]*", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert "include:" not in text


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_made_of_all_files_of_its_folder(name):
    included = re.findall(r"[a-z]+/[a-z_]+\.(?:js|css)", (FOLDER / name / "page.html").read_text())
    own = {f"{name}/{file.name}" for file in (FOLDER / name).iterdir() if file.suffix != ".html"}
    assert own <= set(included)


def test_no_script_reads_text_as_html():
    scripts = [file for folder in FOLDER.iterdir() for file in folder.glob("*.js")]
    assert len(scripts) > 10
    for script in scripts:
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|new Function",
            script.read_text(),
        )
        assert not found, script.name


@pytest.mark.parametrize(
    ("settings", "pages"),
    [
        ({}, {"/": "chat", "/status": "status", "/docs": "docs"}),
        ({"disable_fastapi_docs": True}, {"/": "chat", "/docs": None}),
        ({"disable_web_ui": True}, {"/": "status", "/status": "status"}),
        ({"status_page": False}, {"/": "chat", "/status": None}),
        ({"disable_web_ui": True, "status_page": False}, {"/": None, "/status": None}),
        ({"root_path": "/api"}, {"/": "chat", "/api/": "chat", "/api/status": "status"}),
        ({"api_key": ("key",)}, {"/": "chat", "/status": "status"}),
    ],
)
def test_flags_say_which_page_is_where(settings, pages):
    client = client_of(**settings)
    for path, name in pages.items():
        response = client.get(path)
        assert response.status_code == (404 if name is None else 200)
        assert name is None or response.content == load_page(name).body


def test_without_a_page_there_is_nothing_that_it_would_ask_for():
    assert client_of(disable_web_ui=True).get("/chat.json").status_code == 404
    assert client_of(status_page=False).get("/status.json").status_code == 404


def test_a_browser_keeps_the_page_until_it_changes():
    client = client_of()
    etag = client.get("/").headers["etag"]
    again = client.get("/", headers={"If-None-Match": etag})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/", headers={"If-None-Match": '"old"'}).status_code == 200
    assert client.head("/").status_code == 200
    assert client.post("/").status_code == 405


def test_what_pages_ask_for_needs_the_key():
    client = client_of(api_key=("key",))
    assert client.get("/chat.json").status_code == 401
    about = client.get("/chat.json", headers={"Authorization": "Bearer key"})
    assert about.json()["state"] == "ready" and about.headers["cache-control"] == "no-store"


def test_the_chat_page_is_told_what_the_model_can_do():
    engine = ScriptedEngine(max_model_len=128)
    engine.model_defaults = {"temperature": 0.6, "eos_token_ids": [3]}
    about = client_of(engine).get("/chat.json").json()
    assert (about["refusal"], about["has_chat_template"]) == (None, True)
    assert about["modalities"] == ["text"]
    assert (about["max_model_len"], about["has_auto_tool_choice"]) == (128, False)
    defaults = about["sampling_defaults"]
    assert (defaults["temperature"], defaults["top_p"]) == (0.6, 1.0)


def test_a_model_without_a_template_is_one_that_completes():
    engine = ScriptedEngine()
    engine.given_tokenizer.chat_template = None
    about = client_of(engine, chat_template=None).get("/chat.json").json()
    assert (about["refusal"], about["has_chat_template"]) == (None, False)


def test_a_model_that_does_not_generate_says_what_it_does():
    pooler = PoolerConfig(task="embed", pooling_type="MEAN", is_causal=False)
    engine = ScriptedEngine(pooler=pooler)
    assert "POST /v1/embeddings" in client_of(engine).get("/chat.json").json()["refusal"]


def test_a_server_without_a_tokenizer_says_so():
    engine = ScriptedEngine()
    engine.given_tokenizer = None
    assert "tokenizer" in client_of(engine).get("/chat.json").json()["refusal"]


def test_a_start_is_told_with_the_phases_that_are_over():
    engine = ScriptedEngine()
    client = client_of(engine)
    engine.startup.set_unready("loading weights")
    engine.startup.report("warm-up", 3, 9, 12.5)
    about = client.get("/chat.json").json()
    assert about["eta_s"] == 12.5
    assert (about["state"], about["phase"], about["done"]) == ("starting", "warm-up", 3)
    assert [phase["name"] for phase in about["phases"]] == ["loading weights"]
    assert "has_chat_template" not in about
    engine.startup.set_ready()
    engine.startup.set_unready("restarting the engine")
    assert client.get("/chat.json").json()["phases"] == []


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", b"<title>vLLM chat"),
        ("/status", b"<title>vLLM status"),
        ("/docs", b"<title>vLLM API"),
        ("/chat.json", b"starting"),
    ],
)
def test_pages_are_there_before_the_application(path, expected):
    sent = []

    async def send(message):
        sent.append(message)

    app = StartupApp(pages=page_paths(ServerArgs()))
    asyncio.run(app({"type": "http", "method": "GET", "path": path}, None, send))
    assert sent[0]["status"] == 200 and expected in sent[1]["body"]
