"""Test `vllm bench serve` against a live server."""

import json

import pytest

from tests.e2e.server import Server
from vllm.entrypoints.cli.main import main

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(("backend", "num_template_tokens"), [("openai", 0), ("openai-chat", 1)])
def test_a_live_server_bears_both_kinds_of_load(
    chat_server: Server, capsys: pytest.CaptureFixture[str], backend: str, num_template_tokens: int
) -> None:
    command = ["bench", "serve", "--base-url", chat_server.url, "--backend", backend]
    command += ["--disable-tqdm", "--num-prompts", "6", "--max-concurrency", "3", "--ignore-eos"]
    command += ["--input-len", "12", "--output-len", "5", "--output-json", "-"]
    assert main(command) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["completed"], result["failed"]) == (6, 0)
    assert result["total_output_tokens"] == 30
    assert result["total_input_tokens"] >= 6 * (12 + num_template_tokens)
    assert result["max_concurrent_requests"] == 3
    assert result["server"]["compilations_after_warmup"] == 0
    chat_server.wait_until_idle()
