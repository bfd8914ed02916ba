"""Convert the core's tokens to `RequestOutput`s: text, stop strings, log-probabilities, samples."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm.engine.output.detokenizer import Detokenizer, DetokenizerFactory
from vllm.engine.output.logprobs import TextOf
from vllm.engine.output.output_state import PoolingState, RequestState, SampleState
from vllm.engine.output.output_text import OutputText
from vllm.engine.output.stop_strings import StopStrings
from vllm.errors import RequestError
from vllm.logger import init_logger
from vllm.lora.files import request_of
from vllm.messages import (
    NO_ALLOWED_TOKEN,
    NO_TOKEN_LEFT,
    EngineOutput,
    EngineRequest,
    Finished,
    FinishReason,
)
from vllm.outputs import AnyRequestOutput
from vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vllm.engine.output.stats_recorder import StatsRecorder

logger = init_logger(__name__)


class OutputProcessor:
    """Creates the outputs of all unfinished requests.

    A request that fails in the core ends with finish reason "error" and the message as its stop
    reason; other requests are not affected.

    Args:
        tokenizer: tokenizer of the model; None: all texts are empty.
        recorder: records tokens and finished requests for the metrics.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase | None", recorder: "StatsRecorder | None" = None
    ) -> None:
        self._recorder = recorder
        self._requests: dict[str, RequestState] = {}
        self._samples: dict[str, SampleState] = {}
        """Sample by its id in the core."""
        self._detokenizers: DetokenizerFactory | None = None
        self.set_tokenizer(tokenizer)

    def set_tokenizer(self, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        """Use another tokenizer for new requests."""
        self._detokenizers = None if tokenizer is None else DetokenizerFactory(tokenizer)

    @property
    def num_unfinished_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    @property
    def unfinished_request_ids(self) -> list[str]:
        """Ids of the requests that have not ended, oldest first."""
        return list(self._requests)

    def request_id_of(self, core_id: str) -> str | None:
        """Return the user's id of a request of the core; None if it is unknown or has finished."""
        sample = self._samples.get(core_id)
        return None if sample is None else sample.request.request_id

    def add_request(
        self,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        core_requests: Sequence[EngineRequest],
        replica: int = 0,
    ) -> None:
        """Register a request whose output will be processed.

        Args:
            request_id: id that the user gave.
            prompt: text of the prompt, or None.
            params: parameters of the user.
            core_requests: one request of the core per sample, in order.
            replica: index of the replica that computes them.

        Raises:
            RequestError: one of the ids is in use; nothing is changed.
        """
        in_use = [r.request_id for r in core_requests if r.request_id in self._samples]
        if request_id in self._requests or in_use:
            raise RequestError(
                f"request id {request_id!r} is in use by a request that has not finished",
                param="request_id",
            )
        first = core_requests[0]
        kind = RequestState if first.pooling_params is None else PoolingState
        request = kind(request_id, prompt, first.prompt_token_ids, params, first.arrival_time)
        request.replica = replica
        request.has_known_prompt = first.known_prompt_token_ids is not None
        request.lora_request = request_of(first.adapter)
        text_of = self._text_of(params)
        for index, core_request in enumerate(core_requests):
            text = self._make_text(params, first.known_prompt_token_ids)
            sample = SampleState(request, index, core_request.request_id, text, text_of)
            request.add_sample(sample)
            self._samples[core_request.request_id] = sample
        self._requests[request_id] = request

    def process(self, output: EngineOutput) -> tuple[list[AnyRequestOutput], list[str]]:
        """Process the output of one step of the core.

        Returns:
            (outputs for the users, ids of core requests to abort because their text contains a stop
            string, which the core cannot see).
        """
        now = time.time()
        samples, finished, recorder = self._samples, output.finished, self._recorder
        self._take_details(output)
        news: dict[RequestState, None] = {}  # a dict as a set that keeps the order
        stopped: list[str] = []
        for core_id, token_ids in _tokens_of_each(output):
            sample = samples.get(core_id)
            if sample is None:
                continue  # the request ended while this step ran
            sample.token_ids += token_ids
            request, num_new = sample.request, len(token_ids)
            if recorder is not None:
                recorder.tokens(sample, num_new, now)
            metrics = request.metrics
            metrics.last_token_time = now
            if metrics.first_token_time is None:
                metrics.first_token_time = now
            if not sample.is_watched or core_id in finished:
                continue
            if (string := sample.read_newest(num_new)) is not None:
                sample.end_at_stop_string(string)
                stopped.append(core_id)
                del samples[core_id]
                news[request] = None
            elif request.is_streamed:
                news[request] = None
        for core_id, end in finished.items():
            if (sample := samples.pop(core_id, None)) is not None:
                self._end(sample, end)
                news[sample.request] = None
        return self._outputs(news, now), stopped

    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT
    ) -> tuple[list[AnyRequestOutput], list[str]]:
        """End requests with the given reason; unknown ids are ignored.

        Returns:
            (their last outputs, ids of core requests to abort).
        """
        requests = [self._requests[i] for i in dict.fromkeys(request_ids) if i in self._requests]
        running = [s for r in requests for s in r.samples if s.finish_reason is None]
        for sample in running:
            del self._samples[sample.core_id]
            sample.end(Finished(reason))
        return self._outputs(requests, time.time()), [sample.core_id for sample in running]

    def _take_details(self, output: EngineOutput) -> None:
        """Process the data of a step other than tokens, which few requests have."""
        samples = self._samples
        for core_id, num_tokens in output.num_cached_tokens.items():
            sample = samples.get(core_id)
            # With several samples per request, report the cached tokens of the first one.
            if sample is not None and sample.request.num_cached_tokens is None:
                sample.request.num_cached_tokens = num_tokens
        for core_id, scheduled_time in output.scheduled_times.items():
            sample = samples.get(core_id)
            if sample is not None and sample.request.metrics.first_scheduled_time is None:
                sample.request.metrics.first_scheduled_time = scheduled_time
        for core_id, rows in output.prompt_logprobs.items():
            if (sample := samples.get(core_id)) is not None:
                request = sample.request
                request.add_prompt_logprobs(rows, self._text_of(request.params))
        for core_id, rows in output.logprobs.items():
            if (sample := samples.get(core_id)) is not None:
                sample.add_logprobs(rows)
        for core_id, result in output.pooled.items():
            sample = samples.get(core_id)
            if sample is not None and isinstance(sample.request, PoolingState):
                sample.request.result = result

    def _end(self, sample: SampleState, end: Finished) -> None:
        params = sample.request.params
        is_empty = (end.error or "").endswith((NO_TOKEN_LEFT, NO_ALLOWED_TOKEN))
        if is_empty and isinstance(params, SamplingParams):
            # Each of these fields by itself allows some tokens, but two fields can contradict each
            # other.
            fields = params.restricting_fields
            if len(fields) > 1:
                error = (
                    f"{' and '.join(fields)} contradict each other: together they allow no token "
                    f"at this point of the output ({end.error})"
                )
                end = Finished(FinishReason.ERROR, error=error, is_refused=True)
        if end.error is not None:
            if end.is_refused:
                logger.warning("request %s was refused: %s", sample.core_id, end.error)
            else:
                logger.error("request %s failed: %s", sample.core_id, end.error)
        sample.end(end)

    def _outputs(self, requests: Iterable[RequestState], now: float) -> list[AnyRequestOutput]:
        """Create the outputs of changed requests, and drop the state of finished ones."""
        outputs = []
        for request in requests:
            is_finished = request.num_running == 0
            if is_finished:
                request.metrics.finished_time = now
                if self._recorder is not None:
                    self._recorder.request(request, now)
                del self._requests[request.request_id]
            if is_finished or request.is_streamed:
                outputs.append(request.output())
        return outputs

    def make_detokenizer(self, prompt_token_ids: Sequence[int]) -> Detokenizer:
        """Create a detokenizer without special tokens, for tokens that a caller selects after a
        prompt. The engine must have a tokenizer.
        """
        assert self._detokenizers is not None
        return self._detokenizers.create(prompt_token_ids)

    def _text_of(self, params: SamplingParams) -> TextOf | None:
        """Return the function that turns a token id into text for log-probabilities; None if no
        text is wanted.
        """
        if self._detokenizers is None or not params.detokenize:
            return None
        return self._detokenizers.text_of

    def _make_text(
        self, params: SamplingParams, prompt_token_ids: Sequence[int] | None
    ) -> OutputText | None:
        if self._detokenizers is None or not params.detokenize:
            return None
        detokenizer = self._detokenizers.create(
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            kept_special_token_ids=params.kept_special_token_ids or (),
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        strings = [params.stop] if isinstance(params.stop, str) else params.stop
        stop = None
        if strings:
            stop = StopStrings(strings, is_shown=params.include_stop_str_in_output)
        return OutputText(detokenizer, stop, params.min_tokens)


def _tokens_of_each(output: EngineOutput) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield the core's id and the new tokens of each request."""
    if output.num_tokens is None:
        yield from zip(output.request_ids, zip(output.token_ids, strict=True), strict=True)
        return
    start = 0
    for core_id, count in zip(output.request_ids, output.num_tokens, strict=True):
        yield core_id, output.token_ids[start : start + count]
        start += count
