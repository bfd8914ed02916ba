"""Record events of requests in `EngineMetrics`, one message of the core at a time."""

from vllm.engine.metrics.engine_metrics import EngineMetrics, FinishedRequestStats, IterationStats
from vllm.engine.output.output_state import RequestState, SampleState
from vllm.messages import SchedulerStats


class StatsRecorder:
    """Collects the events of one message of the core, and records them at its end.

    Args:
        metrics: metrics of each replica, in which the events are recorded.
    """

    def __init__(self, *metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._begin()

    def tokens(self, sample: SampleState, count: int, now: float) -> None:
        """Record new tokens of a sample. Call this before its `last_token_time` is updated.

        Tokens that arrive together share the time since the previous token.
        """
        self._num_tokens += count
        last, sample.last_token_time = sample.last_token_time, now
        if last is not None:
            self._inter_token += [(now - last) / count] * count
            return
        times = sample.request.metrics
        if times.first_token_time is None:
            self._num_prompt_tokens += sample.request.num_prompt_tokens
            self._first_token.append(now - times.arrival_time)

    def request(self, request: RequestState, now: float) -> None:
        """Record a request that has ended."""
        samples, params, times = request.samples, request.params, request.metrics
        counts = [len(sample.token_ids) for sample in samples]
        if times.first_token_time is None and times.first_scheduled_time is not None:
            # a pooling request has no first token
            self._num_prompt_tokens += request.num_prompt_tokens
        self._metrics[request.replica].record_finished(
            FinishedRequestStats(
                finish_reason=samples[0].finish_reason or "abort",
                num_prompt_tokens=request.num_prompt_tokens,
                num_generation_tokens=sum(counts),
                n=len(samples),
                max_tokens=params.max_tokens,
                arrival=times.arrival_time,
                first_scheduled=times.first_scheduled_time,
                first_token=times.first_token_time,
                last_token=times.last_token_time,
                finished=now,
                num_cached_tokens=request.num_cached_tokens or 0,
                request_id=request.request_id,
                max_num_generation_tokens=max(counts),
            )
        )

    def end_message(self, stats: SchedulerStats, replica: int = 0) -> None:
        """Record the collected events of a message from this replica."""
        self._metrics[replica].record_output(
            stats,
            IterationStats(
                num_prompt_tokens=self._num_prompt_tokens,
                num_generation_tokens=self._num_tokens,
                first_token_latencies=self._first_token,
                inter_token_latencies=self._inter_token,
            ),
        )
        self._begin()

    def _begin(self) -> None:
        self._num_tokens = self._num_prompt_tokens = 0
        self._first_token: list[float] = []
        self._inter_token: list[float] = []
