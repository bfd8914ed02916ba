"""Run `vllm bench serve`: send load to a running server and measure latency and throughput."""

import argparse
import asyncio
import math
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.entrypoints.bench import report, statistics
from vllm.entrypoints.bench.backends import Backend, BenchRequest, RequestRecord
from vllm.entrypoints.bench.dataset_args import read_dataset_flags
from vllm.entrypoints.bench.datasets import (
    file_requests,
    ordinary_ids,
    random_requests,
    random_texts,
    with_images,
)
from vllm.entrypoints.bench.http_client import HttpClient
from vllm.entrypoints.bench.load import LoadProgress, LoadRun, Send, arrival_times, run_load
from vllm.entrypoints.bench.serve_args import add_cli_args, check_args
from vllm.entrypoints.bench.server import ServedModel, difference, find_model, read_server
from vllm.entrypoints.shared.open_files import allow_many_connections
from vllm.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["add_cli_args", "run"]

_PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def run(args: argparse.Namespace) -> int:
    """Run the benchmark. Prints a table to stdout, progress to stderr, and JSON if requested.

    Ctrl-C stops the load and shows the results so far.

    Returns:
        The exit code: 0; 1 if no request completed; 130 if it was interrupted.

    Raises:
        ConfigError: the flags are wrong, or the server cannot be used.
    """
    check_args(args)
    report.check_writable(args.output_json)
    allow_many_connections()

    import uvloop

    result, load = uvloop.run(_measure(args))
    _save(result, load, args)
    report.emit(result, _rows(result, args), args.output_json)
    for error, count in result["errors"].items():
        sys.stderr.write(f"{count} failed: {error}\n")
    if load.is_interrupted:
        return 130
    return 0 if result["completed"] else 1


# ---- one run ------------------------------------------------------------------------------


async def _measure(args: argparse.Namespace) -> tuple[dict[str, Any], LoadRun]:
    headers = dict(header.split("=", 1) for header in args.header)
    if api_key := args.api_key or envs.get().VLLM_API_KEY:
        headers["Authorization"] = f"Bearer {api_key}"
    base_url = args.base_url or f"http://{args.host}:{args.port}"
    client = HttpClient(base_url, headers=headers, verify_tls=not args.insecure)
    try:
        return await _measure_with(client, args)
    finally:
        await client.close()


async def _measure_with(
    client: HttpClient, args: argparse.Namespace
) -> tuple[dict[str, Any], LoadRun]:
    served = await find_model(client, args.ready_check_timeout_sec)
    model = args.served_model_name or args.model or served.id
    requests = _make_requests(args, served)
    backend = Backend(
        client,
        args.endpoint or _PATHS[args.backend],
        is_chat=args.backend == "openai-chat",
        fields=_fields(args, model),
        keep_text=args.save_detailed,
    )
    await _warm_up(backend.send, requests, args.num_warmups)
    before = await read_server(client)
    load = await _send_load(backend.send, requests, args)
    after = await read_server(client)
    result: dict[str, Any] = {
        "date": report.timestamp(),
        "machine": report.machine(),
        "backend": args.backend,
        "base_url": client.base_url,
        "model_id": model,
        "dataset": args.dataset_name,
        "num_prompts": len(requests),
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
        **dict(pair.split("=", 1) for pair in args.metadata),
        **statistics.summarize(
            load,
            metrics=args.percentile_metrics,
            percentiles=args.metric_percentiles,
            goodput=args.goodput,
        ),
        "server": difference(before, after),
    }
    if num_images := sum(len(request.images) for request in requests):
        per_request = num_images / len(requests)
        result["images_per_request"] = round(per_request, 3)
        result["image_throughput"] = per_request * result["request_throughput"]
    if math.isfinite(args.request_rate) and args.max_concurrency is None:
        # The delay with which requests were sent. More than a few ms means that the client was too
        # slow for the load.
        lags_ms = [record.lag_s * 1e3 for record in load.records]
        result["p99_send_lag_ms"] = statistics.describe(lags_ms, [99])["p99"]
    return result, load


async def _warm_up(send: Send, requests: Sequence[BenchRequest], count: int) -> None:
    """Send the first request `count` times, which also checks that it works."""
    for _ in range(count):
        warmup = LoadRun()
        await run_load(warmup, send, requests[:1], [0.0])
        if (error := warmup.records[0].error) is not None:
            raise ConfigError(f"the warm-up request failed: {error}")


async def _send_load(
    send: Callable[[BenchRequest, RequestRecord], Awaitable[None]],
    requests: Sequence[BenchRequest],
    args: argparse.Namespace,
) -> LoadRun:
    arrivals = arrival_times(
        len(requests), args.request_rate, args.burstiness, random.Random(args.seed)
    )
    load = LoadRun()
    with (
        _stop_at_ctrl_c() as stop,
        LoadProgress(load, len(requests), is_shown=not args.disable_tqdm) as progress,
    ):
        await run_load(
            load,
            send,
            requests,
            arrivals,
            max_concurrency=args.max_concurrency,
            stop=stop,
            on_done=progress.update,
        )
    return load


