"""Test batch files: every line gets its result, whatever happens to other lines."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse

from tests.fake_core import FakeCoreClient, FakeEngineCore, fake_clients
from vllm.assets import BUNDLED_MODEL
from vllm.entrypoints.batch import files
from vllm.entrypoints.batch.lines import URLS, run_lines
from vllm.entrypoints.batch.sound_lines import SOUND_URLS
from vllm.entrypoints.openai import run_batch
from vllm.entrypoints.openai.audio.form import UploadedFile, read_form
from vllm.entrypoints.openai.protocol.batch import BatchRequestInput
from vllm.entrypoints.openai.protocol.transcription import TranscriptionRequest
from vllm.errors import ConfigError, RequestError
from vllm.utils import FlexibleArgumentParser

CHAT = "/v1/chat/completions"
SOUND = b"RIFF\r\n--batch \xff\x00"
"""Content of the sound at every URL but one."""


async def fetch(url, where):
    if url == "http://nobody/":
        raise RequestError(f"{where}: cannot fetch", param=where)
    return SOUND


class Application:
    """Answers with the body. `{"fail": status}` fails, and `{"wait": n}` waits until n further
    requests have been answered.
    """

    def __init__(self):
        self.num_running = self.most_running = self.num_passed = 0
        self.app = FastAPI()
        for url in URLS:
            self.app.post(url)(self.route)

    async def route(self, request: Request):
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            if request.headers["content-type"].startswith("multipart/form-data"):
                fields = read_form(
                    TranscriptionRequest, await request.body(), request.headers["content-type"]
                )
                assert fields.file == UploadedFile("sound", SOUND)
                body = fields.model_dump(exclude={"file"}, exclude_unset=True)
            else:
                body = await request.json()
            target = self.num_passed + body.get("wait", 0)
            await asyncio.sleep(0.001)
            while self.num_passed < target:
                await asyncio.sleep(0)
        finally:
            self.num_running -= 1
        self.num_passed += 1
        if body.get("fail") == "crash":
            raise RuntimeError("the password is sesame")
        if "fail" in body:
            return JSONResponse({"error": {"message": "no such model"}}, body["fail"])
        return {"url": request.url.path, "echo": body}


def line(custom_id, body, url=CHAT, **more):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body} | more)


def run(lines, max_concurrent=4, application=None):
    records = []
    app = (application or Application()).app
    data = [text if isinstance(text, bytes) else text.encode() for text in lines]
    counts = asyncio.run(run_lines(app, data, records.append, max_concurrent, fetch))
    assert all(record.endswith(b"\n") and record.count(b"\n") == 1 for record in records)
    assert counts.num_written == len(records)
    decoded = [json.loads(record) for record in records]
    assert counts.num_failed == sum(record["error"] is not None for record in decoded)
    return decoded


TEXT = {"text": "é\n"}


def test_every_route_is_called_and_answers_come_in_the_order_of_the_lines():
    lines = [
        line(str(i), {"file_url": "data:,"} if url in SOUND_URLS else {"wait": i % 3, **TEXT}, url)
        for i, url in enumerate(URLS)
    ]
    records = run(["", *lines, "  \n"])
    assert [record["custom_id"] for record in records] == [str(i) for i in range(len(URLS))]
    assert [record["response"]["body"]["url"] for record in records] == list(URLS)
    assert records[0]["response"]["body"]["echo"]["text"] == "é\n"
    assert {record["response"]["status_code"] for record in records} == {200}
    assert len({record["id"] for record in records}) == len(records)


@pytest.mark.parametrize(
    ("bad", "custom_id", "status", "message"),
    [
        ("nonsense", None, 400, "malformed"),
        (b"\xff{}", None, 400, "malformed"),
        (b'{"custom_id": "\xff"}', None, 400, "not a valid request"),
        ("[]", None, 400, "Expected `object`"),
        ('{"custom_id": "x"}', "x", 400, "missing required field `url`"),
        ('{"custom_id": 1}', None, 400, "Expected `str`"),
        ("[" * 100_000, None, 400, "not a valid request"),
        (line("x", [1]), "x", 400, "Expected `object`"),
        (line("x", {}, method="GET"), "x", 400, "method must be POST"),
        (line("x", {}, url="/metrics"), "x", 400, "url must be one of /v1/chat/completions"),
        (line("x", {"stream": True}), "x", 400, "leave it out"),
        (line("x", {"fail": 404}), "x", 404, "no such model"),
    ],
)
def test_a_line_that_fails_gives_an_error_and_the_others_their_answers(
    bad, custom_id, status, message
):
    first, record, last = run([line("a", {}), bad, line("b", {})])
    assert [each["custom_id"] for each in (first, record, last)] == ["a", custom_id, "b"]
    assert first["error"] is None is last["error"]
    assert (record["response"]["status_code"], record["response"]["body"]) == (status, None)
    assert message in record["error"]["message"]


def test_a_route_that_crashes_gives_an_error_without_details():
    records = run([line("a", {"fail": "crash"}), line("b", {})])
    assert [record["response"]["status_code"] for record in records] == [500, 200]
    assert "sesame" not in json.dumps(records)


def test_a_line_about_a_sound_becomes_the_form_of_its_route():
    body = {
        "file_url": "https://a.example/talk.mp3",
        "language": "de",
        "prompt": 'a "quoted"\r\nname é',
        "temperature": 0.25,
        "timestamp_granularities": ["segment"],
        "response_format": "verbose_json",
        "seed": None,
        "chunking_strategy": "auto",
    }
    url = SOUND_URLS[0]
    unread = line("2", {"file_url": "data:,", "temperature": 12345}, url).replace("12345", "1e400")
    usual = line("3", {"file_url": "data:,", "response_format": None}, url)
    record, wrong_number, other = run([line("1", body, url), unread, usual])
    assert wrong_number["response"]["status_code"] == 400
    assert "not a valid request: Number out of range" in wrong_number["error"]["message"]
    assert other["response"]["body"]["echo"] == {}
    want = {key: value for key, value in body.items() if key not in ("file_url", "seed")}
    assert record["response"]["body"]["echo"] == want
    read = BatchRequestInput.model_validate(json.loads(line("1", body, url)))
    assert read.body.file_url == body["file_url"] and read.body.language == "de"
    wrong = [
        ({}, "file_url must be the URL of a sound"),
        ({"file_url": 5}, "file_url must be the URL of a sound"),
        ({"file_url": "data:,", "file": "a"}, "file cannot be used in a batch"),
        ({"file_url": "data:,", "stream": True}, "stream is not available"),
        ({"file_url": "data:,", "response_format": "srt"}, "must be json or verbose_json"),
        ({"file_url": "data:,", "prompt": {"a": 1}}, "prompt must be a string, a number or a list"),
        ({"file_url": "http://nobody/"}, "file_url: cannot fetch"),
    ]
    for record, (_, message) in zip(run([line("1", b, url) for b, _ in wrong]), wrong, strict=True):
        assert record["response"]["status_code"] == 400
        assert message in record["error"]["message"]


@pytest.mark.parametrize("max_concurrent", [1, 3])
def test_no_more_requests_run_at_once_than_allowed(max_concurrent):
    application = Application()
    run([line(str(i), {}) for i in range(20)], max_concurrent, application)
    assert application.most_running == max_concurrent


def test_requests_that_run_are_ended_when_nothing_can_be_written():
    application = Application()

    def full_disk(_):
        raise OSError("disk full")

    lines = [line("a", {}), line("b", {"wait": 100})]
    with pytest.raises(OSError, match="disk full"):
        asyncio.run(run_lines(application.app, [t.encode() for t in lines], full_disk, 2, fetch))
    assert application.num_running == 0


class FileServer(BaseHTTPRequestHandler):
    """Serves a text at GET /in, stores one at PUT /out, and refuses everything else."""

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, body))  # append before the client can continue
        self.send_response(201 if self.path == "/out" else 403)
        self.end_headers()

    def do_GET(self):
        self.send_response(200 if self.path == "/in" else 404)
        self.end_headers()
        self.wfile.write(b"one\ntwo\n")

    def log_message(self, *_):
        """Log nothing."""


@pytest.fixture
def file_server():
    with HTTPServer(("127.0.0.1", 0), FileServer) as server:
        server.received = []
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_input_may_be_downloaded(file_server):
    with files.open_input(f"{file_server.url}/in") as lines:
        assert list(lines) == [b"one\n", b"two\n"]
        lines.seek(0)
        assert lines.readline() == b"one\n"
    with (
        pytest.raises(ConfigError, match="the server answered 404"),
        files.open_input(f"{file_server.url}/other"),
    ):
        raise AssertionError("there is no such file")


def test_the_input_may_be_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"one\ntwo\n",))
    writer.start()
    with files.open_input(str(pipe)) as lines:
        assert list(lines) == [b"one\n", b"two\n"]
        lines.seek(0)
        assert lines.readline() == b"one\n"
    writer.join()


def test_the_output_may_be_uploaded(file_server, tmp_path):
    with files.open_output(f"{file_server.url}/out", str(tmp_path)) as output:
        output.write(b"one\n")
        output.write(b"two\n")
        assert file_server.received == []
    assert file_server.received == [("/out", b"one\ntwo\n")]
    assert list(tmp_path.iterdir()) == []


def test_an_upload_that_is_refused_leaves_the_answers_here(file_server, tmp_path, capsys):
    with (
        pytest.raises(ConfigError, match=r"cannot upload to .*/other': the server answered 403"),
        files.open_output(f"{file_server.url}/other", str(tmp_path)) as output,
    ):
        output.write(b"one\n")
    (kept,) = tmp_path.iterdir()
    assert kept.read_bytes() == b"one\n"
    assert str(kept) in capsys.readouterr().err


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
@pytest.mark.parametrize("is_pipe", [True, False])
def test_the_output_may_be_standard_output_whatever_that_is(tmp_path, name, is_pipe):
    code = (
        "from vllm.entrypoints.batch.files import open_output\n"
        f"with open_output({name!r}) as output:\n    output.write(b'one')"
    )
    command = [sys.executable, "-c", code]
    if is_pipe:
        assert subprocess.run(command, capture_output=True, check=True).stdout == b"one"
        return
    path = tmp_path / "out"
    with path.open("wb") as file:
        subprocess.run(command, stdout=file, check=True)
    assert path.read_bytes() == b"one"


def test_the_output_may_be_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    with files.open_output(str(pipe)) as output:
        output.write(b"one")
    assert reader.communicate()[0] == b"one"


def test_the_output_has_its_name_when_it_is_whole(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"old")
    with files.open_output(str(path)) as output:
        output.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("written", "num_left"), [(b"", 0), (b"so far", 1)])
def test_what_was_written_stays_beside_the_old_output_when_the_run_breaks_off(
    tmp_path, written, num_left
):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), files.open_output(str(path)) as output:
        output.write(written)
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    others = [each for each in tmp_path.iterdir() if each != path]
    assert [each.read_bytes() for each in others] == [written] * num_left


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-i", "{tmp}/none", "-o", "{tmp}/out"], "cannot read .*No such file"),
        (["-i", "http://127.0.0.1:1/x", "-o", "{tmp}/out"], "cannot download .*refused"),
        (["-i", "{tmp}/in", "-o", "{tmp}/none/out"], "cannot write .*No such file"),
        (["-i", "{tmp}/in", "-o", "{tmp}"], "cannot write .*Is a directory"),
        (["-i", "{tmp}/in", "-o", "http:///out"], "cannot write .*: the URL has no host"),
        (
            ["-i", "{tmp}/in", "-o", "http://h/out", "--output-tmp-dir", "{tmp}/none"],
            "cannot write into .*none.*No such file",
        ),
        (
            ["-i", "/etc/passwd", "-o", "{tmp}/out"],
            "has no valid request. Error in the first line: this line",
        ),
        (["-i", "{tmp}/in", "-o", "{tmp}/out", "--max-concurrent-requests", "0"], "at least 1"),
        (["-i", "{tmp}/in", "-o", "{tmp}/out", "--model", "{tmp}/none"], "none"),
    ],
)
def test_what_cannot_be_used_is_told_before_anything_is_changed(tmp_path, flags, message):
    (tmp_path / "in").write_bytes(b"")
    parser = run_batch.add_arguments(FlexibleArgumentParser())
    args = parser.parse_args([flag.format(tmp=tmp_path) for flag in flags])
    with pytest.raises(ConfigError, match=message):
        run_batch.run(args)
    assert [each.name for each in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(("flags", "code"), [((), 0), (("--fail-on-error",), 1)])
def test_a_failed_request_is_an_error_of_the_program_only_if_that_is_asked_for(
    flags, code, tmp_path
):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = {"right": {"prompt": "a"}, "wrong": {"prompt": "a", "model": "nobody"}}
    source.write_text("\n".join(line(name, bodies[name], "/v1/completions") for name in bodies))
    parser = run_batch.add_arguments(FlexibleArgumentParser())
    files = ("-i", str(source), "-o", str(target))
    with fake_clients(FakeCoreClient(FakeEngineCore())):
        assert (
            run_batch.run(parser.parse_args([*files, "--model", str(BUNDLED_MODEL), *flags]))
            == code
        )
    right, wrong = (json.loads(text) for text in target.read_text().splitlines())
    assert right["error"] is None
    assert wrong["error"]["type"] == "not_found_error"
