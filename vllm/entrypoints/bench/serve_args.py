"""Define the flags of `vllm bench serve`."""

import argparse
import json
import math
from typing import Any

from vllm.entrypoints.bench.dataset_args import add_dataset_flags
from vllm.entrypoints.bench.statistics import METRICS, parse_goodput
from vllm.errors import ConfigError
from vllm.utils.arguments import (
    add_number,
    add_switch,
    add_text,
    add_truncation_flags,
    check_smallest,
)

_BACKENDS = {"openai": "openai", "vllm": "openai", "openai-chat": "openai-chat"}


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    _add_server_flags(parser)
    _add_load_flags(parser)
    add_dataset_flags(parser, input_len=1024, num_prompts=1000)
    _add_request_flags(parser)
    _add_result_flags(parser)


def check_args(args: argparse.Namespace) -> None:
    """Check the flags, and resolve flags that depend on each other.

    Raises:
        ConfigError: a value is out of range or not in the documented format.
    """
    args.backend = _BACKENDS[args.backend]
    args.goodput = parse_goodput(args.goodput)
    args.percentile_metrics = args.percentile_metrics.split(",")
    for metric in args.percentile_metrics:
        if metric not in METRICS:
            raise ConfigError(f"percentile_metrics: {metric!r} is not one of {', '.join(METRICS)}")
    args.metric_percentiles = _percentiles(args.metric_percentiles)
    for name in ("header", "metadata"):
        for pair in getattr(args, name):
            if "=" not in pair:
                raise ConfigError(f"{name} must be like KEY=VALUE, got {pair!r}")
    if not args.request_rate > 0 or not args.burstiness > 0:
        raise ConfigError("--request-rate and --burstiness must be above 0")
    check_smallest(args, max_concurrency=1, random_vocab_size=1, num_warmups=0)
    args.extra_body = _json_object(args.extra_body)


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--backend",
        choices=_BACKENDS,
        default="openai",
        help="openai: /v1/completions; openai-chat: /v1/chat/completions (default: openai)",
    )
    add_text(group, "--base-url", "URL of the server, instead of --host and --port", metavar="URL")
    add_text(group, "--host", "host of the server", "127.0.0.1")
    add_number(group, "--port", "port of the server", 8000)
    add_text(
        group, "--endpoint", "path of the endpoint, if the server has another one", metavar="PATH"
    )
    add_text(group, "--model", "model to use (default: the first that the server lists)")
    add_text(
        group, "--served-model-name", "name of the model in requests, if it differs from --model"
    )
    add_text(
        group,
        "--api-key",
        "API key, sent as Authorization: Bearer KEY (default: VLLM_API_KEY)",
        metavar="KEY",
    )
    group.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="additional HTTP header; may be repeated",
    )
    add_switch(group, "--insecure", "do not verify the TLS certificate")
    add_number(
        group,
        "--ready-check-timeout-sec",
        "seconds to wait until the server answers; 0: do not wait",
        600.0,
    )


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    add_number(group, "--request-rate", "requests per second; inf sends all at once", math.inf)
    add_number(
        group,
        "--burstiness",
        "regularity of arrivals: 1 is a Poisson process, less gives bursts, more gives even gaps",
        1.0,
    )
    add_number(group, "--max-concurrency", "maximum number of concurrent requests")
    add_number(group, "--num-warmups", "warm-up requests before the load, not counted", 1)
    add_switch(group, "--disable-tqdm", "do not show a progress bar")


def _add_request_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    add_number(group, "--seed", "seed of random prompts and of the times when they are sent", 0)
    add_text(group, "--tokenizer", "tokenizer that makes the random prompts (default: the model's)")
    group.add_argument(
        "--tokenizer-mode",
        choices=("auto", "slow"),
        default="auto",
        help="how the tokenizer is loaded (default: auto)",
    )
    add_switch(group, "--trust-remote-code", "run Python code that comes with the tokenizer")
    add_number(
        group,
        "--random-vocab-size",
        "make random prompts from the token ids 0 to N - 1, without a tokenizer (not with "
        "--backend openai-chat)",
    )
    add_switch(
        group, "--ignore-eos", "ignore the end token, so that outputs have the requested length"
    )
    add_number(group, "--temperature", "sampling temperature (default: 0, greedy)", 0.0)
    add_truncation_flags(group)
    add_number(group, "--logprobs", "log-probabilities per token")
    group.add_argument(
        "--extra-body",
        default="{}",
        metavar="JSON",
        help="additional fields in the body of every request, as a JSON object",
    )


def _add_result_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help=(
            "also report the number of requests that stay within these limits (milliseconds), "
            "such as ttft:200 tpot:50 e2el:5000"
        ),
    )
    group.add_argument(
        "--percentile-metrics",
        default=",".join(METRICS),
        metavar="LIST",
        help="; ".join(f"{name}: {text}" for name, text in METRICS.items()) + " (default: all)",
    )
    add_text(
        group,
        "--metric-percentiles",
        "percentiles to report in addition to mean and median",
        "90,99",
        metavar="LIST",
    )
    add_text(group, "--output-json", "write the result as JSON; - is stdout", metavar="FILE")
    add_switch(
        group,
        "--save-result",
        "write the result to a file; its name has backend, rate, model and time",
    )
    add_text(group, "--result-dir", "folder for the file of --save-result", metavar="FOLDER")
    add_text(group, "--result-filename", "name of the file of --save-result", metavar="FILE")
    add_switch(
        group, "--save-detailed", "include the times and the text of every request in the result"
    )
    group.add_argument(
        "--metadata",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help=("key=value pairs that are stored with the result"),
    )


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise ConfigError(f"metric_percentiles must be like 50,99,99.9, got {text!r}")
    return values


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"extra_body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"extra_body must be a JSON object, got {text!r}")
    return value
