"""Collect the metrics of one engine, for Prometheus, the log and the status page.

The names are the usual ones, which dashboards expect; docs/metrics.md lists them. Counting happens
in every step, so it only adds numbers; see `vllm.engine.metrics.registry`. Independent of HTTP.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import add, attrgetter, lt
from typing import Any

import msgspec

from vllm.bucketing.traffic import TrafficTable
from vllm.config import VllmConfig
from vllm.cost_model.run_times import BucketTimes
from vllm.engine.metrics.history import RateHistory, Rates
from vllm.engine.metrics.media_metrics import MediaReadStats, add_encoder_metrics
from vllm.engine.metrics.registry import Histogram, MetricSet
from vllm.engine.metrics.traffic_metrics import TrafficMetrics
from vllm.messages import (
    DraftStats,
    FinishReason,
    MediaStats,
    RunnerStats,
    SchedulerStats,
    TransferStats,
    WarmUpStats,
)

NUM_RECENT = 50
"""Number of finished requests that are kept."""

# fmt: off
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)
_NEXT_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)
_REQUEST_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)
# fmt: on
_STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
_NUM_OUTPUTS = (1, 2, 5, 10, 20)


@dataclass(slots=True)
class IterationStats:
    """Statistics from one message of the engine core."""

    num_prompt_tokens: int
    """Prompt tokens of requests whose prompt was completed."""
    num_generation_tokens: int
    first_token_latencies: Sequence[float]
    """Seconds from arrival to first token, of requests that got their first token."""
    inter_token_latencies: Sequence[float]
    """Seconds since the previous token, for all other tokens."""


@dataclass(slots=True)
class FinishedRequestStats:
    """Statistics of a request that has ended. Times are in seconds of `time.time()`; None: the
    event did not happen.
    """

    finish_reason: str
    """A word of `FinishReason`."""
    num_prompt_tokens: int
    num_generation_tokens: int
    """Generated tokens of all outputs together."""
    n: int
    max_tokens: int | None
    arrival: float
    first_scheduled: float | None
    first_token: float | None
    last_token: float | None
    finished: float
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    request_id: str = ""
    max_num_generation_tokens: int | None = None
    """Generated tokens of the longest output; None: there is one output."""

    @property
    def queue_s(self) -> float | None:
        """Seconds from arrival to the first step."""
        return _between(self.arrival, self.first_scheduled)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        return _between(self.arrival, self.first_token)

    @property
    def total_s(self) -> float:
        """Seconds from arrival to the end."""
        return max(0.0, self.finished - self.arrival)


class EngineMetrics:
    """All metrics of one engine.

    Args:
        model_name: value of the label `model_name` of every sample.
        config: config of the engine.
        replica: index of the replica that is measured.

    Attributes:
        model_name, config: as given.
        stats: the latest statistics of the core.
        recent: the requests that finished last, the oldest first.
        history: tokens of the last seconds.
        traffic: sizes that forward passes needed.
    """

    def __init__(self, model_name: str, config: VllmConfig, replica: int = 0) -> None:
        self.stats = SchedulerStats()
        self.recent: deque[FinishedRequestStats] = deque(maxlen=NUM_RECENT)
        self.history = RateHistory()
        self.model_name = model_name
        self.config = config
        self._labels = {"model_name": model_name, "engine": str(replica)}
        self._counters = _CoreCounters(config.scheduler.max_draft_tokens)
        metrics = self._metrics = MetricSet(self._labels)
        self._prompt_tokens = metrics.counter(
            "vllm:prompt_tokens", "Number of prompt tokens processed."
        )
        self._generation_tokens = metrics.counter("vllm:generation_tokens", "Tokens generated.")
        self._restarts = metrics.counter(
            "vllm:engine_restarts", "Number of restarts of the engine process."
        )
        self._success = metrics.counters(
            "vllm:request_success",
            "Number of finished requests, by finish reason.",
            "finished_reason",
        )
        for reason in FinishReason:
            self._success.cell(str(reason))
        self._step_tokens = metrics.histogram(
            "vllm:iteration_tokens_total",
            "Number of tokens computed per engine step.",
            _STEP_TOKENS,
        )
        self._first_token = metrics.histogram(
            "vllm:time_to_first_token_seconds",
            "Seconds from arrival to the first token.",
            _FIRST_TOKEN_S,
        )
        self._next_token = metrics.histogram(
            "vllm:time_per_output_token_seconds",
            "Seconds between two output tokens of a request.",
            _NEXT_TOKEN_S,
        )
        self._requests = _RequestHistograms(metrics, config.scheduler.max_model_len)
        self.traffic = TrafficMetrics(metrics, config.cache.block_size)

    # ---- counting -------------------------------------------------------------------------

    def record_output(self, stats: SchedulerStats, iteration: IterationStats) -> None:
        """Count the statistics of one message from the core."""
        self.stats = stats
        self._counters.update(stats)
        self.traffic.count(stats.runner)
        num_prompt, num_generated = iteration.num_prompt_tokens, iteration.num_generation_tokens
        if not num_prompt and not num_generated:
            return
        self._prompt_tokens.value += num_prompt
        self._generation_tokens.value += num_generated
        self._step_tokens.observe(num_prompt + num_generated)
        self.history.add(num_prompt, num_generated)
        if iteration.first_token_latencies:
            self._first_token.observe_all(iteration.first_token_latencies)
        if iteration.inter_token_latencies:
            self._next_token.observe_all(iteration.inter_token_latencies)

    def record_finished(self, request: FinishedRequestStats) -> None:
        """Count a request that has ended for any reason."""
        self.recent.append(request)
        self._success.cell(request.finish_reason).add()
        self._requests.observe(request)

    def record_loss(self, *, is_restarted: bool) -> None:
        """Reset the current values after the core has exited: it has no requests and no blocks, and
        the counters of a new core begin at 0.
        """
        if is_restarted:
            self._restarts.add()
        self._counters.restart()
        self.stats = SchedulerStats()

    # ---- reading --------------------------------------------------------------------------

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens computed since the server started."""
        return int(self._prompt_tokens.value)

    @property
    def num_generation_tokens(self) -> int:
        """Number of tokens generated since the server started."""
        return int(self._generation_tokens.value)

    @property
    def num_restarts(self) -> int:
        """Number of times that the core was restarted."""
        return int(self._restarts.value)

    @property
    def totals(self) -> SchedulerStats:
        """The statistics `stats`, with counters summed over all restarts of the core."""
        return self._counters.totals(self.stats)

    @property
    def traffic_table(self) -> TrafficTable:
        """Counts of forward passes by the sizes that they needed."""
        return self.traffic.table

    @property
    def device_seconds(self) -> tuple[float, float]:
        """Predicted seconds of all forward passes, without padding and with it."""
        return self.traffic.device_seconds

    @property
    def bucket_times(self) -> BucketTimes:
        """Measured seconds of forward passes by bucket."""
        return self.traffic.times

    def read_media(self) -> MediaReadStats | None:
        """Return None, because the server reads the media for all replicas."""
        return None

    def rates(self) -> Rates:
        """Return the tokens per second of the last minutes."""
        return self.history.rates()

    def metric_sets(self) -> list[MetricSet]:
        """Return all metrics, to be exposed."""
        self.traffic.add_up()
        return [self._core_metrics(), self._metrics]

    def _core_metrics(self) -> MetricSet:
        """Create the metrics of the core."""
        metrics, totals = MetricSet(self._labels), self.totals
        gauge = metrics.set_gauge
        gauge("num_requests_running", "Number of requests that are running.", totals.num_running)
        gauge(
            "num_requests_waiting",
            "Number of requests that are waiting to run.",
            totals.num_waiting,
        )
        gauge(
            "gpu_cache_usage_perc",
            "Fraction of KV-cache blocks in use, 0 to 1.",
            totals.kv_cache_usage,
        )
        runner = totals.runner
        counter = metrics.set_counter
        counter("num_preemptions", "Number of preempted requests.", totals.num_preemptions)
        counter("gpu_prefix_cache_queries", "Prompt tokens looked up.", totals.num_prefix_queries)
        counter(
            "gpu_prefix_cache_hits",
            "Number of prompt tokens found in the prefix cache.",
            totals.num_prefix_hits,
        )
        counter(
            "useful_tokens", "Number of request tokens in forward passes.", runner.num_useful_tokens
        )
        counter(
            "padded_tokens", "Number of padding tokens in forward passes.", runner.num_padded_tokens
        )
        counter(
            "decode_kv_blocks",
            "Number of KV blocks needed by decode passes.",
            runner.num_decode_blocks,
        )
        counter(
            "padded_kv_blocks",
            "Number of padding KV blocks in decode passes.",
            runner.num_padded_blocks,
        )
        counter("bucket_hits", "Number of forward passes in a warm bucket.", runner.num_bucket_hits)
        counter(
            "bucket_misses",
            "Number of forward passes in a bucket that was not warm.",
            runner.num_bucket_misses,
        )
        counter(
            "compilations_after_warmup",
            "Number of graphs compiled after the warm-up.",
            runner.num_late_compilations,
        )
        needed_s, padded_s = self.device_seconds
        counter(
            "predicted_device_seconds", "Predicted device seconds of all forward passes.", padded_s
        )
        counter(
            "predicted_padding_seconds",
            "Predicted device seconds spent on padding.",
            padded_s - needed_s,
        )
        if totals.warm_up.num_wanted:
            _add_warm_up_metrics(metrics, totals.warm_up)
        if self.config.scheduler.max_draft_tokens:
            _add_draft_metrics(metrics, totals.drafts)
        if self.config.connector.kv_transfer is not None:
            _add_transfer_metrics(metrics, totals.transfer)
        if self.config.model.resolved_arch.media_config is not None:
            add_encoder_metrics(metrics, totals)
        if self.config.lora.enable_lora:
            _add_adapters(metrics, totals, self.config.lora.num_slots)
        cache = self.config.cache
        info = {f.name: str(getattr(cache, f.name)) for f in fields(cache)}
        info["num_gpu_blocks"] = str(totals.num_kv_blocks)
        metrics.gauges(
            "vllm:cache_config_info", "Settings of the KV cache, as labels.", *info
        ).cell(*info.values()).value = 1
        return metrics


