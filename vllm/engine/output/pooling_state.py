"""Keep the output state of a request to a pooling model."""

from vllm.engine.output.output_state import RequestState
from vllm.messages import FloatArray
from vllm.outputs import AnyRequestOutput, PoolingOutput, PoolingRequestOutput

_NO_RESULT = "the request was ended before it had a result"


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
