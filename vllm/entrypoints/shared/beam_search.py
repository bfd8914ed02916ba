"""Run beam search as a loop of one-token requests; the prefix cache avoids recomputation."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from vllm.engine.input.media_placer import PlacedMedia
from vllm.errors import RequestError
from vllm.inputs import TokensPrompt
from vllm.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from vllm.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Run = Callable[[list[TokensPrompt], SamplingParams, list[int]], list[RequestOutput]]
"""Function that runs prompts, each with the index of the prompt that it continues."""
RunAsync = Callable[[list[TokensPrompt], SamplingParams, list[int]], Awaitable[list[RequestOutput]]]
_Rank = tuple[int, float, float]
"""Sort key of beams by score, see `_rank`."""


@dataclass
class _Search:
    """State of the beam search for one prompt."""

    index: int
    """Index of the prompt."""
    max_tokens: int
    prompt: TokensPrompt
    """Without its text, which the engine does not need."""
    live: list[BeamSearchSequence]
    """Unfinished beams, all of the same length, the most likely first."""
    done: list[BeamSearchSequence] = field(default_factory=list)


def check_beam_width(width: int, max_logprobs: int, *, name: str, limit: str) -> None:
    """Refuse a beam search that needs more log-probabilities per token than the engine returns.

    Args:
        width: number of beams to keep.
        max_logprobs: maximum number that the engine returns.
        name, limit: names of the two settings, as the user writes them.

    Raises:
        RequestError: (a ValueError) the width is too large; names the largest possible one.
    """
    needed, widest = _num_logprobs(width), max_logprobs // 2
    if needed > max_logprobs:
        fewer = f"use {name} up to {widest}, or " if widest else ""
        raise RequestError(
            f"beam search with {name} = {width} needs {needed} log-probabilities per token, and "
            f"{limit} is {max_logprobs}: {fewer}raise {limit} to {needed}",
            param=name,
        )


def search_beams(
    prompts: Sequence[TokensPrompt],
    params: BeamSearchParams,
    run: Run,
    *,
    end_tokens: frozenset[int],
    max_model_len: int,
    tokenizer: "PreTrainedTokenizerBase | None",
) -> list[BeamSearchOutput]:
    """Run a beam search for all prompts at the same time.

    The score of a sequence is its summed log-probability divided by `(output tokens) **
    length_penalty`, an end token included, as in transformers; the penalty may be any finite
    number. It ends with a token of `end_tokens` (finish reason "stop") or after `max_tokens` or at
    `max_model_len` ("length").

    Args:
        prompts: prompts with at least one token id each. Beams keep all other fields of a prompt.
        params: width, length and scoring.
        run: generates one token for each prompt, with the requested log-probabilities.
        end_tokens: tokens that end a sequence; empty: none does.
        max_model_len: maximum number of prompt and output tokens of a sequence.
        tokenizer: creates the text of the sequences; None: they have no text.
    """

    async def run_here(*work: Any) -> list[RequestOutput]:
        return run(*work)

    search = search_beams_async(
        *(prompts, params, run_here),
        end_tokens=end_tokens,
        max_model_len=max_model_len,
        tokenizer=tokenizer,
    )
    try:
        search.send(None)
    except StopIteration as end:
        return cast(list[BeamSearchOutput], end.value)
    raise AssertionError("the search waits for nothing, because `run` does not")


async def search_beams_async(
    prompts: Sequence[TokensPrompt],
    params: BeamSearchParams,
    run: RunAsync,
    *,
    end_tokens: frozenset[int],
    max_model_len: int,
    tokenizer: "PreTrainedTokenizerBase | None",
) -> list[BeamSearchOutput]:
    """Run a beam search like `search_beams`, with an asynchronous `run`."""
    step = SamplingParams(
        max_tokens=1,
        logprobs=_num_logprobs(params.beam_width),
        temperature=params.temperature,
        ignore_eos=params.ignore_eos,
        detokenize=tokenizer is not None,  # log-probabilities need the text of tokens
    )
    searches = [_start(index, each, params, max_model_len) for index, each in enumerate(prompts)]
    active = searches
    while active:
        owners = [search.index for search in active for _ in search.live]
        prompts_now: list[TokensPrompt] = [
            {**search.prompt, "prompt_token_ids": beam.tokens}
            for search in active
            for beam in search.live
        ]
        outputs = iter(await run(prompts_now, step, owners))
        for search in active:
            _advance(search, [next(outputs) for _ in search.live], params, end_tokens)
        active = [search for search in active if search.live]
    return [_result(search, params, tokenizer) for search in searches]


def _num_logprobs(width: int) -> int:
    """Return the number of candidates per beam: enough that end tokens cannot use up all of
    them.
    """
    return 2 * width


def _start(
    index: int, prompt: TokensPrompt, params: BeamSearchParams, max_model_len: int
) -> _Search:
    token_ids = prompt["prompt_token_ids"]
    own = cast(TokensPrompt, {key: value for key, value in prompt.items() if key != "prompt"})
    # The output of a beam is text: an image placeholder in it refers to no image.
    own.setdefault("media", PlacedMedia(token_ids, (), (), None))
    max_tokens = min(params.max_tokens, max_model_len - len(token_ids))
    beam = BeamSearchSequence(tokens=list(token_ids), logprobs=[])
    return _Search(index, max_tokens, own, [beam])


def _advance(
    search: _Search,
    outputs: Sequence[RequestOutput],
    params: BeamSearchParams,
    end_tokens: frozenset[int],
) -> None:
    """Extend every live beam by one token, and keep the best results."""
    grown: list[BeamSearchSequence] = []
    for beam, output in zip(search.live, outputs, strict=True):
        sample = output.outputs[0]
        if not sample.logprobs and sample.is_refused:
            raise RequestError(str(sample.stop_reason), param="lora_request")
        if not sample.logprobs:
            raise RuntimeError(f"a step of the beam search failed: {sample.stop_reason}")
        for token_id, logprob in sample.logprobs[0].items():
            child = BeamSearchSequence(
                tokens=[*beam.tokens, token_id],
                logprobs=[*beam.logprobs, sample.logprobs[0]],
                cum_logprob=beam.cum_logprob + logprob.logprob,
            )
            if token_id in end_tokens:
                child.finish_reason, child.stop_reason = "stop", token_id
            grown.append(child)
    grown.sort(key=lambda child: child.cum_logprob, reverse=True)
    search.done += [child for child in grown if child.finish_reason is not None]
    search.live = [child for child in grown if child.finish_reason is None][: params.beam_width]
    num_tokens = len(search.live[0].logprobs) if search.live else 0
    if num_tokens >= search.max_tokens:
        for child in search.live:
            child.finish_reason = "length"
        search.done += search.live
        search.live = []
    elif search.live and _is_decided(search, params, num_tokens):
        search.live = []


def _is_decided(search: _Search, params: BeamSearchParams, num_tokens: int) -> bool:
    """Return whether the search is finished, because no live beam can still become one of the best:
    its summed log-probability can only decrease.
    """
    if len(search.done) < params.beam_width:
        return False
    best_length = search.max_tokens if params.length_penalty > 0 else num_tokens + 1
    bound = _rank(search.live[0].cum_logprob, best_length, params.length_penalty)
    ranks = sorted((_rank_of(beam, params) for beam in search.done), reverse=True)
    return ranks[params.beam_width - 1] >= bound


def _rank_of(beam: BeamSearchSequence, params: BeamSearchParams) -> _Rank:
    return _rank(beam.cum_logprob, len(beam.logprobs), params.length_penalty)


def _rank(cum_logprob: float, num_tokens: int, length_penalty: float) -> _Rank:
    """Return a sort key that orders sequences by the score `cum_logprob / num_tokens **
    length_penalty`.

    The power can be too large or too small for a float, so logarithms of the magnitudes are
    compared. They are divided by the size of the penalty if it is above 1, which keeps the order.
    Equal magnitudes are ordered by the sums.
    """
    if cum_logprob == 0:
        return 0, 0.0, 0.0
    size = max(1.0, abs(length_penalty))
    magnitude = math.log(abs(cum_logprob)) / size - length_penalty / size * math.log(num_tokens)
    sign = 1 if cum_logprob > 0 else -1
    return sign, sign * magnitude, cum_logprob


def _result(
    search: _Search, params: BeamSearchParams, tokenizer: "PreTrainedTokenizerBase | None"
) -> BeamSearchOutput:
    best = sorted(search.done, key=lambda beam: _rank_of(beam, params), reverse=True)
    for beam in best[: params.beam_width]:
        if beam.finish_reason == "stop" and not params.include_stop_str_in_output:
            beam.tokens.pop()
        if tokenizer is not None:
            beam.text = cast(str, tokenizer.decode(beam.tokens))
    return BeamSearchOutput(best[: params.beam_width])