def _add_adapters(metrics: MetricSet, stats: SchedulerStats, max_loras: int) -> None:
    """Add the adapters in use, for routers that send a request to a server where its adapter is
    loaded.
    """
    labels = {
        "running_lora_adapters": ",".join(stats.running_adapters),
        "waiting_lora_adapters": ",".join(stats.waiting_adapters),
        "max_lora": str(max_loras),
    }
    gauge = metrics.gauges(
        "vllm:lora_requests_info", "Time of this report; LoRA adapters in use, as labels.", *labels
    )
    gauge.cell(*labels.values()).value = time.time()


class _RequestHistograms:
    """Histograms of the sizes, times and parameters of finished requests."""

    def __init__(self, metrics: MetricSet, max_model_len: int) -> None:
        sizes = round_to_one_two_five(max_model_len)

        def histogram(name: str, help: str, bounds: Sequence[float]) -> Histogram:
            return metrics.histogram(f"vllm:{name}", help, bounds)

        self._prompt = histogram(
            "request_prompt_tokens", "Number of prompt tokens of a request.", sizes
        )
        self._generated = histogram("request_generation_tokens", "Tokens generated.", sizes)
        self._longest = histogram(
            "request_max_num_generation_tokens",
            "Number of tokens in the longest output of a request.",
            sizes,
        )
        self._max_tokens = histogram(
            "request_params_max_tokens", "Parameter max_tokens of a request.", sizes
        )
        self._n = histogram(
            "request_params_n", "Parameter n of a request: number of outputs.", _NUM_OUTPUTS
        )
        self._total = histogram(
            "e2e_request_latency_seconds",
            "Seconds from the arrival of a request to its last token.",
            _REQUEST_S,
        )
        self._queue = histogram(
            "request_queue_time_seconds",
            "Seconds that a request waited before its first step.",
            _REQUEST_S,
        )
        self._inference = histogram(
            "request_inference_time_seconds",
            "Seconds from the first step of a request to its last token.",
            _REQUEST_S,
        )
        self._prefill = histogram(
            "request_prefill_time_seconds",
            "Seconds from the first step of a request to its first token.",
            _REQUEST_S,
        )
        self._decode = histogram(
            "request_decode_time_seconds",
            "Seconds from the first to the last output token of a request.",
            _REQUEST_S,
        )

    def observe(self, request: FinishedRequestStats) -> None:
        """Add a request to the histograms; times that are None are skipped."""
        longest = request.max_num_generation_tokens
        self._prompt.observe(request.num_prompt_tokens)
        self._generated.observe(request.num_generation_tokens)
        self._longest.observe(request.num_generation_tokens if longest is None else longest)
        self._n.observe(request.n)
        if request.max_tokens is not None:
            self._max_tokens.observe(request.max_tokens)
        self._total.observe(request.total_s)
        begun, first, last = request.first_scheduled, request.first_token, request.last_token
        for histogram, seconds in (
            (self._queue, request.queue_s),
            (self._inference, _between(begun, last)),
            (self._prefill, _between(begun, first)),
            (self._decode, _between(first, last)),
        ):
            if seconds is not None:
                histogram.observe(seconds)


