"""Test `vllm run-batch` with an engine that dies and with signals. test_image_server.py compares
the answers with the answers of a server.
"""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.e2e.server import ROOT
from tests.forked_programs import FORKS

pytestmark = pytest.mark.e2e

GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


def write_requests(path, requests):
    with path.open("w") as file:
        for index, (url, body) in enumerate(requests):
            line = {"custom_id": f"line {index}", "method": "POST", "url": url, "body": body}
            file.write(json.dumps(line) + "\n")


def start_batch(folder, *flags):
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "run-batch"]
    command += ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), *flags]
    log = (folder / "log").open("wb")
    with log:
        return FORKS(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def read_records(folder):
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def num_partial_records(folder):
    return sum(len(path.read_text().splitlines()) for path in folder.glob(".out.jsonl.*.partial"))


@pytest.fixture
def long_batch(tmp_path):
    """Start a batch with three short and many long requests; return (process, its children) when it
    has begun to answer.
    """
    long = GREEDY | {"prompt": "import", "max_tokens": 2000}
    bodies = [GREEDY | {"prompt": "import"}] * 3 + [long] * 297
    write_requests(tmp_path / "in.jsonl", [("/v1/completions", body) for body in bodies])
    process = start_batch(tmp_path)
    deadline = time.monotonic() + 300
    while num_partial_records(tmp_path) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    yield process, children
    process.kill()
    process.wait()
    assert not psutil.wait_procs(children, timeout=60)[1]


# Exhaustive: tests/entrypoints/openai/test_run_batch.py tests the records of failures.
@pytest.mark.exhaustive
def test_a_batch_whose_engine_dies_ends_with_a_record_for_every_line(tmp_path, long_batch):
    process, children = long_batch
    for child in children:
        child.kill()
    assert process.wait(300) == 1, (tmp_path / "log").read_text()
    records = read_records(tmp_path)
    assert [record["custom_id"] for record in records] == [f"line {i}" for i in range(300)]
    assert {record["response"]["status_code"] for record in records} <= {200, 500}
    assert records[-1]["response"]["status_code"] == 500


# Exhaustive: tests/entrypoints/openai/test_run_batch.py tests that records stay.
@pytest.mark.exhaustive
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_batch_that_is_broken_off_keeps_its_records_and_leaves_no_process(
    tmp_path, long_batch, signum
):
    process, _ = long_batch
    process.send_signal(signum)
    assert process.wait(300) == 130
    assert "Traceback" not in (tmp_path / "log").read_text()
    [partial] = tmp_path.glob(".out.jsonl.*.partial")
    assert partial.name in (tmp_path / "log").read_text()
    assert len(partial.read_text().splitlines()) == 3
    assert not (tmp_path / "out.jsonl").exists()
