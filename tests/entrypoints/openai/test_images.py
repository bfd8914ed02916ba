"""Test images in the requests of all routes: what the engine gets, and what is refused earlier.

The engine expands images by a rule of this test; other tests use models.
"""

import asyncio
import base64
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.entrypoints.openai.scripted_engine import (
    ScriptedEngine,
    make_app,
    make_client,
    open_stream,
)
from vllm.engine.input.prompt_tokenizer import TokenizedPrompt
from vllm.entrypoints.conversation.media import MediaRules, MediaText
from vllm.entrypoints.openai.chat import prompt
from vllm.entrypoints.server import app
from vllm.entrypoints.server.app import MEDIA_PATHS
from vllm.errors import RequestError

READS_IMAGES = MediaRules(texts={"image": MediaText("<image>", "<image>")}, limits={"image": 3})
TOKENS_OF_IMAGE = 7
EXAMPLE = Path(__file__).parents[3] / "examples" / "online_serving" / "image.py"
URL = "http://pictures.example/a.png"
DATA = f"data:image/png;base64,{base64.b64encode(b'b').decode()}"


class ImageEngine(ScriptedEngine):
    """Expands each image, and records the prompts with their images."""

    def __init__(self, **more: Any) -> None:
        super().__init__("ok", **more)
        self.prompts: list[dict[str, Any]] = []
        self.media: list[Any] = []

    async def tokenize(self, prompt: Any, **options: Any) -> TokenizedPrompt:
        self.prompts.append(prompt)
        images = prompt.get("multi_modal_data", {}).get("image", [])
        rest = {key: prompt[key] for key in ("prompt", "add_special_tokens")}
        plain = await super().tokenize(rest, **options)
        added = [0] * (TOKENS_OF_IMAGE * len(images))
        return TokenizedPrompt([*added, *plain.token_ids], plain.text, media=tuple(images))

    def generate(self, prompt: Any, *args: Any, **more: Any) -> Any:
        kept = {key: value for key, value in prompt.items() if key != "media"}
        self.media.append(prompt.get("media"))
        return super().generate(kept, *args, **more)

    @property
    def images(self) -> list[bytes]:
        """Return the content of the images of the newest prompt."""
        return [each.data for each in self.prompts[-1].get("multi_modal_data", {}).get("image", ())]


class FakeFetcher:
    """Returns the last letter of the URL as soon as all URLs of a request are being fetched."""

    def __init__(self, num_together: int = 1) -> None:
        self.num_together = num_together
        self.running: list[str] = []
        self.fetched: list[str] = []
        self.cancelled: list[str] = []
        self.all_run = asyncio.Event()

    def make_budget(self) -> None:
        return None

    async def fetch(self, url: str, modality: str, where: str, budget: None) -> bytes:
        assert modality == "image"
        self.running.append(url)
        if "missing" in url:
            raise RequestError(f"{where}: cannot fetch {url!r}", param=where)
        if len(self.running) == self.num_together:
            self.all_run.set()
        try:
            await self.all_run.wait()
        except asyncio.CancelledError:
            self.cancelled.append(url)
            raise
        self.fetched.append(url)
        return url.encode()


@pytest.fixture(autouse=True)
def reads_images(monkeypatch):
    def be(rules):
        for module in (prompt, app):
            monkeypatch.setattr(module, "media_rules", lambda processor: rules)

    be(READS_IMAGES)
    return be


def serve(engine=None, fetcher=None, **settings):
    engine = engine or ImageEngine()
    client = make_client(engine, **settings)
    client.app.state.context.media_fetcher = fetcher or FakeFetcher()
    return engine, client


def parts(*urls):
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


def chat(*content, **more):
    return {"messages": [{"role": "user", "content": list(content)}], "max_tokens": 2, **more}


TEXT = {"type": "text", "text": "what <image> is it?"}
SOURCE = {"type": "image", "source": {"type": "url", "url": URL}}
USE = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
INPUT = {"type": "input_image", "image_url": URL}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": [INPUT]}
TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}

