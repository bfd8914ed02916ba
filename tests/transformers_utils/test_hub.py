"""Test finding the folder of a model name; downloads come from a small hub on this machine."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar
from urllib.parse import urlsplit

import pytest

from vllm.assets import BUNDLED_MODEL
from vllm.errors import ConfigError
from vllm.transformers_utils.hub import resolve_adapter_folder, resolve_model_folder
from vllm.transformers_utils.transformers_version import is_version_4

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
BOTH_FORMS = ["config.json", "tokenizer.model", "model.safetensors", "pytorch_model.bin", "a.png"]
PICKLES_ONLY = ["config.json", "pytorch_model.bin", "a.png"]
REPOSITORIES = {
    "org/both": BOTH_FORMS,
    "org/pickles": PICKLES_ONLY,
    "short": ["config.json"],
    "org/gated": ["config.json"],
    "org/adapter": ["adapter_config.json", "adapter_model.safetensors", "model.safetensors"],
    "org/pickled-adapter": ["adapter_config.json", "adapter_model.bin", "config.json"],
    "org/gguf": ["config.json", "model-Q4_0.gguf", "model-Q8_0.gguf"],
    "org/mistral": ["consolidated.safetensors", "params.json"],
    "org/twice": ["config.json", "consolidated.safetensors", "model.safetensors", "params.json"],
    "org/large": ["config.json", "model.safetensors"],
}
LARGE = random.Random(0).randbytes(30 << 20)
"""The weights of "org/large". Their first download stops half-way."""
TOKEN = "hf_right"
"""Which "org/gated" wants."""


class FakeHub(BaseHTTPRequestHandler):
    """Answers the three requests of a download: repository, list of files, file."""

    ranges: ClassVar[list[str | None]] = []
    """The parts of the large file that were requested."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if "org/gated" in path and self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.answer({"error": "gated"}, 403, **{"X-Error-Code": "GatedRepo"})
        for name, files in REPOSITORIES.items():
            if path == f"/api/models/{name}/revision/main":
                return self.answer({"id": name, "sha": COMMIT, "siblings": []})
            if path.startswith(f"/api/models/{name}/tree/"):
                size = len(LARGE) if name == "org/large" else 2
                entries = [{"type": "file", "path": f, "size": size, "oid": f"o{f}"} for f in files]
                return self.answer(entries)
            for file in files:
                if path == f"/org/large/resolve/{COMMIT}/model.safetensors":
                    return self.answer_large()
                if path == f"/{name}/resolve/{COMMIT}/{file}":
                    return self.answer({}, ETag=f'"{file}"', **{"X-Repo-Commit": COMMIT})
        return self.answer({"error": "not found"}, 404, **{"X-Error-Code": "RepoNotFound"})

    def answer_large(self) -> None:
        wanted = self.headers["Range"]
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        headers = {"ETag": '"large"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        headers["Content-Length"] = str(len(LARGE) - start)
        self.send_response(206 if start else 200)
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(LARGE) - 1}/{len(LARGE)}"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.ranges.append(wanted)
        if start:
            self.wfile.write(LARGE[start:])
            return
        # Send half of the file; then the connection is closed.
        self.wfile.write(LARGE[: len(LARGE) // 2])

    def answer(self, content: object, status: int = 200, **headers: str) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def resolve_in_new_process(
    name: str, cache: Path, load_format: str = "auto", token: str | bool | None = None, **env: str
) -> str:
    """Resolve a model in a new process; return the sorted files of the folder, or the error."""
    arguments = (name, None, str(cache), (), load_format, token)
    return call_in_new_process("resolve_model_folder", arguments, **env)


def call_in_new_process(function: str, *calls: tuple[object, ...], **env: str) -> str:
    """Call any function in a new process, with a line for each call; huggingface_hub reads its
    settings once."""
    code = f"""
from vllm.errors import ConfigError
from vllm.transformers_utils.hub import {function}
for arguments in {calls!r}:
    try:
        folder = {function}(*arguments)
        print(*sorted(path.name for path in folder.iterdir()))
    except ConfigError as error:
        print(error)
"""
    settings = {"PATH": "", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**settings, **env},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_a_folder_is_taken_as_it_is():
    assert resolve_model_folder(str(BUNDLED_MODEL)) == BUNDLED_MODEL


@pytest.mark.parametrize("name", ["/no/such/folder", "./model", "~/no-such-model", "a/b/c"])
def test_a_path_that_does_not_exist_is_named(name):
    with pytest.raises(ConfigError) as failure:
        resolve_model_folder(name)
    assert str(failure.value) == f"model folder {name!r} does not exist"


def test_a_file_is_not_a_model(tmp_path):
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(ConfigError, match=r"model.bin' is a file; name the folder"):
        resolve_model_folder(str(file))


def test_a_name_no_hub_accepts_is_an_error_on_one_line():
    with pytest.raises(ConfigError) as failure:
        resolve_model_folder("not a name!")
    assert str(failure.value).startswith("cannot get model 'not a name!': ")
    assert "\n" not in str(failure.value)


def test_weights_are_downloaded_in_one_form(endpoint, tmp_path):
    cases = {
        ("org/both", "auto"): "config.json model.safetensors tokenizer.model",
        ("org/both", "safetensors"): "config.json model.safetensors tokenizer.model",
        ("org/both", "pt"): "config.json pytorch_model.bin tokenizer.model",
        ("org/both", "dummy"): "config.json tokenizer.model",
        ("org/pickles", "auto"): "config.json pytorch_model.bin",
        ("short", "auto"): "config.json",
        ("org/mistral", "auto"): "consolidated.safetensors params.json",
        ("org/twice", "auto"): "config.json model.safetensors params.json",
        ("org/twice", "mistral"): "config.json consolidated.safetensors params.json",
    }
    calls = [
        (name, None, str(tmp_path / str(index)), (), load_format, None)
        for index, (name, load_format) in enumerate(cases)
    ]
    found = call_in_new_process("resolve_model_folder", *calls, HF_ENDPOINT=endpoint)
    assert dict(zip(cases, found.splitlines(), strict=True)) == cases


def test_a_download_is_found_again_without_a_network(endpoint, tmp_path):
    online = resolve_in_new_process("org/both", tmp_path, HF_ENDPOINT=endpoint)
    assert resolve_in_new_process("org/both", tmp_path, HF_HUB_OFFLINE="1") == online


def test_adapters_are_downloaded_without_what_else_there_is(endpoint, tmp_path):
    def resolve(name: str, **env: str) -> str:
        return call_in_new_process("resolve_adapter_folder", (name,), HF_HOME=str(tmp_path), **env)

    want = "adapter_config.json adapter_model.safetensors"
    assert resolve("org/adapter", HF_ENDPOINT=endpoint) == want
    assert resolve("org/adapter", HF_HUB_OFFLINE="1") == want
    pickled = resolve("org/pickled-adapter", HF_ENDPOINT=endpoint)
    assert pickled == "adapter_config.json adapter_model.bin"
    with pytest.raises(ConfigError, match=r"^/no/such/folder is not a folder$"):
        resolve_adapter_folder("/no/such/folder")


def test_a_download_goes_on_where_the_connection_was_lost(endpoint, tmp_path):
    found = resolve_in_new_process("org/large", tmp_path, HF_ENDPOINT=endpoint)
    assert found == "config.json model.safetensors"
    first, second = FakeHub.ranges
    assert first is None
    assert second is not None and int(second.removeprefix("bytes=").removesuffix("-")) > 0
    (weights,) = tmp_path.glob("**/snapshots/*/model.safetensors")
    assert weights.read_bytes() == LARGE
    resolve_in_new_process("org/large", tmp_path, HF_ENDPOINT=endpoint)
    assert len(FakeHub.ranges) == 2, "it was downloaded again"


def test_the_bytes_of_a_download_are_reported(endpoint, tmp_path):
    code = f"""
from vllm.transformers_utils.hub import resolve_model_folder
from vllm.utils.process import startup_progress
startup_progress.listen(lambda *report: print(report))
resolve_model_folder("org/large", None, {str(tmp_path)!r})
"""
    env = {"PATH": "", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_ENDPOINT": endpoint}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    reports = result.stdout.splitlines()
    assert reports[0] == "('getting org/large from the hub', 0, 0, None)"
    if not is_version_4():  # the hub client of transformers 4 reports no bytes
        assert (
            reports[-1] == f"('getting org/large from the hub (MiB)', {len(LARGE) >> 20}, 30, None)"
        )


def test_one_gguf_file_of_a_repository_is_downloaded(endpoint, tmp_path):
    named = resolve_in_new_process("org/gguf/model-Q8_0.gguf", tmp_path, HF_ENDPOINT=endpoint)
    assert "model-Q8_0.gguf is damaged or not a GGUF file" in named
    assert [path.name for path in tmp_path.glob("**/snapshots/*/*")] == ["model-Q8_0.gguf"]
    none = resolve_in_new_process("org/gguf/model.gguf", tmp_path, HF_ENDPOINT=endpoint)
    assert none.startswith("the repository 'org/gguf' has no file 'model.gguf': ")
    several = resolve_in_new_process("org/gguf", tmp_path, "gguf", HF_ENDPOINT=endpoint)
    assert several == (
        "model 'org/gguf' with --load-format gguf: name one file of the repository, such as "
        "org/gguf/model-Q8_0.gguf, or its kind, such as org/gguf:Q8_0"
    )


def test_a_kind_of_gguf_file_of_a_repository_is_downloaded(endpoint, tmp_path):
    named = resolve_in_new_process("org/gguf:q8_0", tmp_path, HF_ENDPOINT=endpoint)
    assert "model-Q8_0.gguf is damaged or not a GGUF file" in named
    assert [path.name for path in tmp_path.glob("**/snapshots/*/*")] == ["model-Q8_0.gguf"]
    none = resolve_in_new_process("org/gguf:Q4", tmp_path, HF_ENDPOINT=endpoint)
    assert none.startswith("the repository 'org/gguf' has no GGUF file of the kind 'Q4': ")


def test_an_unknown_repository_is_named(endpoint, tmp_path):
    message = resolve_in_new_process("org/none", tmp_path, HF_ENDPOINT=endpoint)
    assert message.startswith("cannot get model 'org/none': there is no such folder and no")


def test_offline_without_a_download_says_so(tmp_path):
    message = resolve_in_new_process("org/both", tmp_path, HF_HUB_OFFLINE="1")
    assert message == (
        "cannot get model 'org/both': there is no such folder, it is not in the cache, "
        "and HF_HUB_OFFLINE is set"
    )


def test_an_unreachable_hub_says_so_on_one_line(tmp_path):
    message = resolve_in_new_process("org/both", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert message.startswith("cannot get model 'org/both': ")
    assert "the hub is unreachable" in message
    assert "\n" not in message


def test_a_token_is_sent_and_comes_before_that_of_the_environment(endpoint, tmp_path):
    variables = {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_wrong", "HOME": str(tmp_path)}
    given = resolve_in_new_process("org/gated", tmp_path, token=TOKEN, **variables)
    assert given == "config.json"
    refused = resolve_in_new_process("org/gated", tmp_path / "other", **variables)
    assert refused == (
        "cannot get model 'org/gated': it is gated; accept its terms on huggingface.co, and set "
        "HF_TOKEN or --hf-token"
    )
