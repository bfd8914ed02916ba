"""Define the flags of `vllm bench serve`."""

import argparse
import json
import math
from typing import Any

from vllm.entrypoints.bench.dataset_args import add_dataset_flags
from vllm.entrypoints.bench.statistics import METRICS, parse_goodput
from vllm.errors import ConfigError

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
    for name, least in (("max_concurrency", 1), ("random_vocab_size", 1), ("num_warmups", 0)):
        if (value := getattr(args, name)) is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    args.extra_body = _json_object(args.extra_body)


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    add = group.add_argument
    add(
        "--backend",
        choices=_BACKENDS,
        default="openai",
        help="openai: /v1/completions; openai-chat: /v1/chat/completions (default: openai)",
    )
    add("--base-url", metavar="URL", help="URL of the server, instead of --host and --port")
    add(
        "--host",
        default="127.0.0.1",
        metavar="TEXT",
        help="host of the server (default: 127.0.0.1)",
    )
    add("--port", type=int, default=8000, metavar="N", help="port of the server (default: 8000)")
    add("--endpoint", metavar="PATH", help="path of the endpoint, if the server has another one")
    add("--model", metavar="TEXT", help="model to use (default: the first that the server lists)")
    add(
        "--served-model-name",
        metavar="TEXT",
        help="name of the model in requests, if it differs from --model",
    )
    add(
        "--api-key",
        metavar="KEY",
        help="API key, sent as Authorization: Bearer KEY (default: VLLM_API_KEY)",
    )
    add(
        "--header",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="further HTTP header; may be repeated",
    )
    add("--insecure", action="store_true", help="do not verify the TLS certificate")
    add(
        "--ready-check-timeout-sec",
        type=float,
        default=600.0,
        metavar="X",
        help="seconds to wait until the server answers; 0: do not wait (default: 600)",
    )


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    add = group.add_argument
    add(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="X",
        help="requests per second; inf sends all at once (default: inf)",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="regularity of arrivals: 1 is a Poisson process, less gives bursts, more gives even "
        "gaps (default: 1)",
    )
    add(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="maximum number of concurrent requests",
    )
    add(
        "--num-warmups",
        type=int,
        default=1,
        metavar="N",
        help="warm-up requests before the load, not counted (default: 1)",
    )
    add("--disable-tqdm", action="store_true", help="do not show a progress bar")


def _add_request_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    add = group.add_argument
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of random prompts and of the times when they are sent (default: 0)",
    )
    add(
        "--tokenizer",
        metavar="TEXT",
        help="tokenizer that makes the random prompts (default: the model's)",
    )
    add("--tokenizer-mode", choices=("auto", "slow"), default="auto", help="(default: auto)")
    add("--trust-remote-code", action="store_true", help="run code that comes with the tokenizer")
    add(
        "--random-vocab-size",
        type=int,
        metavar="N",
        help=(
            "make random prompts of the token ids 0 to N - 1, without a tokenizer; not with "
            "openai-chat"
        ),
    )
    add(
        "--ignore-eos",
        action="store_true",
        help="ignore the end token, so that outputs have the requested length",
    )
    add("--temperature", type=float, default=0.0, metavar="X", help="(default: 0, greedy)")
    add("--top-p", type=float, metavar="X", help="nucleus sampling")
    add(
        "--top-k",
        type=int,
        metavar="N",
        help=("sample from this many of the most likely tokens; 0: all"),
    )
    add("--logprobs", type=int, metavar="N", help="log-probabilities per token")
    add(
        "--extra-body",
        default="{}",
        metavar="JSON",
        help="further fields of every request body, as JSON",
    )


def _add_result_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    add = group.add_argument
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help=(
            "also report the number of requests that stay within these limits (milliseconds), "
            "such as ttft:200 tpot:50 e2el:5000"
        ),
    )
    add(
        "--percentile-metrics",
        default=",".join(METRICS),
        metavar="LIST",
        help="; ".join(f"{name}: {text}" for name, text in METRICS.items()) + " (default: all)",
    )
    add(
        "--metric-percentiles",
        default="90,99",
        metavar="LIST",
        help="percentiles to report in addition to mean and median (default: 90,99)",
    )
    add("--output-json", metavar="FILE", help="write the result as JSON; - is stdout")
    add(
        "--save-result",
        action="store_true",
        help=("write the result to a file; its name has backend, rate, model and time"),
    )
    add("--result-dir", metavar="FOLDER", help="folder for the file of --save-result")
    add("--result-filename", metavar="FILE", help="name of the file of --save-result")
    add(
        "--save-detailed",
        action="store_true",
        help="include the times and the text of every request in the result",
    )
    add(
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
