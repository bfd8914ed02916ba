"""Test images over HTTP, with the official clients: answers, hostile items, killed processes."""

import base64
import contextlib
import io
import json
import os
import random
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import psutil
import pytest

from tests.e2e.server import start_server, wait_until
from tests.exhaustive import exhaustive
from tests.hpu import captured_log
from tests.tiny_images import draw_image, make_tiny_images
from vllm.entrypoints.cli.main import main

pillow = pytest.importorskip("PIL.Image", reason="images need Pillow")
pytestmark = pytest.mark.e2e

CHAT = "/v1/chat/completions"
QUESTION = "what <image> is it?"
TEXT = {"type": "text", "text": QUESTION}
GREEDY = {"max_tokens": 6, "temperature": 0}


def file_of(pixels, form="PNG"):
    buffer = io.BytesIO()
    pillow.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


FILE = file_of(draw_image(1))
BASE64 = base64.b64encode(FILE).decode()
URL = f"data:image/png;base64,{BASE64}"


def part(url, **fields):
    return {"type": "image_url", "image_url": {"url": url}, **fields}


def part_of(file):
    return part(f"data:;base64,{base64.b64encode(file).decode()}")


def chat(*parts, **fields):
    return {"messages": [{"role": "user", "content": [*parts, TEXT]}], **GREEDY, **fields}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_images("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def flags(folder, tmp_path_factory):
    """Return flags of engines that store KV blocks in one folder."""
    extra = {"shared_storage_path": str(tmp_path_factory.mktemp("blocks"))}
    transfer = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}
    return (
        *("--model", str(folder), "--served-model-name", "tiny", "--dtype", "float32"),
        *("--max-model-len", "512", "--num-gpu-blocks-override", "100"),
        *("--limit-mm-per-prompt", "image=2", "--enable-prompt-tokens-details"),
        *("--kv-transfer-config", json.dumps(transfer)),
    )


@pytest.fixture(scope="module")
def server(folder, flags):
    (folder / "file.png").write_bytes(FILE)
    local = ("--allowed-local-media-path", str(folder))
    with start_server(*flags, *local, "--enable-log-requests", is_fork=False) as server:
        yield server


@pytest.fixture(scope="module")
def wanted(server):
    """Return the answer of the chat route."""
    status, _, body = server.request("POST", CHAT, chat(part(URL)))
    assert status == 200, body
    return openai.types.chat.ChatCompletion.model_validate_json(body)


def test_clients_of_all_apis_get_the_same_answer(server, wanted):
    anthropic = pytest.importorskip("anthropic")
    text, num_tokens = wanted.choices[0].message.content, wanted.usage.prompt_tokens
    url = f"file://{server_file(server)}"
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        for given in (URL, url):
            stream = client.chat.completions.create(
                **chat(part(given)),
                model="tiny",
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = list(stream)
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
            assert chunks[-1].usage.prompt_tokens == num_tokens
        image = {"type": "input_image", "image_url": URL, "detail": "low"}
        parts = [image, {"type": "input_text", "text": QUESTION}]
        asked = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 6}
        for stream in (False, True):
            found = client.responses.create(**asked, model="tiny", temperature=0, stream=stream)
            found = list(found)[-1].response if stream else found
            assert (found.output_text, found.usage.input_tokens) == (text, num_tokens)
    source = {"type": "base64", "media_type": "image/jpeg", "data": BASE64}
    turn = {"role": "user", "content": [{"type": "image", "source": source}, TEXT]}
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        asked = {"model": "tiny", "messages": [turn]}
        assert client.messages.count_tokens(**asked).input_tokens == num_tokens
        asked |= {"max_tokens": 6, "extra_body": {"temperature": 0}}
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        for found in (whole, streamed):
            assert found.content[0].text == text
            usage = found.usage
            assert usage.input_tokens + usage.cache_read_input_tokens == num_tokens


def test_the_process_that_answers_http_does_not_import_torch(server, wanted):
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()


def server_file(server):
    """Return the path of the file that requests may name."""
    command = psutil.Process(server.process.pid).cmdline()
    return Path(command[command.index("--model") + 1]) / "file.png"


PLAIN = {**GREEDY, "ignore_eos": True}
BATCH = [
    (CHAT, chat(part(URL))),
    (CHAT, chat(part_of(file_of(draw_image(2))))),
    (CHAT, chat(part(URL), part_of(file_of(draw_image(2))))),
    (CHAT, chat(part("data:,"))),
    ("/v1/completions", {**PLAIN, "prompt": "def main("}),
    (CHAT, {**chat(), "logprobs": True, "top_logprobs": 2, "n": 1}),
    ("/v1/completions", {**PLAIN, "prompt": "def main(", "model": "nobody"}),
    ("/v1/completions", {**PLAIN, "prompt": "def main(", "temperature": -1}),
    ("/v1/completions", {**PLAIN, "prompt": ["import", "class"], "echo": True}),
]
"""Requests of a batch; the first three have images."""
ONCE_ONLY = ("id", "created")