REQUESTS = {
    "chat": ("/v1/chat/completions", chat(*parts(URL), TEXT)),
    "a result of a tool": (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "look"},
                {"role": "assistant", "tool_calls": [TOOL_CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": parts(URL)},
            ],
            "max_tokens": 2,
        },
    ),
    "a template of the request": (
        "/v1/chat/completions",
        chat(*parts(URL), chat_template="{{ messages[0].content }}"),
    ),
    "messages": (
        "/v1/messages",
        {"max_tokens": 2, "messages": [{"role": "user", "content": [SOURCE]}]},
    ),
    "a tool result of messages": (
        "/v1/messages",
        {
            "max_tokens": 2,
            "messages": [
                {"role": "user", "content": "look"},
                {"role": "assistant", "content": [USE]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [SOURCE]}],
                },
            ],
        },
    ),
    "responses": ("/v1/responses", {"input": [{"role": "user", "content": [INPUT]}]}),
    "an output of responses": ("/v1/responses", {"input": [CALL, OUTPUT]}),
    "truncated responses": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [INPUT]}], "truncation": "auto"},
    ),
    "tokens of a chat": ("/tokenize", chat(*parts(URL)) | {"max_tokens": None}),
    "tokens of messages": (
        "/v1/messages/count_tokens",
        {"messages": [{"role": "user", "content": [SOURCE]}]},
    ),
}


def num_prompt_tokens(path, answer):
    if path == "/tokenize":
        return answer["count"]
    if path.endswith("/count_tokens"):
        return answer["input_tokens"]
    usage = answer["usage"]
    if path == "/v1/messages":  # here, input_tokens does not include tokens from the prefix cache
        return usage["input_tokens"] + usage["cache_read_input_tokens"]
    return usage.get("prompt_tokens", usage.get("input_tokens"))


@pytest.mark.parametrize("name", REQUESTS)
def test_every_route_gives_the_engine_its_images(name):
    path, body = REQUESTS[name]
    body = {key: value for key, value in body.items() if value is not None}
    fetcher = FakeFetcher()
    engine, client = serve(fetcher=fetcher)
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert engine.images == [URL.encode()]
    assert fetcher.running == [URL]
    for media in engine.media:  # the media of the running request
        assert [each.data for each in media] == [URL.encode()]
    assert bool(engine.media) == ("token" not in path)
    own = len(engine.given_tokenizer(engine.prompts[-1]["prompt"], add_special_tokens=False)[0])
    assert num_prompt_tokens(path, answer.json()) == own + TOKENS_OF_IMAGE


def test_the_engine_gets_content_name_and_detail_of_images_and_what_is_text_of_the_user():
    engine, client = serve()
    first = {"type": "image_url", "image_url": {"url": DATA, "detail": "low"}, "uuid": "u1"}
    body = chat(
        *(first, TEXT, *parts(URL)), mm_processor_kwargs={"do_resize": False}, cache_salt="s"
    )
    fetcher = FakeFetcher(num_together=2)
    client.app.state.context.media_fetcher = fetcher
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    (given,) = engine.prompts
    one, two = given["multi_modal_data"]["image"]
    assert (one.where, one.uuid, one.detail) == ("messages[0].content[0]", "u1", "low")
    assert (two.where, two.uuid, two.detail) == ("messages[0].content[2]", None, None)
    assert given["multi_modal_uuids"] == {"image": ["u1", None]}
    assert given["mm_processor_kwargs"] == {"do_resize": False}
    assert given["cache_salt"] == "s"
    assert given["prompt"].count("<image>") == 3
    assert given["literal_placeholders"] == [1]
    assert sorted(fetcher.fetched) == sorted([DATA, URL])


