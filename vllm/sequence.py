"""The class `Logprob` and related names, under the module name of the V0 engine."""

from vllm.outputs import Logprob, RequestMetrics

PromptLogprobs = list[dict[int, Logprob] | None]
"""Per position of a prompt: token id -> Logprob; None for the first."""
SampleLogprobs = list[dict[int, Logprob]]
"""Per position of an output: token id -> Logprob, the sampled token first."""

__all__ = ["Logprob", "PromptLogprobs", "RequestMetrics", "SampleLogprobs"]