# Exhaustive: tests/engine/test_core_replicas.py tests replicas, which know nothing of images.
@pytest.mark.parametrize("num_replicas", [1, exhaustive(2)])
def test_a_batch_gets_the_answers_of_the_server_and_reads_what_it_has_stored(
    server, wanted, flags, tmp_path, monkeypatch, num_replicas
):
    # The command runs in this process, which has imported everything. It must not change the log.
    monkeypatch.setattr("vllm.entrypoints.server.log_setup.configure_logs", lambda args: None)
    answers = [server.request("POST", url, body) for url, body in BATCH]
    lines = [
        {"custom_id": str(index), "method": "POST", "url": url, "body": body}
        for index, (url, body) in enumerate(BATCH)
    ]
    given, written = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("\n".join(map(json.dumps, lines)))
    command = ["run-batch", *flags, "-i", str(given), "-o", str(written)]
    with captured_log() as log:
        assert main([*command, "--data-parallel-size", str(num_replicas)]) == 0
    assert any(re.search(r"9 requests in .* s: 6 answered, 3 failed", line) for line in log)
    assert any("1 requests failed: The model `nobody` does not exist" in line for line in log)
    records = [json.loads(line) for line in written.read_text().splitlines()]
    for index, (record, (status, _, body)) in enumerate(zip(records, answers, strict=True)):
        assert record["custom_id"] == str(index)
        assert record["response"]["status_code"] == status
        found = record["response"]["body"] or record["error"]
        expected = json.loads(body)
        expected = expected.get("error", expected)
        for key in ONCE_ONLY:
            assert (key in found) == (key in expected)
            found.pop(key, None), expected.pop(key, None)
        details, _ = (
            each.get("usage", {}).pop("prompt_tokens_details", None) for each in (found, expected)
        )
        assert found == expected
        # The blocks of the images come from the folder.
        assert index > 2 or details["cached_tokens"] >= 16
    assert [status for status, _, _ in answers] == [200, 200, 200, 400, 200, 200, 404, 400, 200]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (part("http://127.0.0.1/a.png"), "the host '127.0.0.1' is not on the public internet"),
        (part("http://2130706433/a.png"), "an IP address must be four decimal numbers"),
        (part("file:///etc/passwd"), "not in the folder"),
        (part("data:image/png;base64,@@"), "its base64 has a character"),
        (part_of(b"%PDF-1.7"), "a file of the format PDF; accepted are PNG, JPEG"),
        (part_of(FILE[:-40]), "this PNG file cannot be decoded"),
        (part_of(file_of(np.zeros((1, 5000, 3), np.uint8))), "5000 x 1 pixels: one edge"),
        (part(URL, max_pixels=9), "must be left out"),
        ({"type": "image_embeds", "image_embeds": "AA"}, "--enable-mm-embeds"),
    ],
)
def test_a_hostile_item_is_the_error_of_its_request(server, wanted, item, message):
    status, _, body = server.request("POST", CHAT, chat(item))
    text = body.decode()
    assert status == 400 and message in text
    assert "messages[0].content[0]" in text
    assert not re.search("[A-Za-z0-9+/]{40}|0x[0-9a-f]{6}", text), "content of the item"
    assert answer_of(server, chat(part(URL))) == wanted.choices[0].message.content


def answer_of(server, body):
    """Return the text of an answer; None if it is an error of the client."""
    status, _, answer = server.request("POST", CHAT, body)
    assert status in (200, 400), answer
    if status == 400:
        return None
    found = openai.types.chat.ChatCompletion.model_validate_json(answer)
    return found.choices[0].message.content


def kill_readers(server, engine):
    """Kill the processes that decode files, and return how many.

    Children of the server fork them.
    """
    num_killed = 0
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # another thread has killed it
            for reader in () if child == engine else child.children():
                reader.kill()
                num_killed += 1
    return num_killed


def is_zombie(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return False


def num_files(server):
    folder = Path(f"/proc/{server.process.pid}/fd")
    found = []
    for each in folder.iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            found.append(os.readlink(each))
    return sum(name.startswith("/memfd:") for name in found)


def test_many_requests_and_killed_processes_leave_nothing(server, wanted):
    server.wait_until_idle()
    files, shared = num_files(server), set(os.listdir("/dev/shm"))
    engine, num_killed = server.engine_process(), []

    def ask(number):
        """Send one request of several kinds; its answer must be an answer or a 400."""
        kind = number % 6
        images = [part_of(file_of(draw_image(1000 + number))), part(URL)]
        if kind == 0:
            return answer_of(server, chat(part(URL)))
        if kind == 1:
            return answer_of(server, chat(part_of(FILE[: len(FILE) // 2 - number % 100])))
        if kind == 2:
            return answer_of(server, {"messages": [{"role": "user", "content": "a"}], **GREEDY})
        if kind == 3:
            return leave(server, chat(*images, stream=True))
        if kind == 4:
            num_killed.append(kill_readers(server, engine))
        return answer_of(server, chat(*images))

    numbers = list(range(300))
    random.Random(0).shuffle(numbers)
    with ThreadPoolExecutor(8) as threads:
        answers = dict(zip(numbers, threads.map(ask, numbers), strict=True))
    assert {answers[n] for n in numbers if n % 6 == 1} == {None}
    assert None not in {answers[n] for n in numbers if n % 6 == 2}
    assert sum(answers[n] is not None for n in numbers if n % 6 in (4, 5)) > 50
    assert sum(num_killed) > 10
    server.wait_until_idle()
    assert answer_of(server, chat(part(URL))) == wanted.choices[0].message.content
    assert num_files(server) <= files
    children = psutil.Process(server.process.pid).children(recursive=True)
    wait_until(lambda: not any(is_zombie(each) for each in children))
    assert set(os.listdir("/dev/shm")) <= shared
    log = server.log_text()
    assert not re.search("[A-Za-z0-9+/]{80}", log) and "Traceback" not in log


def leave(server, body):
    """Send a request, and close the connection before the answer."""
    data = json.dumps(body)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n{data}".encode())
