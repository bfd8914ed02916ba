"""Serve GET /status.json: the data of the status page. It contains ids and numbers, but no prompts
or answers.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.engine.metrics.engine_metrics import FinishedRequestStats
from vllm.engine.metrics.media_metrics import MediaReadStats
from vllm.engine.metrics.replica_metrics import ReadableMetrics
from vllm.entrypoints.operations.health import describe_warm_up
from vllm.entrypoints.operations.metrics_route import engine_metrics
from vllm.entrypoints.pages.server_state import describe_server, fresh_json
from vllm.entrypoints.shared.context import ServerContext, get_context
from vllm.messages import SchedulerStats
from vllm.platforms.habana.card_reading import CardReading

router = APIRouter(include_in_schema=False)

_PHASES = ("prefill", "decode")
_MAX_ID_CHARS = 128
"""Limit for shown ids, which clients may choose."""


@router.get("/status.json")
async def status(request: Request) -> Response:
    """Return the data of the status page."""
    context = get_context(request)
    return fresh_json(describe(context, await context.card_readings()))


@router.get("/status_buckets.json")
async def buckets(request: Request) -> Response:
    """Return the buckets for the map on the page: phase, sizes, and whether they are warm."""
    context = get_context(request)
    if engine_metrics(context) is None or not context.engine.is_running:
        return fresh_json({"buckets": []})
    found = await context.engine.list_buckets()
    return fresh_json({"buckets": [[_PHASES[phase], *rest] for phase, *rest in found]})


def describe(context: ServerContext, cards: Sequence[CardReading] = ()) -> dict[str, Any]:
    """Describe the server, its engine and its cards. Times are in seconds, rates per second; None:
    not known (yet).
    """
    server = describe_server(context) | {
        "uptime_s": round(max(0.0, time.time() - context.created), 1),
        "in_progress": context.num_in_progress,
        "has_chat_page": not context.args.disable_web_ui,
        "cards": [asdict(card) for card in cards],
    }
    metrics = engine_metrics(context)
    if metrics is None:
        return server
    read = metrics.read_media()
    media = None if read is None else _describe_media(metrics.totals, read, context)
    return server | _describe_engine(metrics) | {"media": media}


def _describe_engine(metrics: ReadableMetrics) -> dict[str, Any]:
    totals, rates, config = metrics.totals, metrics.rates(), metrics.config
    runner = totals.runner
    needed_s, padded_s = metrics.device_seconds
    traffic = metrics.traffic_table
    return {
        "model": metrics.model_name,
        "generates": config.model.pooler is None,
        "device": config.device.device,
        "dtype": config.model.dtype_name,
        "max_model_len": config.scheduler.max_model_len,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "running": totals.num_running,
        "waiting": totals.num_waiting,
        "kv_usage": round(totals.kv_cache_usage, 4),
        "kv_blocks": totals.num_kv_blocks,
        "prefix_hit_rate": _share(totals.num_prefix_hits, totals.num_prefix_queries),
        "preemptions": totals.num_preemptions,
        "bucket_hits": runner.num_bucket_hits,
        "warm_up": describe_warm_up(totals.warm_up),
        "bucket_misses": runner.num_bucket_misses,
        "late_compilations": runner.num_late_compilations,
        "useful_tokens": runner.num_useful_tokens,
        "decode_blocks": runner.num_decode_blocks,
        "padded_blocks_share": _share(
            runner.num_padded_blocks, runner.num_padded_blocks + runner.num_decode_blocks
        ),
        "padded_time_share": _share(padded_s - needed_s, padded_s),
        "traffic": traffic.to_json() if len(traffic) else None,
        "padded_share": _share(
            runner.num_padded_tokens, runner.num_padded_tokens + runner.num_useful_tokens
        ),
        "prompt_tokens": metrics.num_prompt_tokens,
        "generation_tokens": metrics.num_generation_tokens,
        "restarts": metrics.num_restarts,
        "prompt_rates": rates.prompt,
        "generation_rates": rates.generation,
        "recent": [_describe_request(request) for request in reversed(metrics.recent)],
    }


def _describe_media(
    totals: SchedulerStats, read: MediaReadStats, context: ServerContext
) -> dict[str, Any]:
    """Return media counts since the start, and the total seconds of all items."""
    return {
        "items": dict(read.read.num_items),
        "read_s": round(read.read.total_seconds, 4),
        "fetch_s": round(context.media_fetcher.times.total_seconds, 4),
        "fetches": sum(context.media_fetcher.times.num_items.values()),
        "read_cache_queries": read.num_cache_queries,
        "read_cache_hits": read.num_cache_hits,
        "encoder_cache_queries": totals.media.num_queries,
        "encoder_cache_hits": totals.media.num_hits,
        "encoded": totals.runner.num_encoded_items,
        "encode_s": round(totals.runner.encode_seconds, 4),
        "replicas": context.config.parallel.data_parallel_size,
    }


def _describe_request(request: FinishedRequestStats) -> dict[str, Any]:
    """Return ids and counts of a request, without its text."""
    return {
        "id": request.request_id[:_MAX_ID_CHARS],
        "reason": request.finish_reason,
        "finished": round(request.finished, 3),
        "queue_s": _rounded(request.queue_s),
        "first_token_s": _rounded(request.first_token_s),
        "total_s": _rounded(request.total_s),
        "prompt_tokens": request.num_prompt_tokens,
        "cached_tokens": request.num_cached_tokens,
        "generation_tokens": request.num_generation_tokens,
    }


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
