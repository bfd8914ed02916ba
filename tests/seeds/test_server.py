"""Test a server that is started with a command line of the documents, with the bundled model."""

import json
import shlex
import sys

import pytest

from tests.e2e.server import start_server
from tests.seeds.table import read_table

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

VARIABLES = {"VLLM_HPU_SIM": "gaudi2", "PT_HPU_LAZY_MODE": "1", "VLLM_SKIP_WARMUP": "true"}


def test_an_example_command_line_serves_on_a_simulated_card(monkeypatch):
    (row, *_) = [row for row in read_table() if "--max-seq_len-to-capture" in row.command]
    program, *flags = shlex.split(row.command)[2:]
    monkeypatch.setattr("tests.e2e.server.serve_command", lambda: (sys.executable, "-m", program))
    flags = [flag for flag in flags if not flag.startswith("--model=")]
    body = {"prompt": "def main(", "max_tokens": 4, "temperature": 0}
    with start_server(*flags, variables=VARIABLES) as server:
        status, _, answer = server.request("POST", "/v1/completions", body)
        log = server.log_text()
    assert status == 200
    assert json.loads(answer)["usage"]["completion_tokens"] == 4
    for line in ("Pre-loading model weights on hpu:0 took", "# HPU blocks: ", "Skipping warmup"):
        assert line in log