_NUM_TRANSFER = len(TransferStats.__struct_fields__)
_NUM_MEDIA = len(MediaStats.__struct_fields__)
_RUNNER_COUNTERS = tuple(
    name for name in RunnerStats.__struct_fields__ if name != "recent_launches"
)
_runner_counters = attrgetter(*_RUNNER_COUNTERS)


class _CoreCounters:
    """Counters of the core that continue over its restarts.

    Args:
        max_drafts: maximum number of drafts of one request in a step.
    """

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._zero = self._counters_of(SchedulerStats())
        self._base = self._last = self._zero

    def update(self, stats: SchedulerStats) -> None:
        """Store the latest counters. If a counter has decreased, the core was restarted."""
        now = self._counters_of(stats)
        if any(map(lt, now, self._last)):
            self.restart()
        self._last = now

    def restart(self) -> None:
        """Add the last counters to the totals, because the next counters start at 0."""
        self._base = tuple(map(add, self._base, self._last))
        self._last = self._zero

    def totals(self, stats: SchedulerStats) -> SchedulerStats:
        """Return `stats` with the counters summed over all restarts."""
        queries, hits, preemptions, num_drafts, num_draft_tokens, num_declined, *rest = map(
            add, self._base, self._last
        )
        accepted, rest = rest[: self._max_drafts], rest[self._max_drafts :]
        transfer, rest = rest[:_NUM_TRANSFER], rest[_NUM_TRANSFER:]
        media, runner = rest[:_NUM_MEDIA], rest[_NUM_MEDIA:]
        return msgspec.structs.replace(
            stats,
            num_prefix_queries=queries,
            num_prefix_hits=hits,
            num_preemptions=preemptions,
            drafts=DraftStats(
                num_drafts=num_drafts,
                num_draft_tokens=num_draft_tokens,
                num_declined_steps=num_declined,
                accepted=tuple(accepted),
            ),
            transfer=TransferStats(
                **dict(zip(TransferStats.__struct_fields__, transfer, strict=True))
            ),
            media=MediaStats(**dict(zip(MediaStats.__struct_fields__, media, strict=True))),
            runner=RunnerStats(**dict(zip(_RUNNER_COUNTERS, runner, strict=True))),
        )

    def _counters_of(self, stats: SchedulerStats) -> tuple[Any, ...]:
        drafts = stats.drafts
        accepted = drafts.accepted or (0,) * self._max_drafts
        return (
            stats.num_prefix_queries,
            stats.num_prefix_hits,
            stats.num_preemptions,
            drafts.num_drafts,
            drafts.num_draft_tokens,
            drafts.num_declined_steps,
            *accepted[: self._max_drafts],
            *msgspec.structs.astuple(stats.transfer),
            *msgspec.structs.astuple(stats.media),
            *_runner_counters(stats.runner),
        )