@contextmanager
def _stop_at_ctrl_c() -> Iterator[asyncio.Event]:
    """Yield an event that the first Ctrl-C sets; the second Ctrl-C ends the program."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def handle() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    try:
        loop.add_signal_handler(signal.SIGINT, handle)
    except (ValueError, RuntimeError):  # not the main thread, which handles Ctrl-C
        yield stop
        return
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)


# ---- what is sent -------------------------------------------------------------------------


def _make_requests(args: argparse.Namespace, served: ServedModel) -> list[BenchRequest]:
    dataset = read_dataset_flags(args)
    limit = served.max_model_len
    if dataset.images is not None and args.backend != "openai-chat":
        raise ConfigError("--dataset-name random-mm needs --backend openai-chat")
    if not dataset.is_random:
        is_counting = dataset.name == "sharegpt"
        return file_requests(dataset, _tokenizer(args, served) if is_counting else None, limit)
    if args.backend == "openai-chat":
        requests = random_texts(dataset, _tokenizer(args, served))
    elif args.random_vocab_size is not None:
        requests = random_requests(dataset, range(args.random_vocab_size))
    else:
        requests = random_requests(dataset, ordinary_ids(_tokenizer(args, served)))
    longest = max((r.num_prompt_tokens or 0) + r.max_tokens for r in requests)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"requests of {longest} tokens do not fit the model's {limit}: lower "
            f"--random-input-len or --random-output-len"
        )
    return with_images(dataset, requests)


def _tokenizer(args: argparse.Namespace, served: ServedModel) -> "PreTrainedTokenizerBase":
    from vllm.transformers_utils.tokenizer import get_tokenizer

    name = args.tokenizer or args.model or served.root or served.id
    try:
        return get_tokenizer(name, args.tokenizer_mode, args.trust_remote_code)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; give --tokenizer instead, or --random-vocab-size N with --backend openai"
        ) from None


def _fields(args: argparse.Namespace, model: str) -> dict[str, Any]:
    given = {
        name: getattr(args, name)
        for name in ("temperature", "top_p", "top_k", "logprobs")
        if getattr(args, name) is not None
    }
    if args.ignore_eos:
        given["ignore_eos"] = True
    if args.logprobs is not None and args.backend == "openai-chat":
        given.update(logprobs=True, top_logprobs=args.logprobs)
    return {"model": model, **given, **args.extra_body}


# ---- what is shown ------------------------------------------------------------------------


def _rows(result: dict[str, Any], args: argparse.Namespace) -> Iterator[Sequence[object]]:
    state = "" if not result["interrupted"] else f", {result['interrupted']} cut off"
    yield "requests", f"{result['completed']} completed, {result['failed']} failed{state}"
    yield "duration, s", result["duration"]
    yield "most in flight", result["max_concurrent_requests"]
    yield "requests/s", result["request_throughput"]
    if "request_goodput" in result:
        yield "  within the limits", result["request_goodput"]
    yield "input tokens", result["total_input_tokens"]
    yield "output tokens", result["total_output_tokens"]
    if "images_per_request" in result:
        yield "images per request", result["images_per_request"]
        yield "images/s", result["image_throughput"]
    yield "output tokens/s", result["output_throughput"]
    yield "all tokens/s", result["total_token_throughput"]
    names = ["mean", "median", "std", *map(statistics.percentile_name, args.metric_percentiles)]
    yield ("ms", *names)
    for metric in args.percentile_metrics:
        yield (metric.upper(), *(result[f"{name}_{metric}_ms"] for name in names))
    server = result["server"] or {}
    if count := server.get("compilations_after_warmup"):
        yield "NOT STEADY", f"the server compiled {count:.0f} graphs in this run: run it again"
    if "warm_buckets_before" in server:
        before, after, wanted = (
            int(server[name])
            for name in ("warm_buckets_before", "warm_buckets_after", "wanted_buckets")
        )
        yield (
            "STILL WARMING UP",
            f"{before} of {wanted} buckets were warm at the beginning of the run, {after} at the "
            "end. Requests are slower until all are warm: wait until /readyz reports it, then "
            "run again",
        )


def _save(result: dict[str, Any], load: LoadRun, args: argparse.Namespace) -> None:
    if args.save_detailed:
        result["requests"] = [
            {
                "start_s": r.start_s - load.start_s,
                "ttft_ms": r.ttft_s * 1e3 if r.output_s else None,
                "itl_ms": [itl * 1e3 for itl in r.itl_s],
                "e2el_ms": r.e2el_s * 1e3,
                "input_tokens": r.num_prompt_tokens,
                "output_tokens": r.num_output_tokens,
                "finish_reason": r.finish_reason,
                "error": r.error,
                "interrupted": r.is_cut,
                "text": "".join(r.text),
            }
            for r in load.records
        ]
    if not args.save_result:
        return
    rate = f"{result['request_rate']}qps"
    model = str(result["model_id"]).rstrip("/").rpartition("/")[2]
    name = args.result_filename or f"{args.backend}-{rate}-{model}-{result['date']}.json"
    report.write_json(result, f"{args.result_dir}/{name}" if args.result_dir else name)
