"""Test the offline benchmarks with the bundled model. tests/e2e/test_bench_serve.py has a live
server.
"""

import json

import pytest

from tests.tiny_images import make_tiny_images
from vllm.entrypoints.cli.main import main

pytestmark = pytest.mark.e2e

SMALL = ["--max-model-len", "256", "--num-gpu-blocks-override", "256"]


def bench(capsys, *args):
    """Run a benchmark; return the result, which is everything that is written to stdout."""
    assert main(["bench", *args, "--output-json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_latency_times_a_batch(capsys):
    lengths = ["--batch-size", "2", "--input-len", "8", "--output-len", "4"]
    result = bench(
        capsys, "latency", *lengths, "--num-iters", "3", "--num-iters-warmup", "1", *SMALL
    )
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3, abs=1e-5)
    assert min(result["latencies"]) <= result["percentiles"]["50"] <= max(result["latencies"])
    assert result["first_token"]["median"] > 0
    assert result["machine"]["device"] == "cpu"


def test_throughput_counts_tokens_of_random_prompts(capsys):
    lengths = ["--num-prompts", "5", "--input-len", "8", "--output-len", "4"]
    result = bench(capsys, "throughput", *lengths, "--disable-tqdm", *SMALL)
    assert (result["num_requests"], result["total_num_tokens"]) == (5, 60)
    assert result["total_output_tokens"] == 20
    assert result["output_tokens_per_second"] == pytest.approx(20 / result["elapsed_time"], rel=0.1)


def test_throughput_counts_the_tokens_of_random_pictures(capsys, tmp_path):
    args = ["throughput", "--dataset-name", "random-mm", "--num-prompts", "3", "--input-len", "8"]
    args += ["--output-len", "4", "--disable-tqdm", *SMALL]
    mm = ["--random-mm-base-items-per-request", "2"]
    mm += ["--random-mm-bucket-config", "{(40, 48, 1): 1}"]
    model = make_tiny_images("llava", tmp_path)
    result = bench(capsys, *args, *mm, "--model", str(model))
    assert (result["num_requests"], result["images_per_request"]) == (3, 2.0)
    assert result["total_input_tokens"] > 3 * 8 + 3 * 2
    assert main(["bench", *args]) == 2
    assert "needs a model that reads images" in capsys.readouterr().err


def test_throughput_takes_the_prompts_of_a_file(capsys, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "import os", "output_len": 3}\n{"prompt": [20, 21, 22]}\n')
    args = ["--dataset-path", str(path), "--num-prompts", "2", "--disable-tqdm"]
    args += ["--n", "2", "--temperature", "1"]
    result = bench(capsys, "throughput", *args, *SMALL)
    assert result["total_output_tokens"] == 2 * (3 + 128)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["latency", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["latency", "--n", "2"], "n must be 1 when using greedy sampling (temperature 0), got 2"),
        (["throughput", "--n", "0"], "n must be at least 1, got 0"),
        (["throughput", "--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
    ],
)
def test_a_bad_number_is_refused_before_the_model_is_loaded(capsys, args, message):
    assert main(["bench", *args]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