def round_to_one_two_five(most: int) -> list[int]:
    """Return the histogram bounds 1, 2, 5, 10, 20, 50, ... up to `most`."""
    bounds, power = [1], 1
    while bounds[-1] <= most:
        bounds += [2 * power, 5 * power, 10 * power]
        power *= 10
    return [bound for bound in bounds if bound <= most]


def _add_warm_up_metrics(metrics: MetricSet, warm_up: WarmUpStats) -> None:
    gauge = metrics.set_gauge
    gauge("warm_buckets", "Number of buckets that are warmed up now.", warm_up.num_warm)
    gauge("wanted_buckets", "Number of buckets after the warm-up.", warm_up.num_wanted)
    if warm_up.seconds_left is not None:
        gauge(
            "warm_up_seconds_left", "Seconds until the warm-up is complete.", warm_up.seconds_left
        )
    gauge(
        "warm_up_longest_delay_seconds",
        "Longest delay of a step by the warm-up, in seconds.",
        warm_up.longest_delay_s,
    )
    if warm_up.padded_share is not None:
        gauge(
            "warm_up_padded_share",
            "Fraction of device time spent on padding, 0 to 1.",
            warm_up.padded_share,
        )


def _add_transfer_metrics(metrics: MetricSet, transfer: TransferStats) -> None:
    counter = metrics.set_counter
    counter("external_prefix_cache_queries", "Prompt tokens looked up.", transfer.num_queries)
    counter(
        "external_prefix_cache_hits",
        "Number of prompt tokens whose KV blocks were loaded.",
        transfer.num_hits,
    )
    counter(
        "kv_transfer_loaded_bytes", "Number of KV-cache bytes loaded.", transfer.num_loaded_bytes
    )
    counter("kv_transfer_saved_bytes", "Number of KV-cache bytes saved.", transfer.num_saved_bytes)


def _add_draft_metrics(metrics: MetricSet, drafts: DraftStats) -> None:
    counter = metrics.set_counter
    counter(
        "spec_decode_num_drafts",
        "Number of times that a request had draft tokens in a step.",
        drafts.num_drafts,
    )
    counter(
        "spec_decode_num_draft_tokens", "Number of draft tokens verified.", drafts.num_draft_tokens
    )
    counter(
        "spec_decode_num_accepted_tokens", "Number of draft tokens accepted.", sum(drafts.accepted)
    )
    counter(
        "spec_decode_num_declined_steps",
        "Number of steps without drafts, as drafts would not be faster.",
        drafts.num_declined_steps,
    )
    positions = metrics.counters(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Number of draft tokens accepted, by position in the draft.",
        "position",
    )
    for position, count in enumerate(drafts.accepted):
        positions.cell(str(position)).add(count)


def _between(start: float | None, end: float | None) -> float | None:
    """Return the seconds between two times; at least 0, because the clock may be set back."""
    return None if start is None or end is None else max(0.0, end - start)