def test_the_engine_gets_embeddings_as_they_are_sent():
    engine, client = serve()
    pair = {"image_embeds": "AA", "image_grid_thw": "BB"}
    sent = ("AA", pair)
    content = [{"type": "image_embeds", "image_embeds": each, "uuid": "u"} for each in sent]
    answer = client.post("/v1/chat/completions", json=chat(TEXT, *content))
    assert answer.status_code == 200, answer.text
    one, two = engine.prompts[0]["multi_modal_data"]["image"]
    assert (one.where, one.item) == ("messages[0].content[1]", {"image_embeds": "AA"})
    assert (two.where, two.item) == ("messages[0].content[2]", pair)
    assert engine.prompts[0]["multi_modal_uuids"] == {"image": ["u", "u"]}
    wrong = client.post("/v1/chat/completions", json=chat({"type": "image_embeds"}))
    assert wrong.status_code == 400
    assert "messages[0].content[0].image_embeds must be" in wrong.json()["error"]["message"]


def test_text_of_the_user_is_named_also_without_images():
    engine, client = serve()
    client.post("/v1/chat/completions", json=chat(TEXT))
    assert engine.prompts[0]["literal_placeholders"] == [0]
    assert "multi_modal_data" not in engine.prompts[0]


def test_an_image_that_is_there_twice_is_fetched_once():
    fetcher = FakeFetcher()
    engine, client = serve(fetcher=fetcher)
    assert client.post("/v1/chat/completions", json=chat(*parts(URL, URL))).status_code == 200
    assert engine.images == [URL.encode()] * 2
    assert fetcher.running == [URL]


def test_truncation_of_a_conversation_fetches_an_image_once():
    fetcher = FakeFetcher()
    engine, client = serve(fetcher=fetcher)
    items = [{"role": "user", "content": "long " * 60}, {"role": "assistant", "content": "a"}]
    body = {"input": [*items, {"role": "user", "content": [INPUT]}], "truncation": "auto"}
    answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert len(engine.prompts) > 1
    assert engine.images == [URL.encode()]
    assert fetcher.running == [URL]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/v1/chat/completions",
            chat(*parts(URL, URL, URL, URL)),
            "has 4 images, and this server takes at most 3",
        ),
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": [SOURCE] * 4}]},
            "has 4 images, and this server takes at most 3",
        ),
        (
            "/v1/chat/completions",
            chat(*parts(URL), truncate_prompt_tokens=4),
            "truncate_prompt_tokens: a prompt with images, sounds or videos cannot be truncated",
        ),
        (
            "/v1/chat/completions",
            chat({"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}),
            'messages[0].content[0] must have the type "text" or "image_url"',
        ),
        (
            "/v1/chat/completions",
            chat({"type": "image_pil", "image_pil": "AA"}),
            "messages[0].content[0].image_pil must be",
        ),
        (
            "/v1/chat/completions",
            chat({"type": "image", "path": "a.png"}),
            "messages[0].content[0].path must begin with http://",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 1,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            TEXT,
                            {"type": "image", "source": {"type": "url", "url": "ftp://a"}},
                        ],
                    }
                ],
            },
            "messages.0.content.1.source.url must begin with http://",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_fetched(path, body, message):
    fetcher = FakeFetcher()
    engine, client = serve(fetcher=fetcher)
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    if "cannot be truncated" not in message:
        assert fetcher.running == []
    assert engine.seen == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_model_that_reads_text_only_says_so(path, reads_images):
    reads_images(None)
    fetcher = FakeFetcher()
    _, client = serve(fetcher=fetcher)
    body = next(body for route, body in REQUESTS.values() if route == path)
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert "this model reads text only" in answer.json()["error"]["message"]
    assert fetcher.running == []


