"""Check each kind of sampling against the host's sampler on the same logits."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from vllm.hpu_check.check import MAX_STEP_S, Comparison, Outcome, ran_on_host, slow_call
from vllm.hpu_check.stopwatch import shortest_s
from vllm.messages import EngineRequest
from vllm.platforms.habana.bridge import HabanaBridge
from vllm.sample.features import PLAIN_PARAMS, Param
from vllm.sample.sampler import Sampler, SamplerOutput
from vllm.sample.state import SamplingState
from vllm.sampling_params import NUMBERS, NumberRange, SamplingParams

_NUM_ROWS, _VOCAB_SIZE, _NUM_LOGPROBS = 32, 4096, 5
_PROMPT, _OUTPUT = [3, 5, 8], [13, 21, 13]
MAX_OTHER_TOKENS = 1
"""Rows of a random kind that may get another token than on the host: an approximate exponent can
decide a draw that is close."""


def _strict_value(number: NumberRange) -> float:
    """Return a value of a parameter that removes tokens from the distribution."""
    smallest = number.at_least or 0.0
    return smallest + (0.3 * (number.at_most - smallest) if number.at_most is not None else 1.0)


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.8},
    "top-k": {"temperature": 1.5, "top_k": 4},
    **{
        field.replace("_", "-"): {"temperature": 1.5, field: _strict_value(NUMBERS[field])}
        for param, field in PLAIN_PARAMS
        if param is not Param.TEMPERATURE
    },
    "penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.5,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
    },
    "allowed tokens": {"temperature": 0.8, "allowed_token_ids": list(range(7, 4096, 64))},
    "logprobs": {"temperature": 0.0, "logprobs": _NUM_LOGPROBS},
}
"""Kind -> sampling parameters of a request."""


@dataclass(frozen=True)
class _Sampled:
    """Sampling results on the host."""

    token_ids: list[int]
    output: SamplerOutput


def check_sampling(bridge: HabanaBridge, kind: str) -> Outcome:
    """Check the tokens of some requests and, if they are requested, their log-probabilities."""
    logits = torch.randn(_NUM_ROWS, _VOCAB_SIZE) * 2
    # Raise the logits of tokens with penalties, so that the penalties change the result.
    logits[:, _PROMPT + _OUTPUT] += 7
    logits = logits.bfloat16()
    before = bridge.counters().cpu_fallbacks
    run = partial(
        _sample, logits.to(bridge.device), kind, Sampler(None, bridge.mark_step), is_static=True
    )
    got = run()
    want = _sample(logits, kind, Sampler(None), is_static=False)
    if (fallback := ran_on_host(bridge, before)) is not None:
        return fallback
    if (slow := slow_call(kind, shortest_s(bridge, run), MAX_STEP_S)) is not None:
        return Outcome("fail", slow)
    others = [row for row in range(_NUM_ROWS) if got.token_ids[row] != want.token_ids[row]]
    allowed = MAX_OTHER_TOKENS if KINDS[kind]["temperature"] else 0
    if len(others) > allowed:
        row = others[0]
        return Outcome(
            "fail",
            f"request {row} got token {got.token_ids[row]}, on the host {want.token_ids[row]} "
            f"({len(others)} of {_NUM_ROWS} requests differ)",
        )
    note = f"{_NUM_ROWS - len(others)} of {_NUM_ROWS} requests have the same token as on the host"
    return _compare_logprobs(got, want, note)


def _compare_logprobs(got: _Sampled, want: _Sampled, note: str) -> Outcome:
    on_card, on_host = got.output.logprobs, want.output.logprobs
    if on_card is None or on_host is None:
        return Outcome("pass", note)
    comparison = Comparison()
    width = 1 + _NUM_LOGPROBS  # the card may return more columns
    comparison.add("log-probabilities", on_card.logprobs[:, :width], on_host.logprobs[:, :width])
    comparison.add("ranks", on_card.ranks.float(), on_host.ranks)
    return comparison.outcome(note)


def _sample(logits: torch.Tensor, kind: str, sampler: Sampler, *, is_static: bool) -> _Sampled:
    state = SamplingState(
        _NUM_ROWS,
        _VOCAB_SIZE,
        logits.device,
        static_shapes=is_static,
        max_model_len=128,
        max_logprobs=20,
    )
    for row in range(_NUM_ROWS):
        state.add(row, _request(row, KINDS[kind]), _OUTPUT)
    rows = np.arange(_NUM_ROWS, dtype=np.int32)
    output = sampler(logits, state.metadata(rows, np.full(_NUM_ROWS, len(_OUTPUT), np.int32)))
    return _Sampled(output.host_ids.cpu().tolist(), output)


def _request(row: int, params: dict[str, Any]) -> EngineRequest:
    return EngineRequest(
        request_id=str(row),
        prompt_token_ids=_PROMPT,
        sampling_params=SamplingParams(**params),
        seed=row,
        eos_token_id=None,
        max_total_tokens=128,
        arrival_time=0.0,
    )
