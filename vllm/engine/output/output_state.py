"""Keep the output state of a user's request: one `RequestState`, and one `SampleState` per sample.

Tokens are only collected until they are needed: if the user wants only the final output, the text
is created once, at the end.
"""

from vllm.engine.output.logprobs import TextOf, to_dicts
from vllm.engine.output.output_text import OutputText
from vllm.lora.request import LoRARequest
from vllm.messages import Finished, FinishReason, FloatArray, LogprobRows
from vllm.outputs import (
    AnyRequestOutput,
    CompletionOutput,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
)
from vllm.sampling_params import RequestOutputKind, SamplingParams

_MAX_ROWS_KEPT = 8
"""Number of positions whose log-probabilities are kept as arrays before they become dicts.
Converting all at the end could take seconds, with a hundred samples of thousands of tokens."""
_NO_RESULT = "the request was ended before it had a result"


class SampleState:
    """The output of one sample, which is one request of the engine core.

    Attributes:
        core_id: id of the sample in the core.
        token_ids: output tokens so far; the caller appends.
        is_watched: text is created with each token, for streaming or stop strings.
        last_token_time: seconds of `time.time()`, if it is recorded.
    """

    __slots__ = (
        "_cumulative_logprob",
        "_is_end_sent",
        "_logprobs",
        "_new_logprobs",
        "_num_read",
        "_num_sent_chars",
        "_num_sent_tokens",
        "_text",
        "_text_of",
        "core_id",
        "finish_reason",
        "index",
        "is_refused",
        "is_watched",
        "last_token_time",
        "request",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        request: "RequestState",
        index: int,
        core_id: str,
        text: OutputText | None,
        text_of: TextOf | None,
    ) -> None:
        self.request = request
        self.index = index
        self.core_id = core_id
        self.token_ids: list[int] = []
        self.is_watched = request.is_streamed or (text is not None and bool(request.params.stop))
        self.last_token_time: float | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.is_refused = False
        self._text = text
        self._text_of = text_of
        self._num_read = 0
        self._new_logprobs: list[LogprobRows] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative_logprob = 0.0
        self._num_sent_tokens = 0
        self._num_sent_chars = 0
        self._is_end_sent = False

    @property
    def has_news(self) -> bool:
        """Whether the sample has data that no output has contained yet."""
        if self.finish_reason is not None:
            return not self._is_end_sent
        return len(self.token_ids) > self._num_sent_tokens

    def add_logprobs(self, rows: LogprobRows) -> None:
        """Store the log-probabilities of the next positions."""
        if len(self._new_logprobs) >= _MAX_ROWS_KEPT:
            self._convert_logprobs()
        # The newest entries stay arrays, because a stop string may still remove some of them.
        self._new_logprobs.append(rows)

    def read(self, num_tokens: int) -> str | None:
        """Create the text of the first `num_tokens` output tokens. Returns the stop string if the
        text ends there, else None.
        """
        if self._text is None:
            return None
        new, self._num_read = self.token_ids[self._num_read : num_tokens], num_tokens
        return self._text.append(new)

    def read_newest(self, count: int) -> str | None:
        """Create the text of the last `count` tokens, if all earlier tokens were read. Returns the
        stop string if the text ends there, else None.
        """
        if self._text is None:
            return None
        self._num_read += count
        return self._text.append(self.token_ids[-count:])

    def end(self, finished: Finished) -> None:
        """Finish the sample as the core has done. A stop string in its last token takes precedence
        over the core's reason.
        """
        num_tokens = len(self.token_ids)
        is_stop = finished.reason is FinishReason.STOP
        if is_stop and not self.request.params.include_stop_str_in_output:
            num_tokens -= 1  # the text of a stop token is not part of the output
        if (matched := self.read(num_tokens)) is not None:
            self.end_at_stop_string(matched)
            return
        if self._text is not None:
            self._text.finish()
        self.is_refused = finished.is_refused
        stop_reason = finished.stop_reason if finished.error is None else finished.error
        self._set_end(finished.reason, stop_reason)

    def end_at_stop_string(self, string: str) -> None:
        """Finish the sample at a stop string that `read` has found. Tokens after it are dropped."""
        assert self._text is not None
        num_behind = len(self.token_ids) - self._text.num_tokens
        if num_behind:
            del self.token_ids[-num_behind:]
            if self._new_logprobs:
                newest = self._new_logprobs.pop()
                self._new_logprobs.append(newest.first(len(newest.ranks) - num_behind))
        self._set_end(FinishReason.STOP, string)

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the log-probabilities that have arrived."""
        if self._new_logprobs:
            self._convert_logprobs()
        return self._cumulative_logprob

    def output(self, is_delta: bool) -> CompletionOutput:
        """Return the output of the sample: only the new part if `is_delta`, else all of it."""
        if self._new_logprobs:
            self._convert_logprobs()
        first_token = self._num_sent_tokens if is_delta else 0
        first_char = self._num_sent_chars if is_delta else 0
        self._num_sent_tokens = len(self.token_ids)
        self._is_end_sent = self.finish_reason is not None
        text = ""
        if self._text is not None:
            self._num_sent_chars = self._text.num_shown
            text = self._text.text[first_char : self._num_sent_chars]
        token_ids = self.token_ids[first_token:]
        if self.request.params.logprobs is None:
            return CompletionOutput(
                self.index,
                text,
                token_ids,
                self._cumulative_logprob if self.request.is_ranked else None,
                None,
                self.finish_reason,
                self.stop_reason,
                is_refused=self.is_refused,
            )
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self._cumulative_logprob,
            logprobs=self._logprobs[first_token:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            is_refused=self.is_refused,
        )

    def _set_end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.finish_reason = str(reason)
        self.stop_reason = stop_reason
        self.request.num_running -= 1

    def _convert_logprobs(self) -> None:
        num_top = self.request.params.logprobs
        for rows in self._new_logprobs:
            if num_top is None:  # only the sum is needed, to rank the samples
                self._cumulative_logprob += float(rows.logprobs[:, 0].sum())
                continue
            for entries in to_dicts(rows, num_top, self._text_of):
                self._logprobs.append(entries)
                self._cumulative_logprob += next(iter(entries.values())).logprob
        self._new_logprobs.clear()


class RequestState:
    """The output of a user's request: its samples and their shared state.

    Args:
        request_id: id that the user gave.
        prompt: text of the prompt, or None.
        prompt_token_ids: tokens of the prompt.
        params: parameters of the user.
        arrival_time: arrival in seconds of `time.time()`.

    Attributes:
        is_streamed: the user gets an output after every step.
        is_ranked: only the most likely of its samples are returned.
        samples: ordered by index.
        num_running: samples that have not ended.
        num_cached_tokens: None until it is known.
        replica: index of the replica that computes the request.
        has_known_prompt: False if the tokens of the prompt are only placeholders of embeddings.
        lora_request: adapter of the request, if any.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        arrival_time: float,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.is_streamed = params.output_kind is not RequestOutputKind.FINAL_ONLY
        self.is_ranked = params.is_ranked
        self.samples: list[SampleState] = []
        self.num_running = 0
        self.metrics = RequestMetrics(arrival_time)
        self.num_cached_tokens: int | None = None
        self.replica = 0
        self.has_known_prompt = True
        self.lora_request: LoRARequest | None = None
        self._is_delta = params.output_kind is RequestOutputKind.DELTA
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]  # nothing predicts the first token

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self._prompt_token_ids)

    def add_sample(self, sample: SampleState) -> None:
        """Add a sample that will run."""
        self.samples.append(sample)
        self.num_running += 1

    def add_prompt_logprobs(self, rows: LogprobRows, text_of: TextOf | None) -> None:
        """Append the log-probabilities of the prompt's next positions."""
        if self.params.prompt_logprobs is not None and self._prompt_logprobs is not None:
            self._prompt_logprobs += to_dicts(rows, self.params.prompt_logprobs, text_of)

    def output(self) -> AnyRequestOutput:
        """Return the current output for the user; with deltas, only samples with new data."""
        samples, prompt_logprobs = self.samples, self._prompt_logprobs
        is_delta, is_finished = self._is_delta, self.num_running == 0
        if is_delta and (len(samples) > 1 or not samples[0].has_news):
            samples = [sample for sample in samples if sample.has_news]
        if self.is_ranked:
            samples = self._best()
        if is_delta and prompt_logprobs is not None:
            prompt_logprobs = self._whole_prompt_logprobs_once(is_finished)
        output = RequestOutput(
            self.request_id,
            self._prompt,
            self._prompt_token_ids if self.has_known_prompt else None,
            prompt_logprobs,
            [sample.output(is_delta) for sample in samples],
            is_finished,
            self.metrics,
            self.lora_request,
        )
        output.num_cached_tokens = self.num_cached_tokens
        if self.is_ranked:
            for index, best in enumerate(output.outputs):
                best.index = index
            output.num_dropped_tokens = self._num_tokens() - sum(
                len(best.token_ids) for best in output.outputs
            )
        return output

    def _best(self) -> list[SampleState]:
        """Return the `n` most likely samples, best first; failed samples are last."""
        ranked = sorted(
            self.samples,
            key=lambda sample: (
                sample.finish_reason == str(FinishReason.ERROR),
                -sample.cumulative_logprob,
            ),
        )
        return ranked[: self.params.n]

    def _num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    def _whole_prompt_logprobs_once(
        self, is_finished: bool
    ) -> list[dict[int, Logprob] | None] | None:
        found = self._prompt_logprobs
        if found is None or (len(found) < len(self._prompt_token_ids) and not is_finished):
            return None
        self._prompt_logprobs = None
        return found


class PoolingState(RequestState):
    """The output of a pooling request: one result at its end. Its only sample has no tokens.

    Attributes:
        result: [values] or [tokens, values]; None: no result, or not yet.
    """

    result: FloatArray | None = None

    def output(self) -> AnyRequestOutput:
        """Return the output with the result, or with the reason why there is none."""
        error = None
        if self.result is None:
            reason = self.samples[0].stop_reason
            error = _NO_RESULT if reason is None else str(reason)
        return PoolingRequestOutput(
            request_id=self.request_id,
            outputs=PoolingOutput([] if self.result is None else self.result),
            prompt_token_ids=self._prompt_token_ids,
            finished=True,
            num_cached_tokens=self.num_cached_tokens or 0,
            error=error,
        )
