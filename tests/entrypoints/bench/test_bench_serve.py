"""Test `vllm bench serve` against a server that gives the answers of the test."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.entrypoints.bench.fake_server import (
    END,
    STREAM_HEAD,
    FakeServer,
    answer_of,
    completion,
    event,
    plain,
    stream,
    usage,
)
from vllm import envs
from vllm.assets import BUNDLED_MODEL
from vllm.entrypoints.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
RANDOM = ["--random-input-len", "8", "--random-output-len", "4", "--random-vocab-size", "100"]
QUIET = ["--disable-tqdm", "--ready-check-timeout-sec", "0"]


def flags(server, *args):
    return ["bench", "serve", "--base-url", server.url, *RANDOM, *QUIET, *args]


def bench(capsys, server, *args, code=0):
    """Run the benchmark; return the result as JSON, and the text on stderr."""
    assert main(flags(server, "--output-json", "-", *args)) == code
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def delta(content, finish_reason=None):
    return event({"choices": [{"delta": {"content": content}, "finish_reason": finish_reason}]})


# ---- what is measured ----------------------------------------------------------------------------


def test_a_load_is_counted_by_the_servers_usage(capsys):
    with FakeServer(answer_of(4)) as server:
        result, _ = bench(capsys, server, "--num-prompts", "10")
    assert (result["completed"], result["failed"], result["interrupted"]) == (10, 0, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (80, 40)
    assert result["finish_reasons"] == {"length": 10}
    assert (result["model_id"], result["request_rate"], result["server"]) == ("tiny", "inf", None)
    assert 1 <= result["max_concurrent_requests"] <= 10
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert 0 <= result[f"median_{metric}_ms"] <= result[f"p99_{metric}_ms"]
    assert result["median_ttft_ms"] <= result["median_e2el_ms"]
    # The server gets one request more than asked for: the first request only warms up.
    assert len(server.requests) == 11


def test_pictures_are_sent_to_the_chat_api_and_counted(capsys):
    chat = ["--backend", "openai-chat", "--tokenizer", str(BUNDLED_MODEL)]
    mm = ["--dataset-name", "random-mm", "--random-mm-bucket-config", "{(8, 8, 1): 1}"]
    mm += ["--random-mm-base-items-per-request", "2"]
    with FakeServer(lambda request: stream(delta("x", "stop"), usage(11, 1))) as server:
        result, _ = bench(capsys, server, "--num-prompts", "3", *chat, *mm)
        assert main(flags(server, *mm)) == 2
    assert "random-mm needs --backend openai-chat" in capsys.readouterr().err
    assert (result["completed"], result["images_per_request"]) == (3, 2.0)
    assert result["image_throughput"] == pytest.approx(2 * result["request_throughput"])
    (message,) = server.requests[-1].body["messages"]
    first, second, text = message["content"]
    assert first["image_url"]["url"].startswith("data:image/jpeg;base64,/9j/")
    assert first != second and text["type"] == "text"


def test_a_request_asks_for_ids_a_length_and_usage(capsys):
    extra = ["--ignore-eos", "--top-p", "0.5", "--extra-body", '{"min_p": 0.1}']
    with FakeServer(answer_of(4)) as server:
        bench(capsys, server, "--num-prompts", "1", "--api-key", "k", "--header", "A=b", *extra)
    request = server.requests[-1]
    assert request.path == "/v1/completions"
    assert (request.headers["authorization"], request.headers["a"]) == ("Bearer k", "b")
    prompt = request.body.pop("prompt")
    assert len(prompt) == 8
    assert all(0 <= token_id < 100 for token_id in prompt)
    assert request.body == {
        "model": "tiny",
        "max_tokens": 4,
        "temperature": 0.0,
        "top_p": 0.5,
        "ignore_eos": True,
        "min_p": 0.1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_the_key_of_the_environment_is_sent(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    envs.get.cache_clear()
    with FakeServer(answer_of(1)) as server:
        result, shown = bench(capsys, server, "--num-prompts", "1")
    envs.get.cache_clear()
    assert server.requests[0].headers["authorization"] == "Bearer sesame"
    assert "sesame" not in shown + json.dumps(result)


def test_chat_sends_messages_and_counts_reasoning_as_output(capsys):
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    thought = event({"choices": [{"delta": {"reasoning_content": "hm"}}]})
    pieces = [role, 0.2, thought, 0.01, delta("yes"), delta("", "stop"), usage(11, 3)]
    with FakeServer(lambda request: stream(*pieces)) as server:
        args = ["--backend", "openai-chat", "--tokenizer", str(BUNDLED_MODEL), "--num-prompts", "2"]
        result, _ = bench(capsys, server, *args)
    request = server.requests[-1]
    assert request.path == "/v1/chat/completions"
    ((role, content),) = [tuple(message.values()) for message in request.body["messages"]]
    assert role == "user"
    assert len(content.split()) >= 2
    assert request.body["max_completion_tokens"] == 4
    assert result["total_output_tokens"] == 6
    # The first chunk has the role, but no token: it does not count as the first token.
    assert result["median_ttft_ms"] >= 200


def test_time_is_that_of_the_pieces(capsys):
    pieces = [0.1, completion("a"), 0.1, completion("b"), 0.1, completion("", "stop"), usage(8, 3)]
    with FakeServer(lambda request: stream(*pieces)) as server:
        result, _ = bench(capsys, server, "--num-prompts", "1")
    assert 100 <= result["median_ttft_ms"] < result["median_e2el_ms"] - 190
    assert result["median_itl_ms"] >= 95
    assert result["median_tpot_ms"] == pytest.approx(result["median_itl_ms"] / 2, rel=0.01)
    assert result["tokens_per_piece"] == 1.5


@pytest.mark.parametrize("limit", [1, 3])
def test_a_closed_loop_never_has_more_in_flight(capsys, limit):
    with FakeServer(answer_of(2, pause_s=0.005)) as server:
        args = ["--num-prompts", "9", "--max-concurrency", str(limit)]
        result, _ = bench(capsys, server, *args)
    assert (result["max_concurrent_requests"], result["completed"]) == (limit, 9)
    assert server.num_connections <= limit + 1


def test_an_open_loop_takes_as_long_as_its_arrivals(capsys):
    with FakeServer(answer_of(2)) as server:
        args = ["--num-prompts", "5", "--request-rate", "20", "--burstiness", "inf"]
        result, _ = bench(capsys, server, *args)
    # Four intervals of 0.05 s, measured from shortly after the planned time of the first arrival.
    assert result["duration"] > 0.19
    assert result["p99_send_lag_ms"] >= 0


def test_a_server_that_compiled_meanwhile_is_pointed_out(capsys):
    def metrics(compilations):
        return f'vllm:compilations_after_warmup_total{{model_name="x"}} {compilations:.1f}\n'

    with FakeServer(answer_of(2), metrics=[metrics(1), metrics(3)]) as server:
        result, shown = bench(capsys, server, "--num-prompts", "1")
        assert result["server"] == {"compilations_after_warmup": 2}
        assert "NOT STEADY" in shown
        result, shown = bench(capsys, server, "--num-prompts", "1")
        assert result["server"] == {"compilations_after_warmup": 0}
        assert "NOT STEADY" not in shown


def test_a_server_that_is_still_warming_up_is_pointed_out(capsys):
    def metrics(num_warm):
        return (
            'vllm:compilations_after_warmup_total{model_name="x"} 0.0\n'
            f'vllm:warm_buckets{{model_name="x"}} {num_warm:.1f}\n'
            'vllm:wanted_buckets{model_name="x"} 20.0\n'
        )

    with FakeServer(answer_of(2), metrics=[metrics(5), metrics(9)]) as server:
        result, shown = bench(capsys, server, "--num-prompts", "1")
        warm = {"warm_buckets_before": 5, "warm_buckets_after": 9, "wanted_buckets": 20}
        assert result["server"] == {"compilations_after_warmup": 0} | warm
        assert "5 of 20 buckets were warm at the beginning of the run, 9 at the end" in shown
    with FakeServer(answer_of(2), metrics=[metrics(20), metrics(20)]) as server:
        result, shown = bench(capsys, server, "--num-prompts", "1")
        assert result["server"] == {"compilations_after_warmup": 0}
        assert "WARMING" not in shown


# ---- failures ------------------------------------------------------------------------------------

REFUSED = '{"object": "error", "message": "too\\nlong", "code": 400}'


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([plain(400, REFUSED)], "HTTP 400: too long"),
        ([plain(500, '{"error": {"message": "oops"}}')], "HTTP 500: oops"),
        ([plain(502, "<html>")], "HTTP 502: <html>"),
        ([plain(400, REFUSED[:-1])], f"HTTP 400: {REFUSED[:-1]}"),
        (stream(completion("a")), "the stream has no usage, so its tokens cannot be counted"),
        (stream(usage(1, 0)), "the stream has no output"),
        ([STREAM_HEAD, completion("a"), usage(1, 1), b"0\r\n\r\n"], "the stream ended without [D"),
        ([STREAM_HEAD, completion("a"), b"CLOSE"], "ConnectionError: Response payload is not"),
        (stream(completion("a"), event({"error": {"message": "died"}})), "died"),
        (stream(completion("a"), event({"object": "error", "message": "died"})), "died"),
        (stream(completion("a", "error"), usage(1, 1)), "finish_reason: error"),
        ([STREAM_HEAD, event("{not json"), END], "DecodeError: "),
    ],
)
def test_a_failed_request_is_counted_with_its_reason(capsys, pieces, error):
    answers = [stream(completion("a", "stop"), usage(8, 1)), pieces]
    with FakeServer(lambda request: answers[len(server.requests) % 2]) as server:
        args = ["--num-prompts", "4", "--num-warmups", "0", "--max-concurrency", "1"]
        result, shown = bench(capsys, server, *args)
    assert (result["completed"], result["failed"]) == (2, 2)
    ((reason, count),) = result["errors"].items()
    assert reason.startswith(error)
    assert count == 2
    assert f"2 failed: {error}" in shown


def test_a_load_of_which_nothing_completes_exits_with_1(capsys):
    with FakeServer(lambda request: [plain(400, "no")]) as server:
        result, _ = bench(capsys, server, "--num-prompts", "2", "--num-warmups", "0", code=1)
    assert (result["completed"], result["failed"]) == (0, 2)
    assert result["mean_ttft_ms"] is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--base-url", "http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer: "),
        (["--random-input-len", "4093"], "requests of 4097 tokens do not fit the model's 4096"),
        (["--backend", "openai-chat"], "no usable tokenizer in '/no/such/model'"),
        (["--request-rate", "0"], "--request-rate and --burstiness must be above 0"),
        (["--max-concurrency", "0"], "--max-concurrency must be at least 1, got 0"),
        (
            ["--metric-percentiles", "101"],
            "--metric-percentiles must be like 50,99,99.9, got '101'",
        ),
        (["--percentile-metrics", "ttft,x"], "--percentile-metrics: 'x' is not one of ttft, tpot"),
        (["--goodput", "itl:1"], "--goodput must be like ttft:200"),
        (["--header", "x"], "--header must be like KEY=VALUE, got 'x'"),
        (["--extra-body", "[]"], "--extra-body must be a JSON object, got '[]'"),
        (["--extra-body", "{"], "--extra-body is not JSON: "),
        (["--output-json", "/dev/null/x.json"], "cannot write the result to '/dev/null/x.js"),
        (["--output-json", "/"], "cannot write the result to '/'"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(capsys, args, message):
    with FakeServer(answer_of(1)) as server:
        assert main(flags(server, "--num-prompts", "1", *args)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1


def test_a_first_request_that_fails_ends_it_before_the_load(capsys):
    with FakeServer(lambda request: [plain(400, REFUSED)]) as server:
        assert main(flags(server, "--num-prompts", "9")) == 2
    assert len(server.requests) == 1
    error = capsys.readouterr().err
    assert error == "error: the warm-up request failed: HTTP 400: too long\n"


# ---- output and result files ---------------------------------------------------------------------


def test_the_table_shows_rates_and_latencies(capsys):
    with FakeServer(answer_of(4)) as server:
        args = ["--num-prompts", "3", "--metric-percentiles", "50,99.9", "--goodput", "e2el:9999"]
        assert main(flags(server, *args)) == 0
    captured = capsys.readouterr()
    rows = {line.split("  ")[0]: line.split()[1:] for line in captured.out.splitlines()}
    assert rows["requests"] == ["3", "completed,", "0", "failed"]
    assert rows["output tokens"] == ["tokens", "12"]
    assert rows["ms"] == ["mean", "median", "std", "p50", "p99.9"]
    for metric in ("TTFT", "TPOT", "ITL", "E2EL"):
        assert len(rows[metric]) == 5
    assert "within the limits" in captured.out
    assert captured.err == ""


def test_a_progress_bar_is_on_stderr(capsys):
    with FakeServer(answer_of(4, pause_s=0.2)) as server:
        args = [f for f in flags(server, "--num-prompts", "3") if f != "--disable-tqdm"]
        assert main(args) == 0
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "tok/s, 3 open" in shown


def test_results_are_saved_with_their_details(capsys, tmp_path):
    with FakeServer(answer_of(4)) as server:
        args = ["--save-result", "--result-dir", str(tmp_path / "new"), "--save-detailed"]
        assert main(flags(server, *args, "--num-prompts", "3", "--metadata", "card=none")) == 0
    (path,) = (tmp_path / "new").iterdir()
    assert path.name.startswith("openai-infqps-tiny-")
    result = json.loads(path.read_text())
    assert result["card"] == "none"
    assert len(result["requests"]) == 3
    first = result["requests"][0]
    assert (first["text"], first["output_tokens"], len(first["itl_ms"])) == (" x x x x", 4, 3)


def test_ctrl_c_shows_what_there_is_until_then(tmp_path):
    output = tmp_path / "result.json"
    answers = answer_of(2)

    # Six requests and a first trial get an answer; the other requests never end.
    def answer(request):
        return answers(request) if len(server.requests) <= 7 else [600.0]

    with FakeServer(answer) as server:
        args = ["--num-prompts", "1000", "--max-concurrency", "2", "--output-json", str(output)]
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.cli.main", *flags(server, *args)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell starts a test run in the background with Ctrl-C ignored, and children inherit
            # this: restore the default handler.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        deadline = time.monotonic() + 300
        while len(server.requests) < 9 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130, "")
    assert " cut off\n" in out
    result = json.loads(output.read_text())
    assert (result["completed"], result["failed"], result["interrupted"]) == (6, 0, 2)
    assert result["total_output_tokens"] == 12