def test_a_failure_names_the_image_and_stops_the_others():
    fetcher = FakeFetcher(num_together=9)
    _, client = serve(fetcher=fetcher)
    answer = client.post(
        "/v1/chat/completions", json=chat(*parts(URL), TEXT, *parts("http://missing"))
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == "messages[0].content[2]: cannot fetch 'http://missing'"
    assert fetcher.cancelled == [URL]


def test_an_echoed_message_is_its_text():
    _, client = serve()
    body = chat(*parts(URL), TEXT, echo=True, add_generation_prompt=False)
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["content"] == "what <image> is it?ok"


@pytest.mark.parametrize("path", sorted(MEDIA_PATHS))
def test_bodies_with_images_may_be_larger_where_the_model_reads_them(path, reads_images):
    limits = {"max_request_bytes": 1000, "max_media_request_bytes": 5000}
    for media, allowed, flag in (
        (READS_IMAGES, 5000, "--max-media-request-bytes"),
        (None, 1000, "--max-request-bytes"),
    ):
        reads_images(media)
        _, client = serve(**limits)
        statuses = []
        for size in (allowed - 10, allowed + 1):
            answer = client.post(path, json={"x": "a" * (size - 8)})
            statuses.append(answer.status_code)
        assert 413 not in statuses[:1] and statuses[1] == 413
        assert f"{allowed} bytes ({flag})" in answer.text
        plain = client.post("/v1/completions", json={"x": "a" * 1001})
        assert plain.status_code == 413


def test_images_are_not_in_the_log(caplog):
    secret = base64.b64encode(b"secret" * 100).decode()
    source = {"type": "base64", "media_type": "image/png", "data": secret}
    bodies = {
        "/v1/chat/completions": chat(*parts(f" data:image/png;base64,{secret}")),
        "/v1/messages": {
            "max_tokens": 2,
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
        },
        "/tokenize": chat({"type": "image_embeds", "image_embeds": {"image_embeds": secret}}),
        "/v1/chat/completions?": chat({"type": "image_embeds", "image_embeds": [secret]}),
        "/v1/completions?": {"prompt": "", "prompt_embeds": [secret], "max_tokens": 1},
        "/v1/completions": {"prompt": "data: is a plural, they say", "max_tokens": 1},
        "/v1/chat/completions??": chat(*parts(secret)),
        "/v1/chat/completions???": chat(*parts(f"b'{secret[:400]}\\n{secret[400:]}'")),
        "/v1/completions??": {"prompt": f"![](data:;base64,{secret})", "max_tokens": 1},
        "/v1/chat/completions????": chat({"type": "input_audio", "input_audio": {"data": secret}}),
    }
    _, client = serve(log_requests=True)
    with caplog.at_level("DEBUG"):
        for path, body in bodies.items():
            client.post(path, json=body)
    lines = [each.getMessage() for each in caplog.records if "request " in each.getMessage()]
    assert len(lines) == len(bodies)
    assert secret[:40] not in caplog.text
    assert "data:image/png;base64,... (823 characters)" in lines[0]
    assert '"data": "... (800 characters)"' in lines[1]
    assert '"image_embeds": "... (800 characters)"' in lines[2]
    assert '"image_embeds": ["... (800 characters)"]' in lines[3]
    assert '"prompt_embeds": ["... (800 characters)"]' in lines[4]
    assert "data: is a plural, they say" in lines[5]
    assert '"url": "... (800 characters)"' in lines[6]


def test_the_example_asks_about_its_own_drawing(monkeypatch, capsys):
    openai = pytest.importorskip("openai")
    pytest.importorskip("PIL")
    fetcher = FakeFetcher()
    _, client = serve(fetcher=fetcher)
    make = partial(openai.OpenAI, http_client=client)
    monkeypatch.setattr(openai, "OpenAI", make)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--url", "http://testserver/v1"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out.startswith("ok\n")
    (drawing,) = fetcher.fetched
    assert base64.b64decode(drawing.partition(",")[2]).startswith(b"\x89PNG")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_client_that_leaves_ends_the_fetching(path):
    fetcher = FakeFetcher(num_together=2)
    engine = ImageEngine()
    served = make_app(engine)
    served.state.context.media_fetcher = fetcher
    body = next(body for route, body in REQUESTS.values() if route == path)

    async def leave():
        data = msgspec.json.encode(body)
        async with served.router.lifespan_context(served), open_stream(served, path, data):
            while not fetcher.running:
                await asyncio.sleep(0)

    asyncio.run(leave())
    assert fetcher.cancelled == [URL]
    assert engine.seen == []
